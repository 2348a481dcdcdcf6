"""What the features of the labels and the pool say of any image, before anything is trained on the labels."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.batch import Share
from ropaws.data.features import FeatureRows, principal_components
from ropaws.data.loaders import PoolPass
from ropaws.data.randomness import ANALYSIS, generator
from ropaws.methods.density_ratio import (
    TEMPERATURE,
    Densities,
    PriorCurve,
    fit_curve,
    log_density_ratio,
    share_interval,
)
from ropaws.models import Encoder

DIMS = 256  # principal components in which densities are compared
SAMPLE = 4096  # images of the pool that its density is made of
INVERSE_PENALTY = 10.0  # scikit-learn's C, on centered unit features


class Judgment(NamedTuple):
    """Of images, by their features alone."""

    in_domain: Tensor  # (n,) p(in | x)
    score: Tensor  # (n,) log ratio of the densities
    log_probs: Tensor  # (n, c) of logistic regression on the labels


class PoolPrior(nn.Module):
    """The in-domain prior of methods/density_ratio.py with all that it needs, and logistic regression.

    Everything is a buffer, so that it is part of checkpoints and models. `fit` fills them once, before the
    first step: in features that were trained on the labels, labeled images no longer look like others of
    their class, and every image of the pool would look out-of-class.

    Args:
        features: Dimensions of the features.
        classes: Number of known classes.
        pool: Number of training images.
        temperature: Of both densities.
    """

    prior: Tensor
    mean: Tensor
    components: Tensor
    labeled: Tensor
    labels: Tensor
    sample: Tensor
    curve: Tensor
    share: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, classes: int, pool: int, *, temperature: float = TEMPERATURE) -> None:
        super().__init__()
        self.classes = classes
        self.temperature = temperature
        dims = min(DIMS, features)
        self.register_buffer("prior", torch.ones(pool))  # of each training image
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("components", torch.zeros(dims, features))
        self.register_buffer("labeled", torch.zeros(0, dims))  # these three take the size that fit gives them
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long))
        self.register_buffer("sample", torch.zeros(0, dims))
        self.register_buffer("curve", torch.zeros(2, dtype=torch.float64))  # slope and offset
        self.register_buffer("share", torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
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
        where, labels = pool.data.labeled_indices, pool.data.labels
        self.labeled = self.project(pool.map(encoder.features, where))
        self.labels = labels.to(self.mean.device)
        own_label, own_pool = torch.full((2, len(pool)), -1)
        own_label[where], own_pool[chosen] = torch.arange(len(where)), torch.arange(len(chosen))
        scores = pool.map(lambda views: self._ratio(self.project(encoder.features(views)))).cpu()
        inside = torch.cat([where.cpu(), chosen]).unique()  # those that must not count themselves
        scores[inside] = self._ratio(
            self.project(pool.map(encoder.features, inside)), own_label[inside], own_pool[inside]
        ).cpu()
        unlabeled = own_label < 0
        share = share_interval(scores[unlabeled], scores[where])
        curve = fit_curve(scores[unlabeled], scores[where], share.estimate)
        self.curve.copy_(torch.tensor(curve))
        self.share.copy_(torch.tensor(share))
        self.prior.copy_(curve(scores))
        self.prior[where.to(self.prior.device)] = 1.0
        self._fit_regression()

    def forward(self, features: Tensor) -> Judgment:
        """features (n, feature_dims)  ->  judgments of n images that are not among the training images"""
        points = self.project(features)
        score = self._ratio(points)
        logits = F.linear(points, self.weight, self.bias)
        return Judgment(self.in_domain(score), score, logits.log_softmax(dim=1))

    def in_domain(self, scores: Tensor) -> Tensor:
        return PriorCurve(*self.curve.tolist())(scores)

    def estimated_share(self) -> Share:
        """Share of the pool that belongs to the classes."""
        return Share(*self.share.tolist())

    def project(self, features: Tensor) -> Tensor:
        """Centered unit rows in the main directions.   (n, feature_dims)  ->  (n, d)"""
        return F.normalize((features.to(self.mean) - self.mean) @ self.components.T, dim=1)

    def _ratio(
        self, points: Tensor, own_label: Tensor | None = None, own_pool: Tensor | None = None
    ) -> Tensor:
        densities = Densities(self.labeled, self.labels, self.classes, self.sample)
        return log_density_ratio(
            points, densities, temperature=self.temperature, own_label=own_label, own_pool=own_pool
        )

    def _choose(self, count: int) -> Tensor:
        order = torch.randperm(count, generator=generator(0, ANALYSIS))
        return order[:SAMPLE].sort().values

    def _fit_regression(self) -> None:
        weight, bias = logistic_regression(self.labeled, self.labels, self.classes)
        self.weight.copy_(weight)
        self.bias.copy_(bias)


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
