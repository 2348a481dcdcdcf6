"""A classifier on feature arrays in memory: RoPAWS's head, or its closed form, beside logistic regression."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.batch import Outputs, Share
from ropaws.data.augment import AugmentConfig, Normalization
from ropaws.data.features import FeatureRows
from ropaws.data.loaders import BatchStream, PoolPass, TrainingData
from ropaws.data.samplers import SupportConfig
from ropaws.methods import LabeledEmbeddings, RoPAWS
from ropaws.methods.pool_prior import PoolPrior
from ropaws.methods.propagation import VOTERS, Kernel, Voters, ask_voters, choose_voters, solve_voters
from ropaws.methods.ropaws import pool_prior
from ropaws.methods.soft_nn import (
    TYPICAL_PRIOR,
    class_probabilities,
    fitted_prior_temperature,
    leave_one_out,
    nearest_same_class,
)
from ropaws.models import Encoder
from ropaws.models.heads import KnownFeatures, linear_head
from ropaws.training.loop import fit
from ropaws.training.optim import OptimConfig, build_optimizer, learning_rate

TEMPERATURES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.2, 0.5)  # to choose from
HEAD_TEMPERATURE = 0.1
AS_GOOD = 0.02  # difference of mean log likelihood that does not count
JUDGES = 4096  # labeled rows that choose, at most
# How a head on features is trained, found on data that is in no table (docs/features.md).
HEAD_OPTIM = OptimConfig(name="adam", peak=1e-3, start=1e-3, end=0.0, warmup=0, weight_decay=0.0)
HEAD_STEPS = 300
HEAD_BATCH = 256
HEAD_SHARPEN = 0.5
SUPPORT_VIEWS = 4
SUPPORT_IMAGES = 80  # labeled images per step to aim for
MOST_CLASSES = 100  # per step
FOLDS = 3  # of the labels, to see whether a head helps


class Labeled(NamedTuple):
    """The labeled ones among feature rows."""

    rows: Tensor  # (l,) positions
    labels: Tensor  # (l,) class of each
    classes: int


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """Of a FeatureClassifier; see RoPAWSClassifier."""

    head: bool = True
    prior: Literal["pool", "distance"] | None = "pool"
    temperature: float | None = None  # None: chosen by the labels
    prior_temperature: float | None = None  # of the prior by distance; None: chosen by the labels
    label_ratio: float = 5.0
    regression_share: float = 0.5
    voters: int | None = VOTERS
    steps: int = HEAD_STEPS
    seed: int = 0


def support_of(counts: list[int], *, views: int = SUPPORT_VIEWS) -> SupportConfig:
    """The labeled batch that suits these numbers of labels per class."""
    classes = min(len(counts), MOST_CLASSES)
    typical = sorted(counts)[len(counts) // 2]
    images = max(1, min(16, typical, SUPPORT_IMAGES // classes))
    return SupportConfig(
        classes=None if classes == len(counts) else classes, images_per_class=images, views=views
    )


def head_method(settings: ClassifierSettings) -> RoPAWS:
    """How a head on features is trained."""
    method = RoPAWS(sharpen_temperature=HEAD_SHARPEN, label_ratio=settings.label_ratio, reweight_entropy=True)
    if settings.prior == "pool":
        return replace(method, prior="pool")
    temperature = settings.prior_temperature or "auto"
    return replace(method, in_domain_prior=settings.prior is not None, prior_temperature=temperature)


def train_head(features: FeatureRows, labeled: Labeled, settings: ClassifierSettings) -> Encoder:
    """A linear head that starts as the features are, trained by RoPAWS.

    features: centered, in their main directions
    """
    dims, count, seed, steps = features.shape[1], len(features), settings.seed, settings.steps
    several = features.random_views is not None
    method = head_method(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(KnownFeatures(dims), linear_head(dims, dims), nn.Identity(), frozen=True)
    nn.init.eye_(encoder.projection[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(encoder.projection[0].bias)  # type: ignore[arg-type]
    model = method.build(encoder, classes=labeled.classes, pool=count)
    augment = AugmentConfig(small_crops=2 if several else 0)
    counts = torch.bincount(labeled.labels, minlength=labeled.classes).tolist()
    stream = BatchStream(
        _training_data(features, labeled),
        method.views(augment),
        method.labeled_view(augment),
        support_of(counts, views=SUPPORT_VIEWS if several else 1),
        min(HEAD_BATCH, count),
        seed,
        augment.size,
    )
    rate = learning_rate(HEAD_OPTIM, steps)
    optimizer = build_optimizer(model, HEAD_OPTIM)
    for _ in fit(model, method, stream.batches(0, steps), optimizer, rate, pool_pass=stream.pool_pass):
        pass
    return encoder.eval()


def _training_data(features: FeatureRows, labeled: Labeled) -> TrainingData:
    return TrainingData(features, labeled.rows, labeled.labels, Normalization((0.0,), (1.0,)))


class FeatureClassifier:
    """Classes and in-domain probabilities of feature rows, from a few labels and all rows together.

    Class probabilities are the geometric mean of logistic regression on the labels and of RoPAWS: the soft
    nearest-neighbor classifier of a trained head, or labels propagated through the rows as they are.

    Args:
        features: Centered rows in their main directions, and views of them if there are any.
        labeled: The labeled ones.
        settings: What to fit.
    """

    def __init__(self, features: FeatureRows, labeled: Labeled, settings: ClassifierSettings) -> None:
        self.settings = settings
        self.classes = labeled.classes
        self.head = train_head(features, labeled, settings) if settings.head else None
        if self.head is not None and settings.prior == "pool":
            self.prior = pool_prior(self.head)
        else:
            self.prior = self._fitted_prior(features, labeled)
        self.support = LabeledEmbeddings(self.embed(features[labeled.rows]), labeled.labels, labeled.classes)
        self.temperature = self._chosen_temperature()
        self.prior_temperature = self._chosen_prior_temperature()
        self.voters = None if settings.head else self._solved_voters(features, labeled)

    def embed(self, features: Tensor) -> Tensor:
        """Unit rows in which neighbors are compared.   (n, d)  ->  (n, d)"""
        if self.head is None:
            return F.normalize(features, dim=1)
        with torch.no_grad():
            embedded: Tensor = self.head([features])[0].h
        return embedded

    def predict(self, features: Tensor) -> Outputs:
        """What the classifier says of rows.   (n, d)  ->  Outputs of n rows; probs are given in-class"""
        judged = self.prior(features)
        embedding = self.embed(features)
        log_probs = self._neighbor_probs(embedding).clamp_min(eq.TINY).log()
        probs = torch.lerp(log_probs, judged.log_probs, self.settings.regression_share).softmax(dim=1)
        if self.settings.prior == "pool":
            return Outputs(embedding, probs, judged.in_domain, judged.score)
        in_domain = torch.ones(len(features))
        if self.prior_temperature is not None:
            in_domain = eq.in_domain_prior(
                embedding, self.support.embeddings, temperature=self.prior_temperature
            )
        return Outputs(embedding, probs, in_domain, in_domain)

    @property
    def share(self) -> Share | None:
        """Estimated share of the rows that belongs to the classes."""
        return self.prior.estimated_share() if self.settings.prior == "pool" else None

    def _fitted_prior(self, features: FeatureRows, labeled: Labeled) -> PoolPrior:
        prior = PoolPrior(features.shape[1], labeled.classes, len(features))
        same = Encoder(KnownFeatures(features.shape[1]), nn.Sequential(), nn.Identity(), frozen=True)
        with torch.no_grad():
            prior.fit(same, PoolPass(_training_data(features, labeled), 1, 0, torch.device("cpu")))
        return prior

    def _chosen_temperature(self) -> float:
        """The most likely one, each labeled row predicted by the others; a head was trained with its own."""
        if self.settings.temperature is not None:
            return self.settings.temperature
        if self.head is not None:
            return HEAD_TEMPERATURE
        labels = self.support.labels
        rows = (torch.bincount(labels)[labels] > 1).nonzero().squeeze(1)[:JUDGES]
        if len(rows) < 2:
            return HEAD_TEMPERATURE
        labels = labels[rows]
        judges = LabeledEmbeddings(self.support.embeddings[rows], labels, self.classes)

        def log_likelihood(temperature: float) -> float:
            probs = leave_one_out(judges, temperature=temperature)
            return float(probs.gather(1, labels[:, None]).clamp_min(1e-6).log().mean())

        found = {temperature: log_likelihood(temperature) for temperature in TEMPERATURES}
        # Among those that do as well the widest kernel, which hears of more neighbors.
        return max(t for t, value in found.items() if value >= max(found.values()) - AS_GOOD)

    def _chosen_prior_temperature(self) -> float | None:
        if self.settings.prior != "distance":
            return None
        if self.settings.prior_temperature is not None:
            return self.settings.prior_temperature
        nearest = nearest_same_class(self.support.embeddings, self.support.labels)
        return fitted_prior_temperature(nearest, TYPICAL_PRIOR)

    @property
    def _kernel(self) -> Kernel:
        return Kernel(
            temperature=self.temperature,
            prior_temperature=self.prior_temperature,
            label_ratio=self.settings.label_ratio,
        )

    def _solved_voters(self, features: FeatureRows, labeled: Labeled) -> Voters | None:
        """The unlabeled rows that vote, solved to the fixed point; None where there are none."""
        unlabeled = torch.ones(len(features), dtype=torch.bool)
        unlabeled[labeled.rows] = False
        rows = unlabeled.nonzero().squeeze(1)
        if len(rows) == 0:
            return None
        chosen = rows[choose_voters(len(rows), self.settings.voters, seed=self.settings.seed)]
        prior = self.prior.prior[chosen] if self.settings.prior == "pool" else None
        points = F.normalize(features[chosen], dim=1)
        return solve_voters(points, self.support.embeddings, self.support.one_hot, self._kernel, prior=prior)

    def _neighbor_probs(self, embedding: Tensor) -> Tensor:
        """Of the classes, given in-class: by the labels, or by the labels and the voters."""
        if self.voters is None:
            return class_probabilities(embedding, self.support, temperature=self.temperature)
        kernel = replace(self._kernel, prior_temperature=None)  # it scales a row, and the classes alike
        mass = ask_voters(embedding, self.support.embeddings, self.support.one_hot, self.voters, kernel)
        return mass / mass.sum(dim=1, keepdim=True).clamp_min(eq.TINY)


# Does the head help? The labels alone can tell, if there are two of each class.


class HeadTrial(NamedTuple):
    """Whether to train a head."""

    use: bool
    reason: str


def try_head(features: FeatureRows, labeled: Labeled, settings: ClassifierSettings) -> HeadTrial:
    """Compare the classifier with and without a head on labels held out; the held-out rows stay, unlabeled.

    The head stays unless it is worse by more than one standard error: what it gains is most often smaller
    than what a few labels can show.
    """
    if labeled.classes < 2:
        return HeadTrial(False, "there is one class only")
    if len(labeled.rows) == len(features):
        return HeadTrial(False, "there is no unlabeled row to learn from")
    fewest = int(torch.bincount(labeled.labels, minlength=labeled.classes).min())
    if fewest < 2:
        return HeadTrial(True, "a class has one label only, so labels cannot be held out to compare")
    differences = []
    for held in _folds(labeled.labels, min(FOLDS, fewest)):
        kept = torch.ones(len(labeled.rows), dtype=torch.bool)
        kept[held] = False
        rest = Labeled(labeled.rows[kept], labeled.labels[kept], labeled.classes)
        right = []
        for head in (True, False):
            short = replace(settings, head=head, steps=max(1, settings.steps // 2))
            found = FeatureClassifier(features, rest, short).predict(features[labeled.rows[held]])
            right.append((found.probs.argmax(dim=1) == labeled.labels[held]).float())
        differences.append(right[0] - right[1])
    difference = torch.cat(differences)
    gain, error = float(difference.mean()), float(difference.std() / len(difference) ** 0.5)
    figures = f"with a head {100 * gain:+.1f} points (standard error {100 * error:.1f}) on labels held out"
    return HeadTrial(gain >= -error, figures)


def _folds(labels: Tensor, count: int) -> list[Tensor]:
    """Parts with as equal a share of every class as can be."""
    by_class = labels.argsort(stable=True)
    return [by_class[start::count] for start in range(count)]
