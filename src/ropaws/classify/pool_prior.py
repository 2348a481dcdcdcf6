"""What the features of the labels and the pool say of any image, before anything is trained on the labels."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.classify.answers import answer_votes, nearest_similarity, with_votes
from ropaws.classify.calibration import calibrated_temperature, mixed_probs
from ropaws.classify.class_prior import (
    ClassPrior,
    ClassPriorChoice,
    bounded,
    starting_class_prior,
    with_interval,
)
from ropaws.classify.in_class_score import (
    CLASS_TEMPERATURE,
    EVIDENCE,
    Known,
    Labeled,
    evidence,
    evidence_weights,
    held_out_evidence,
    known_points,
)
from ropaws.classify.in_class_share import (
    PriorCurve,
    around_border,
    border_score,
    fit_curve,
    score_gap,
    share_interval,
)
from ropaws.classify.logistic import fit_balanced, held_out_accuracy
from ropaws.classify.pool_frequencies import Weighed, estimated
from ropaws.classify.propagation import VOTERS, choose_voters
from ropaws.classify.soft_nn import LabeledEmbeddings, followed
from ropaws.core.features import (
    FeatureRows,
    Features,
    main_directions,
    main_points,
    principal_components,
    sample_rows,
)
from ropaws.core.labels import OUT_OF_CLASS
from ropaws.core.randomness import ANALYSIS, generator
from ropaws.core.records import Outputs, Share, Support

DIMS = 256  # principal components in which densities are compared
SAMPLE = 4096  # images of the pool that its density is made of
MEANS_WEIGHT = 2.0  # of class means, against the labels per class of logistic regression
PULL_LABELS = 15.0  # labels per class at which the power of n_y is 1/2: 3/4 at five of them
BLOCK = 512  # rows that are looked at together


# Of the densities in the prior, where there are answers of both kinds; the rest is their share.
POOL_SHARE = 0.5


class FeaturePass(Protocol):
    """The features of all training rows, which may be computed when they are asked for."""

    def __len__(self) -> int: ...

    def map(self, function: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> Tensor:
        """Return function(features) of rows, of all by default; it is called for a block at a time.

        function: (b, d)  ->  (b, ...);  rows (k,)  ->  (k, ...)
        """


class RowPass:
    """A FeaturePass over rows in memory."""

    def __init__(self, features: Features) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def map(self, function: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> Tensor:
        """See FeaturePass."""
        rows = torch.arange(len(self)) if rows is None else rows.cpu()
        return torch.cat([function(self.features[part]) for part in rows.split(BLOCK)])


class Judgment(NamedTuple):
    """Whether rows belong to any class, by their features alone."""

    in_domain: Tensor  # (n,) p(in | x)
    score: Tensor  # (n,) the score behind it, unbounded


class Scored(NamedTuple):
    """Rows with a score, and what it means."""

    curve: PriorCurve
    scores: Tensor  # (n,)


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
    outside: Tensor
    typical: Tensor
    sample: Tensor
    means: Tensor
    refined: Tensor
    scale: Tensor
    curve: Tensor
    share: Tensor
    border: Tensor
    frequencies: Tensor
    guessed: Tensor
    trained: Tensor
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
        self.register_buffer("labeled", torch.zeros(0, dims))  # these four take the size that fit gives them
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long))
        self.register_buffer("outside", torch.zeros(0, dims))  # what a person called out-of-class
        self.register_buffer("typical", torch.tensor(1.0))  # cosine of a row and the row nearest to it
        self.register_buffer("sample", torch.zeros(0, dims))
        self.register_buffer("means", torch.zeros(classes, dims))
        self.register_buffer("refined", torch.zeros(classes, dims))
        self.register_buffer("scale", torch.zeros(2, EVIDENCE))  # mean and deviation over the pool
        self.register_buffer("curve", torch.zeros(2))  # slope and offset
        self.register_buffer("share", torch.tensor([1.0, 0.0, 1.0]))
        self.register_buffer("border", torch.tensor(math.nan))  # score below which an image is out-of-class
        # Of the classes in the in-class part of the pool: estimate, low, high; zeros: taken for equal.
        self.register_buffer("frequencies", torch.zeros(3, classes))
        self.register_buffer("guessed", torch.tensor(False))  # from the pool alone
        self.register_buffer("trained", torch.zeros(classes))  # what me-max keeps to: a guess follows
        # Accuracy of logistic regression on held-out labels, temperature of the class probabilities.
        self.register_buffer("confidence", torch.tensor([math.nan, 1.0]))
        self.register_buffer("weight", torch.zeros(classes, dims))
        self.register_buffer("bias", torch.zeros(classes))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Buffers of a size that depends on the data take that of the file."""
        for name in ("labeled", "labels", "outside", "sample"):
            found, own = state.get(prefix + name), getattr(self, name)
            if isinstance(found, Tensor) and found.shape[1:] == own.shape[1:]:
                setattr(self, name, own.new_zeros(found.shape))
        for name in ("frequencies", "border", "guessed", "trained"):  # not in files of an earlier version
            state.setdefault(prefix + name, getattr(self, name).clone())
        super()._load_from_state_dict(state, prefix, *rest)

    @property
    def fitted(self) -> bool:
        return len(self.sample) > 0

    def fit(
        self,
        pool: FeaturePass,
        where: Tensor,
        labels: Tensor,
        *,
        outside: Tensor | None = None,
        outside_rows: Tensor | None = None,
        directions: tuple[Tensor, Tensor] | None = None,
        class_prior: ClassPriorChoice = "uniform",
    ) -> None:
        """Fit to the features of the pool.

        where (l,) positions and labels (l,) classes of the labeled rows; outside (o, feature_dims): features
        that a person called out-of-class, which are not among the rows of the pool, or outside_rows (o,):
        positions of those that are; directions: mean
        (feature_dims,) and main directions (d, feature_dims) to compare rows in, by default those of the
        pool; class_prior: how frequent the classes are in its in-class part
        """
        apart = torch.zeros(len(pool), dtype=torch.bool)  # rows that are no part of the pool
        if outside_rows is not None and len(outside_rows):
            outside = pool.map(_as_it_is, outside_rows)
            apart[outside_rows.cpu()] = True
        chosen = self._choose(len(pool))
        chosen = chosen[~apart[chosen]]
        features = pool.map(_as_it_is, chosen)
        if directions is None:
            directions = principal_components(FeatureRows(features.cpu()), len(self.components))
        mean, components = directions
        self.mean.copy_(mean)
        self.components.copy_(components)
        self.sample = self.project(features)
        self.labeled = self.project(pool.map(_as_it_is, where))
        self.labels = labels.to(self.mean.device)
        if outside is not None and len(outside):
            self.outside = self.project(outside)
            self.typical.copy_(nearest_similarity(self.sample))
        self._fit_regression()
        own = torch.full((len(pool),), -1)
        own[chosen] = torch.arange(len(chosen))
        unlabeled = ~apart
        unlabeled[where.cpu()] = False

        def all_evidence(known: Known) -> Tensor:
            return pool.map(lambda part: evidence(self.project(part), known))

        self._set_frequencies(
            starting_class_prior(class_prior, self._counts.cpu(), unlabeled=bool(unlabeled.any()))
        )
        self.guessed.fill_(False)
        if class_prior == "auto":
            self._estimate_frequencies(own[where.cpu()])
        self.trained.copy_(self.frequencies[0])
        curve, scores = self._fit_scores(all_evidence, unlabeled)

        def votes() -> Tensor:
            return pool.map(lambda part: self._votes(self.project(part)))

        self.prior.copy_(self._answered(curve(scores), votes))
        self.prior[where.to(self.prior.device)] = 1.0
        self.prior[apart.to(self.prior.device)] = 0.0

    def _fit_scores(self, evidence_of: Callable[[Known], Tensor], unlabeled: Tensor) -> Scored:
        """Class means, scale, share and curve with the class prior as it is now.

        evidence_of: the evidence (n, 3) of the rows; unlabeled (n,): which have no label
        """
        known = known_points(self._labeled, self.sample)
        self.means.copy_(known.means)
        self.refined.copy_(known.refined)
        found = evidence_of(known)
        rest = found[unlabeled.to(found.device)]
        rest = found if len(rest) < 2 else rest  # everything is labeled
        deviation, mean = torch.std_mean(rest, dim=0, correction=min(1, len(rest) - 1))
        self.scale.copy_(torch.stack([mean, deviation.clamp_min(eq.TINY)]))
        held_out = self._score(held_out_evidence(known.labeled, self.sample)).cpu()
        scores, weights = self._score(found).cpu(), self._label_weights()
        rest = scores[unlabeled]
        gap = score_gap(rest, held_out, weights)
        share = share_interval(rest, held_out, weights, counts=self._counts, gap=gap)
        curve = fit_curve(rest, held_out, share.estimate, weights)
        self.curve.copy_(torch.tensor(curve))
        self.share.copy_(torch.tensor(share))
        self.border.fill_(border_score(rest, share.estimate, gap))
        return Scored(curve, scores)

    def _estimate_frequencies(self, own: Tensor) -> None:
        """Of the classes, from labels that are propagated through images of the sample.

        own (l,): position of each label in the sample, -1 for none
        """
        unlabeled = torch.ones(len(self.sample), dtype=torch.bool)
        unlabeled[own[own >= 0]] = False
        if self.classes < 2 or int(unlabeled.sum()) < 2:
            return
        curve, scores = self._fit_scores(lambda known: evidence(self.sample, known), unlabeled)
        rows = unlabeled.nonzero().squeeze(1)
        rows = rows[choose_voters(len(rows), VOTERS)]
        points = self.sample[rows.to(self.sample.device)]
        likely = curve(scores[rows]).to(points)
        likely = self._answered(
            likely, lambda: answer_votes(points, self.labeled, self.outside, self.typical)
        )
        found = estimated(
            LabeledEmbeddings(self.labeled, self.labels, self.classes),
            Weighed(points, likely, self._even_log_probs(points)),
            self.class_prior,
            float(self.confidence[0]),
        )
        self.frequencies.copy_(torch.stack(list(found.prior)))
        self.guessed.fill_(found.guessed)

    def _set_frequencies(self, found: Tensor | None) -> None:
        self.frequencies.zero_()
        if found is not None:
            self.frequencies.copy_(torch.stack(list(with_interval(bounded(found), len(self.labels)))))

    @property
    def class_prior(self) -> Tensor | None:
        """How frequent the classes are in the in-class part of the pool; None: taken for equal.   (c,)"""
        return self.frequencies[0] if float(self.frequencies.sum()) > 0 else None

    @property
    def trained_class_prior(self) -> Tensor | None:
        """The same as training knows it by now; None: taken for equal.   (c,)"""
        return None if self.class_prior is None else self.trained

    def follow(self, mean: Tensor, support: Support) -> None:
        """Let frequencies that are a guess follow the mean prediction of a step.   mean (c,)"""
        if self.guessed:
            self.trained.copy_(followed(self.trained, mean, support))

    def estimated_class_prior(self) -> ClassPrior | None:
        """Frequencies of the classes with intervals; None where they are taken for equal."""
        return None if self.class_prior is None else ClassPrior(*self.frequencies.cpu().unbind())

    @property
    def _counts(self) -> Tensor:
        return torch.bincount(self.labels, minlength=self.classes)

    def _label_weights(self) -> Tensor | None:
        """How much of the in-class pool each label stands for: p(y) / n_y.   ->  (l,), None: all alike"""
        if (prior := self.class_prior) is None:
            return None
        return (prior / self._counts.clamp_min(1))[self.labels].cpu()

    def unlabeled_sample(self, where: Tensor) -> Tensor:
        """Unlabeled ones among the rows that the density of the pool is made of.   ->  (k,) positions

        where (l,) positions of the labeled rows
        """
        chosen = self._choose(len(self.prior))
        return chosen[~torch.isin(chosen, where.cpu())]

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
        """Judge rows as if they were not among the training rows.   (n, feature_dims)  ->  (n,) each"""
        return self._judged(self.project(features))

    def _judged(self, points: Tensor) -> Judgment:
        """points (n, d) projected rows  ->  (n,) each"""
        score = self._score(evidence(points, self._known))
        curve = PriorCurve(*self.curve.tolist())
        prior = around_border(curve(score), float(curve(self.border)))
        return Judgment(self._answered(prior, lambda: self._votes(points)), score)

    def outputs(self, embedding: Tensor, near: Tensor, features: Tensor, *, share: float) -> Outputs:
        """The answer for rows: classes by their neighbors and by logistic regression, in-class by the pool.

        embedding (n, d) and near (n, c) probabilities of a soft nearest-neighbor classifier, features
        (n, feature_dims) of the same rows; share of logistic regression
        """
        points = self.project(features)
        probs = mixed_probs(near, self._log_probs(points), share, self.confidence_temperature)
        return Outputs(embedding, probs, *self._judged(points))

    def _answered(self, prior: Tensor, votes: Callable[[], Tensor]) -> Tensor:
        """The prior, with the votes of the answers where some of them are out-of-class.   (n,)  ->  (n,)"""
        if len(self.outside) == 0:
            return prior
        inside, answers = len(self.labeled), len(self.labeled) + len(self.outside)
        before = torch.lerp(torch.full_like(prior, (inside + 1) / (answers + 2)), prior, POOL_SHARE)
        return with_votes(votes().to(prior), before)

    def _votes(self, points: Tensor) -> Tensor:
        """Votes for a class and all votes.   (n, d)  ->  (n, 2)"""
        return answer_votes(points, self.labeled, self.outside, self.typical)

    def log_probs(self, features: Tensor) -> Tensor:
        """Of the classes, by the features alone.   (n, feature_dims)  ->  (n, c)"""
        return self._log_probs(self.project(features))

    def _log_probs(self, points: Tensor) -> Tensor:
        """Logistic regression; with few labels, class means that the pool has refined have a say too.

        One label per class says little about borders, but much about where the class is. Classes with more
        labels are better known, so that more is taken for them than is of them, as if their frequency were a
        power of n_y, the higher the fewer labels there are: p(y) comes in its place.   (n, d)  ->  (n, c)
        """
        even = self._even_log_probs(points)
        if (prior := self.class_prior) is None:
            return even
        pull = PULL_LABELS / (PULL_LABELS + self._labels_per_class)
        return (even + prior.log() - pull * self._counts.clamp_min(1).log()).log_softmax(dim=1)

    def _even_log_probs(self, points: Tensor) -> Tensor:
        """The same, if all classes were equally frequent."""
        regression = F.linear(points, self.weight, self.bias).log_softmax(dim=1)
        means = (points @ self.refined.T / CLASS_TEMPERATURE).log_softmax(dim=1)
        share = self._labels_per_class / (self._labels_per_class + MEANS_WEIGHT)
        return torch.lerp(means, regression, share).log_softmax(dim=1)

    @property
    def _labels_per_class(self) -> float:
        return len(self.labels) / max(1, len(self.labels.unique()))

    def estimated_share(self) -> Share:
        """Share of the pool that belongs to the classes."""
        return Share(*self.share.tolist())

    def project(self, features: Tensor) -> Tensor:
        """Centered unit rows in the main directions.   (n, feature_dims)  ->  (n, d)"""
        return F.normalize(main_directions(features.to(self.mean), self.mean, self.components), dim=1)

    @property
    def _known(self) -> Known:
        return Known(self._labeled, self.sample, self.means, self.refined)

    @property
    def _labeled(self) -> Labeled:
        return Labeled(self.labeled, self.labels, self.classes, self.class_prior)

    def _score(self, found: Tensor) -> Tensor:
        """One number from the pieces of evidence.   (n, 3)  ->  (n,)"""
        weights = evidence_weights(len(self.labels), len(self.labels.unique()), len(self.components))
        weights = weights.to(found)
        standardized: Tensor = (found - self.scale[0]) / self.scale[1]
        return (standardized * weights).sum(dim=1)

    def _choose(self, count: int) -> Tensor:
        order = torch.randperm(count, generator=generator(0, ANALYSIS))
        return order[:SAMPLE].sort().values

    def _fit_regression(self) -> None:
        weight, bias = fit_balanced(self.labeled, self.labels, self.classes)
        self.weight.copy_(weight)
        self.bias.copy_(bias)
        self.confidence[0] = held_out_accuracy(self.labeled, self.labels, self.classes)


def as_they_are(dims: int) -> tuple[Tensor, Tensor]:
    """Directions of rows that are in their main directions, around the mean, already."""
    return torch.zeros(dims), torch.eye(dims)


def _as_it_is(features: Tensor) -> Tensor:
    return features


def in_class_probability(features: Tensor, labels: Tensor, *, classes: int) -> Tensor:
    """Probability of belonging to any class: 1 for labeled rows, 0 for those a person called out-of-class.

    Before every class has a label, densities would call the others out-of-class: then the share of the
    answers takes their place. Without any answer it is 1 everywhere.
    features (n, d) frozen features of all rows, labels (n,): a class, UNLABELED or OUT_OF_CLASS  ->  (n,)
    """
    outside, where = labels == OUT_OF_CLASS, (labels >= 0).nonzero().squeeze(1)
    if len(where) == 0 or len(labels[where].unique()) < classes:
        found = _share_of_answers(features, where, outside)
    else:
        kept = ~outside
        prior = PoolPrior(features.shape[1], classes, int(kept.sum()))
        rows = FeatureRows(features[kept])
        known = (labels[kept] >= 0).nonzero().squeeze(1)
        prior.fit(RowPass(rows), known, labels[kept][known], outside=features[outside])
        found = RowPass(FeatureRows(features)).map(lambda part: prior(part).in_domain)
    found[where], found[outside] = 1.0, 0.0
    return found


def _share_of_answers(features: Tensor, where: Tensor, outside: Tensor) -> Tensor:
    inside, answers = len(where), len(where) + int(outside.sum())
    if inside == answers:
        return torch.ones(len(features))
    prior = torch.full((len(features),), (inside + 1) / (answers + 2))
    points = main_points(features)
    typical = nearest_similarity(points[sample_rows(len(points), SAMPLE, 0)])
    rows = RowPass(FeatureRows(points))
    votes = rows.map(lambda part: answer_votes(part, points[where], points[outside], typical))
    return with_votes(votes, prior)
