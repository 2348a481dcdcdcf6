"""What the features of the labels and the pool say of any image, before anything is trained on the labels."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.batch import Share
from ropaws.data.features import FeatureRows, principal_components
from ropaws.data.loaders import PoolPass
from ropaws.data.randomness import ANALYSIS, generator
from ropaws.methods.confidence import calibrated_temperature
from ropaws.methods.in_class_score import (
    CLASS_TEMPERATURE,
    EVIDENCE,
    Known,
    Labeled,
    evidence,
    evidence_weights,
    held_out_evidence,
    known_points,
)
from ropaws.methods.in_class_share import PriorCurve, fit_curve, share_interval
from ropaws.models import Encoder
from ropaws.models.heads import main_directions

DIMS = 256  # principal components in which densities are compared
SAMPLE = 4096  # images of the pool that its density is made of
FOLDS = 5  # of the labels, at most
MEANS_WEIGHT = 2.0  # of class means, against the labels per class of logistic regression
INVERSE_PENALTY = 10.0  # scikit-learn's C, on centered unit features


class Judgment(NamedTuple):
    """Of images, by their features alone."""

    in_domain: Tensor  # (n,) p(in | x)
    score: Tensor  # (n,) the score behind it, on a scale without end
    log_probs: Tensor  # (n, c) of logistic regression and class means


class PoolPrior(nn.Module):
    """The in-domain prior of in_class_score.py and in_class_share.py, and logistic regression.

    Everything is a buffer, so that it is part of checkpoints and models. `fit` fills them once, before the
    first step: in features that were trained on the labels, labeled images no longer look like others of
    their class, and every image of the pool would look out-of-class.

    Args:
        features: Dimensions of the features.
        classes: Number of known classes.
        pool: Number of training images.
    """

    prior: Tensor
    mean: Tensor
    components: Tensor
    labeled: Tensor
    labels: Tensor
    sample: Tensor
    means: Tensor
    refined: Tensor
    scale: Tensor
    curve: Tensor
    share: Tensor
    confidence: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, classes: int, pool: int) -> None:
        super().__init__()
        self.classes = classes
        dims = min(DIMS, features)
        self.register_buffer("prior", torch.ones(pool))  # of each training image
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("components", torch.zeros(dims, features))
        self.register_buffer("labeled", torch.zeros(0, dims))  # these three take the size that fit gives them
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long))
        self.register_buffer("sample", torch.zeros(0, dims))
        self.register_buffer("means", torch.zeros(classes, dims))
        self.register_buffer("refined", torch.zeros(classes, dims))
        self.register_buffer("scale", torch.zeros(2, EVIDENCE))  # mean and deviation over the pool
        self.register_buffer("curve", torch.zeros(2))  # slope and offset
        self.register_buffer("share", torch.tensor([1.0, 0.0, 1.0]))
        # Accuracy of logistic regression on held-out labels, temperature of the class probabilities.
        self.register_buffer("confidence", torch.tensor([math.nan, 1.0]))
        self.register_buffer("weight", torch.zeros(classes, dims))
        self.register_buffer("bias", torch.zeros(classes))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Buffers of a size that depends on the data take that of the file."""
        for name in ("labeled", "labels", "sample"):
            found, own = state.get(prefix + name), getattr(self, name)
            if isinstance(found, Tensor) and found.shape[1:] == own.shape[1:]:
                setattr(self, name, own.new_zeros(found.shape))
        super()._load_from_state_dict(state, prefix, *rest)

    @property
    def fitted(self) -> bool:
        return len(self.sample) > 0

    def fit(self, encoder: Encoder, pool: PoolPass) -> None:
        """Fit to the features that the encoder's backbone gives of the pool, the same in every process."""
        chosen = self._choose(len(pool))
        features = pool.map(encoder.features, chosen)
        mean, components = principal_components(FeatureRows(features.cpu()), len(self.components))
        self.mean.copy_(mean)
        self.components.copy_(components)
        self.sample = self.project(features)
        where = pool.data.labeled_indices
        self.labeled = self.project(pool.map(encoder.features, where))
        self.labels = pool.data.labels.to(self.mean.device)
        known = known_points(Labeled(self.labeled, self.labels, self.classes), self.sample)
        self.means.copy_(known.means)
        self.refined.copy_(known.refined)
        scores, held_out, unlabeled = self._training_scores(encoder, pool, chosen, where)
        share = share_interval(scores[unlabeled], held_out)
        curve = fit_curve(scores[unlabeled], held_out, share.estimate)
        self.curve.copy_(torch.tensor(curve))
        self.share.copy_(torch.tensor(share))
        self.prior.copy_(curve(scores))
        self.prior[where.to(self.prior.device)] = 1.0
        self._fit_regression()

    def unlabeled_sample(self, pool: PoolPass) -> Tensor:
        """Unlabeled ones among the images that the density of the pool is made of.   ->  (k,) positions"""
        chosen = self._choose(len(pool))
        return chosen[~torch.isin(chosen, pool.data.labeled_indices.cpu())]

    def calibrate(self, near: Tensor, features: Tensor, rows: Tensor, *, share: float) -> None:
        """Set the temperature of the class probabilities.

        near (k, c) probabilities of unlabeled images by their neighbors, features (k, feature_dims) and
        positions rows (k,) of the same; share of logistic regression
        """
        temperature = calibrated_temperature(
            near,
            self.log_probs(features),
            self.prior[rows.to(self.prior.device)],
            share=share,
            held_out=float(self.confidence[0]),
        )
        self.confidence[1] = temperature

    @property
    def confidence_temperature(self) -> float:
        return float(self.confidence[1])

    def forward(self, features: Tensor) -> Judgment:
        """features (n, feature_dims)  ->  judgments of n images that are not among the training images"""
        score = self.score(features)
        return Judgment(self.in_domain(score), score, self.log_probs(features))

    def score(self, features: Tensor) -> Tensor:
        """How much images look in-class, on a scale without end.   (n, feature_dims)  ->  (n,)"""
        return self._score(evidence(self.project(features), self._known))

    def log_probs(self, features: Tensor) -> Tensor:
        """Of the classes, by the features alone.   (n, feature_dims)  ->  (n, c)"""
        return self._log_probs(self.project(features))

    def _log_probs(self, points: Tensor) -> Tensor:
        """Logistic regression; with few labels, class means that the pool has refined have a say too.

        One label per class says little about borders, but much about where the class is.   (n, d)  ->  (n, c)
        """
        regression = F.linear(points, self.weight, self.bias).log_softmax(dim=1)
        means = (points @ self.refined.T / CLASS_TEMPERATURE).log_softmax(dim=1)
        per_class = len(self.labels) / max(1, len(self.labels.unique()))
        return torch.lerp(means, regression, per_class / (per_class + MEANS_WEIGHT)).log_softmax(dim=1)

    def in_domain(self, scores: Tensor) -> Tensor:
        return PriorCurve(*self.curve.tolist())(scores)

    def estimated_share(self) -> Share:
        """Share of the pool that belongs to the classes."""
        return Share(*self.share.tolist())

    def project(self, features: Tensor) -> Tensor:
        """Centered unit rows in the main directions.   (n, feature_dims)  ->  (n, d)"""
        return F.normalize(main_directions(features.to(self.mean), self.mean, self.components), dim=1)

    @property
    def _known(self) -> Known:
        labeled = Labeled(self.labeled, self.labels, self.classes)
        return Known(labeled, self.sample, self.means, self.refined)

    def _training_scores(
        self, encoder: Encoder, pool: PoolPass, chosen: Tensor, where: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of all training images, of the labels held out, and which images are unlabeled.

        No image counts itself in the density of the pool.   ->  (n,), (l,), (n,) bool
        """
        own = torch.full((len(pool),), -1)
        own[chosen] = torch.arange(len(chosen))
        known = self._known
        found = pool.map(lambda views: evidence(self.project(encoder.features(views)), known))
        inside = self.project(pool.map(encoder.features, chosen))
        found[chosen.to(found.device)] = evidence(inside, known, own[chosen].to(found.device))
        unlabeled = torch.ones(len(pool), dtype=torch.bool)
        unlabeled[where.cpu()] = False
        rest = found[unlabeled.to(found.device)]
        rest = found if len(rest) < 2 else rest  # everything is labeled
        deviation, mean = torch.std_mean(rest, dim=0)
        self.scale.copy_(torch.stack([mean, deviation.clamp_min(eq.TINY)]))
        held_out = held_out_evidence(known.labeled, self.sample, own[where.cpu()].to(found.device))
        return self._score(found).cpu(), self._score(held_out).cpu(), unlabeled

    def _score(self, found: Tensor) -> Tensor:
        """One number from the pieces of evidence.   (n, 3)  ->  (n,)"""
        weights = evidence_weights(len(self.labels), len(self.labels.unique())).to(found)
        standardized: Tensor = (found - self.scale[0]) / self.scale[1]
        return (standardized * weights).sum(dim=1)

    def _choose(self, count: int) -> Tensor:
        order = torch.randperm(count, generator=generator(0, ANALYSIS))
        return order[:SAMPLE].sort().values

    def _fit_regression(self) -> None:
        weight, bias = logistic_regression(self.labeled, self.labels, self.classes)
        self.weight.copy_(weight)
        self.bias.copy_(bias)
        self.confidence[0] = held_out_accuracy(self.labeled, self.labels, self.classes)


def logistic_regression(points: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression, every class with the same weight.

    points (l, d), labels (l,)  ->  weight (classes, d), bias (classes,); classes without label get no chance
    """
    from sklearn.linear_model import LogisticRegression  # slow to load

    present = labels.unique().cpu()
    weight, bias = points.new_zeros(classes, points.shape[1]), points.new_full((classes,), -1e4)
    if len(present) < 2:
        bias[present] = 0.0
        return weight, bias
    model = LogisticRegression(C=INVERSE_PENALTY, class_weight="balanced", max_iter=1000)
    model.fit(points.cpu().double().numpy(), labels.cpu().numpy())
    found, offset = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    if len(present) == 2:  # scikit-learn gives the second class's logit against the first's
        found, offset = torch.cat([-found, found]) / 2, torch.cat([-offset, offset]) / 2
    weight[present], bias[present] = found.to(points), offset.to(points)
    return weight, bias


def held_out_accuracy(points: Tensor, labels: Tensor, classes: int) -> float:
    """Of logistic regression on labels of other folds; NaN where no class has two labels.

    points (l, d), labels (l,)
    """
    counts = torch.bincount(labels, minlength=classes)
    folds = min(FOLDS, int(counts.max()))
    if folds < 2:
        return math.nan
    by_class = labels.argsort(stable=True)
    place = torch.empty_like(labels)
    place[by_class] = torch.arange(len(labels), device=labels.device)
    # Every fold has as equal a share of each class as can be.
    starts = counts.cumsum(0) - counts
    fold = (place - starts[labels]) % folds
    right = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    for number in range(folds):
        out = fold == number
        weight, bias = logistic_regression(points[~out], labels[~out], classes)
        right[out] = F.linear(points[out], weight, bias).argmax(dim=1) == labels[out]
    return float(right[counts[labels] > 1].float().mean())
