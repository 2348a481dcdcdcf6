"""A classifier on feature arrays in memory: RoPAWS's head, or its closed form, beside logistic regression."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.batch import Outputs, Share
from ropaws.data.augment import AugmentConfig, Normalization
from ropaws.data.corpus import Images
from ropaws.data.features import FeatureRows, principal_components, unit_mean
from ropaws.data.loaders import BatchStream, PoolPass, TrainingData
from ropaws.methods import LabeledEmbeddings, Method, RoPAWS
from ropaws.methods.confidence import mixed_probs
from ropaws.methods.judged import pool_prior
from ropaws.methods.pool_prior import PoolPrior
from ropaws.methods.propagation import VOTERS, Kernel, choose_voters
from ropaws.methods.soft_nn import (
    TYPICAL_PRIOR,
    class_probabilities,
    fitted_prior_temperature,
    leave_one_out,
    nearest_same_class,
)
from ropaws.models import Encoder
from ropaws.models.directed_features import in_main_directions
from ropaws.models.heads import CenteredHead, ComponentsHead, KnownFeatures, linear_head
from ropaws.training import feature_head
from ropaws.training.feature_propagation import Propagation
from ropaws.training.loop import fit
from ropaws.training.optim import build_optimizer, learning_rate

TEMPERATURES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.2, 0.5)  # to choose from
AS_GOOD = 0.02  # difference of mean log likelihood that does not count
JUDGES = 4096  # labeled rows that choose, at most
FOLDS = 2  # of the labels, to see whether a head helps
ERRORS = 2.0  # standard errors by which it has to be worse to be given up
TRIAL = 3  # a trial takes one of so many of the steps


class LabeledRows(NamedTuple):
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
    steps: int = feature_head.STEPS
    seed: int = 0


def head_method(settings: ClassifierSettings) -> RoPAWS:
    """How a head on features is trained."""
    method = replace(
        feature_head.METHOD, label_ratio=settings.label_ratio, regression_share=settings.regression_share
    )
    if settings.prior == "pool":
        return method
    return replace(
        method,
        prior="distance",
        prior_temperature=settings.prior_temperature or "auto",
        in_domain_prior=settings.prior is not None,
        reweight_entropy=True,
    )


def start_encoder(features: FeatureRows) -> Encoder:
    """A head on features that has not been trained: neighbors are those of the features themselves."""
    dims = features.shape[1]
    projection = linear_head(dims, min(feature_head.DIMS, dims))
    encoder = Encoder(KnownFeatures(dims), projection, nn.Identity(), frozen=True)
    head = projection[0]
    assert isinstance(head, ComponentsHead)
    head.start(*principal_components(features, head.out_features))
    return encoder


def centered_encoder(features: FeatureRows) -> Encoder:
    """The same neighbors, of an encoder that is not to be trained."""
    head = nn.Sequential(CenteredHead(unit_mean(features).float()))
    return Encoder(KnownFeatures(features.shape[1]), head, nn.Identity(), frozen=True)


def train_head(
    encoder: Encoder,
    features: FeatureRows,
    labeled: LabeledRows,
    method: Method,
    *,
    steps: int,
    seed: int,
    after_step: Callable[[int], object] = lambda _: None,
) -> nn.Module:
    """Train the head of an encoder that start_encoder made. Returns the model, in evaluation mode.

    after_step: called with the number of steps that are done; an error that it raises ends the training.
    """
    several = features.random_views is not None
    model = method.build(encoder, classes=labeled.classes, pool=len(features))
    augment = AugmentConfig(small_crops=2 if several else 0)
    counts = torch.bincount(labeled.labels, minlength=labeled.classes).tolist()
    stream = BatchStream(
        _training_data(in_main_directions(features, encoder), labeled),
        method.views(augment),
        method.labeled_view(augment),
        feature_head.head_support(counts, views=feature_head.SUPPORT_VIEWS if several else 1),
        min(feature_head.BATCH, len(features)),
        seed,
        augment.size,
    )
    rate = learning_rate(feature_head.OPTIM, steps)
    optimizer = build_optimizer(model, feature_head.OPTIM)
    for taken in fit(model, method, stream.batches(0, steps), optimizer, rate, pool_pass=stream.pool_pass):
        after_step(taken.step + 1)
    return model.eval()


def _training_data(features: Images, labeled: LabeledRows) -> TrainingData:
    return TrainingData(features, labeled.rows, labeled.labels, Normalization((0.0,), (1.0,)))


def _pool_pass(features: FeatureRows, labeled: LabeledRows) -> PoolPass:
    return PoolPass(_training_data(features, labeled), 1, 0, torch.device("cpu"))


class InDomain(NamedTuple):
    """Of rows."""

    in_domain: Tensor  # (n,) probability of belonging to any class
    score: Tensor  # (n,) the score behind it, which ranks rows


class FeatureClassifier:
    """Classes and in-domain probabilities of feature rows, from a few labels and all rows together.

    Class probabilities are the geometric mean of logistic regression on the labels and of RoPAWS: the soft
    nearest-neighbor classifier of a trained head, or labels propagated through the rows as they are.

    Args:
        features: Rows, and views of them if there are any.
        labeled: The labeled ones.
        settings: What to fit.
        after_step: As for train_head.
        prior: Of another classifier on the same rows and labels: it depends on nothing else.
    """

    def __init__(
        self,
        features: FeatureRows,
        labeled: LabeledRows,
        settings: ClassifierSettings,
        *,
        after_step: Callable[[int], object] = lambda _: None,
        prior: PoolPrior | None = None,
    ) -> None:
        self.settings = settings
        self.classes = labeled.classes
        self.encoder = start_encoder(features) if settings.head else centered_encoder(features)
        if settings.head:
            train_head(
                self.encoder,
                features,
                labeled,
                head_method(settings),
                steps=settings.steps,
                seed=settings.seed,
                after_step=after_step,
            )
        self.prior = deepcopy(prior) if prior is not None else self._features_alone(features, labeled)
        self.support = LabeledEmbeddings(self.embed(features[labeled.rows]), labeled.labels, labeled.classes)
        self.temperature = self._chosen_temperature()
        self.prior_temperature = self._chosen_prior_temperature()
        self.propagation = None if settings.head else self._propagated(features, labeled)
        self._calibrate(features, labeled)

    def embed(self, features: Tensor) -> Tensor:
        """Unit rows in which neighbors are compared.   (n, d)  ->  (n, e)"""
        with torch.no_grad():
            return F.normalize(self.encoder.trained_features(features), dim=1)

    def predict(self, features: Tensor) -> Outputs:
        """What the classifier says of rows.   (n, d)  ->  Outputs of n rows; probs are given in-class"""
        return Outputs(self.embed(features), self.classify(features), *self.judge(features))

    def classify(self, features: Tensor, learned: Tensor | None = None) -> Tensor:
        """Class probabilities, given in-class.   (n, d)  ->  (n, c)

        learned (n,): where these are rows that it was fitted to, their positions. The answers are the same
        up to the tolerance of the solution, and known already for those that vote.
        """
        probs = self._neighbor_probs(features, learned)
        if self.prior is None:
            return probs
        share, temperature = self.settings.regression_share, self.prior.confidence_temperature
        return mixed_probs(probs, self.prior.log_probs(features), share, temperature)

    def judge(self, features: Tensor) -> InDomain:
        """Whether rows belong to any class.   (n, d)  ->  (n,) each"""
        if self.prior is not None and self.settings.prior == "pool":
            score = self.prior.score(features)
            return InDomain(self.prior.in_domain(score), score)
        if self.prior_temperature is None:
            return InDomain(torch.ones(len(features)), torch.ones(len(features)))
        prior = eq.in_domain_prior(
            self.embed(features), self.support.embeddings, temperature=self.prior_temperature
        )
        return InDomain(prior, prior)

    @property
    def share(self) -> Share | None:
        """Estimated share of the rows that belongs to the classes."""
        if self.prior is None or self.settings.prior != "pool":
            return None
        return self.prior.estimated_share()

    def _features_alone(self, features: FeatureRows, labeled: LabeledRows) -> PoolPrior | None:
        """What the features say on their own; None where neither the prior nor the classes ask for it."""
        if self.settings.prior != "pool" and self.settings.regression_share == 0:
            return None
        if self.settings.head and self.settings.prior == "pool":
            return pool_prior(self.encoder)  # training has fitted it
        prior = PoolPrior(features.shape[1], labeled.classes, len(features))
        with torch.no_grad():
            prior.fit(self.encoder, _pool_pass(features, labeled))
        return prior

    @torch.no_grad()
    def _calibrate(self, features: FeatureRows, labeled: LabeledRows) -> None:
        if self.prior is None:
            return
        rows = self.prior.unlabeled_sample(_pool_pass(features, labeled))
        near = self._neighbor_probs(features[rows], rows)
        self.prior.calibrate(near, features[rows], rows, share=self.settings.regression_share)

    def _chosen_temperature(self) -> float:
        """The most likely one, each labeled row predicted by the others; a head was trained with its own."""
        if self.settings.temperature is not None:
            return self.settings.temperature
        if self.settings.head:
            return feature_head.METHOD.temperature
        labels = self.support.labels
        rows = (torch.bincount(labels)[labels] > 1).nonzero().squeeze(1)[:JUDGES]
        if len(rows) < 2:
            return feature_head.METHOD.temperature
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

    def _propagated(self, features: FeatureRows, labeled: LabeledRows) -> Propagation | None:
        """The unlabeled rows that vote, solved to the fixed point; None where there are none."""
        unlabeled = torch.ones(len(features), dtype=torch.bool)
        unlabeled[labeled.rows] = False
        rows = unlabeled.nonzero().squeeze(1)
        if len(rows) == 0:
            return None
        chosen = rows[choose_voters(len(rows), self.settings.voters, seed=self.settings.seed)]
        prior = None
        if self.prior is not None and self.settings.prior == "pool":
            prior = self.prior.prior[chosen]
        kernel = Kernel(
            temperature=self.temperature,
            prior_temperature=self.prior_temperature,
            label_ratio=self.settings.label_ratio,
        )
        return Propagation.solve(self.embed(features[chosen]), chosen, self.support, kernel, prior)

    def _neighbor_probs(self, features: Tensor, learned: Tensor | None) -> Tensor:
        """Of the classes, given in-class: by the labels, or by the labels and the voters."""
        if self.propagation is None:
            return class_probabilities(self.embed(features), self.support, temperature=self.temperature)
        if learned is None:
            return self.propagation.probs(self.embed(features))
        return self.propagation.learned_probs(learned, lambda some: self.embed(features[some]))


# Does the head help? The labels alone can tell, if there are two of each class.


class HeadTrial(NamedTuple):
    """Whether to train a head."""

    use: bool
    reason: str


def try_head(features: FeatureRows, labeled: LabeledRows, settings: ClassifierSettings) -> HeadTrial:
    """Compare the classifier with and without a head on labels held out; the held-out rows stay, unlabeled.

    The head stays unless it is worse by more than two standard errors. What it gains is most often smaller
    than what a few labels can show: to ask for a gain beyond the error would give it up nearly always, and a
    narrower limit gives it up by chance.
    """
    if labeled.classes < 2:
        return HeadTrial(False, "there is one class only")
    if len(labeled.rows) == len(features):
        return HeadTrial(False, "there is no unlabeled row to learn from")
    fewest = int(torch.bincount(labeled.labels, minlength=labeled.classes).min())
    if fewest < 2:
        return HeadTrial(True, "one label only in some class, so labels cannot be held out to compare")
    differences = []
    for held in _folds(labeled.labels, min(FOLDS, fewest)):
        kept = torch.ones(len(labeled.rows), dtype=torch.bool)
        kept[held] = False
        rest = LabeledRows(labeled.rows[kept], labeled.labels[kept], labeled.classes)
        short = replace(settings, head=True, steps=max(1, settings.steps // TRIAL))
        trained = FeatureClassifier(features, rest, short)
        plain = FeatureClassifier(features, rest, replace(short, head=False), prior=trained.prior)
        asked, truth = features[labeled.rows[held]], labeled.labels[held]
        right = [(model.classify(asked).argmax(dim=1) == truth).float() for model in (trained, plain)]
        differences.append(right[0] - right[1])
    difference = torch.cat(differences)
    gain, error = float(difference.mean()), float(difference.std() / len(difference) ** 0.5)
    figures = f"with a head {100 * gain:+.1f} points (standard error {100 * error:.1f}) on labels held out"
    return HeadTrial(gain >= -ERRORS * error, figures)


def _folds(labels: Tensor, count: int) -> list[Tensor]:
    """Parts with as equal a share of every class as can be."""
    by_class = labels.argsort(stable=True)
    return [by_class[start::count] for start in range(count)]
