"""RoPAWS on feature arrays, as a scikit-learn estimator."""

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import _safe_indexing, assert_all_finite, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from ropaws.classify.class_prior import ClassPrior, checked_class_prior
from ropaws.classify.classifier import ClassifierSettings, HeadTrial, OpenSetClassifier, try_head
from ropaws.classify.head import DIMS, LabeledRows, Points
from ropaws.classify.propagation import VOTERS
from ropaws.core.features import (
    ArrayRows,
    Features,
    lift_of,
    main_directions,
    principal_components,
    unit_mean,
)
from ropaws.core.labels import UNLABELED
from ropaws.core.randomness import POOL_SAMPLE, generator

BLOCK = 2048  # rows that are worked on at a time
LEARNED = 1 << 17  # unlabeled rows that are learned from, at most
FEW_FEATURES = 64  # raw measurements and small images, not features of a network: lengths count there


def checked_labels(y: Any, X: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:  # noqa: N803
    """The labels, and which rows have one."""
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None")
    y = column_or_1d(y, warn=True)
    check_consistent_length(X, y)
    if y.dtype.kind == "f" and np.isinf(y).any():
        raise ValueError("Input y contains infinity")
    if y.dtype.kind in "US" and (y == str(UNLABELED)).any():
        raise ValueError(
            "y has the text '-1'; to mark an unlabeled row among names use None, NaN, an empty text or the"
            " number -1 in an array of dtype object"
        )
    known = _known(y)
    if not known.any():
        raise ValueError(
            "y has no label: every entry is -1 (unlabeled) or missing; label a row of each class"
        )
    check_classification_targets(y[known])
    return y, known


def _known(y: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows have a label; one by one where they can be of any type."""
    if y.dtype.kind in "iuf":
        return np.asarray((y != UNLABELED) & (y == y))  # NaN is not equal to itself
    if y.dtype.kind == "U":
        return np.asarray(y != "")
    return np.array([not _is_missing(label) for label in y], bool)


def _is_missing(label: Any) -> bool:
    if isinstance(label, str):
        return label == ""
    differs = label != label  # NaN does; whether pandas' NA does, is NA again
    return label is None or not isinstance(differs, bool | np.bool_) or bool(differs or label == UNLABELED)


def scaled_rows(rows: NDArray[Any]) -> Tensor:
    """Rows whose largest entry is 1 in size, in float32; only their direction counts. Zeros stay.

    (..., d)  ->  (..., d)
    """
    if rows.dtype == np.float16:
        rows = rows.astype(np.float32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return torch.from_numpy((rows / np.where(largest > 0, largest, 1)).astype(np.float32))


class Projection(NamedTuple):
    """Unit rows around the mean, in their main directions."""

    mean: Tensor  # (d,)
    components: Tensor | None  # (e, d), or None for rows that stay as they are

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, ..., d)  ->  (n, ..., e)"""
        return main_directions(rows, self.mean, self.components)


def projection(rows: Features, *, trained: bool) -> Projection:
    """To the main directions of rows (n, d), all of them where they are few.

    A head is trained by direction. Without one, all directions together are nothing but a turn.
    """
    if not trained and rows.shape[1] <= DIMS:
        return Projection(unit_mean(rows).float(), None)
    mean, components = principal_components(rows, min(DIMS, rows.shape[1]))
    return Projection(mean.float(), components.float())


def check_views(views: Any, X: NDArray[Any]) -> None:  # noqa: N803
    if views is None:
        return
    array = np.asarray(views)
    if array.ndim != 3 or (array.shape[0], array.shape[2]) != X.shape or array.shape[1] == 0:
        raise ValueError(
            f"views must be (n_samples, n_views, n_features) with those of X {X.shape}, got {array.shape}"
        )
    if not all(np.isfinite(array[start : start + BLOCK]).all() for start in range(0, len(array), BLOCK)):
        raise ValueError("views has values that are not finite; repair or remove those rows")


def checked_outside(out_of_class: Any, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows are known to be out-of-class.   known (n,)  ->  (n,)"""
    if out_of_class is None:
        return np.zeros_like(known)
    mask = np.asarray(out_of_class)
    if mask.shape != known.shape or mask.dtype != bool:
        raise ValueError(
            f"out_of_class must be {len(known)} values True or False, one for each row of X, got"
            f" {mask.dtype} of shape {mask.shape}"
        )
    if (both := int((mask & known).sum())) > 0:
        raise ValueError(f"out_of_class must be False for rows with a label, got True for {both} of them")
    return mask


def refuse_others(given: Mapping[str, Any]) -> None:
    """Named nowhere in the signature of fit, as scikit-learn takes what is named for supported."""
    if "sample_weight" in given:
        raise TypeError(
            "fit takes no sample_weight: votes and densities have no weight for a single row; set class_prior"
            " where classes count differently, and mark rows that should not teach a class as unlabeled (-1)"
        )
    if given:
        raise TypeError(f"fit takes X, y, views and out_of_class, got {', '.join(map(repr, given))}")


def learned_rows(
    known: NDArray[np.bool_], voters: int | None, seed: int, outside: NDArray[np.bool_] | None = None
) -> NDArray[np.int64] | None:
    """Labeled rows and a random sample of the others, ascending; None for all rows.

    The sample is never smaller than the number of voters; None lets all rows vote. Rows that are out-of-class
    are not learned from in this way.   known, outside (n,)  ->  (k,)
    """
    outside = np.zeros_like(known) if outside is None else outside
    unlabeled = np.flatnonzero(~known & ~outside)
    if voters is None or len(unlabeled) <= (most := max(LEARNED, voters)):
        return np.flatnonzero(~outside) if outside.any() else None
    order = torch.randperm(len(unlabeled), generator=generator(seed, POOL_SAMPLE))
    return np.sort(np.concatenate([np.flatnonzero(known), unlabeled[order[:most].numpy()]]))


def filled(count: int, parts: Iterable[Tensor], kind: type) -> NDArray[Any]:
    """Parts one below the other in an array that is made once: joining them would hold them twice."""
    found: NDArray[Any] = np.empty(0, kind)
    start = 0
    for part in parts:
        if start == 0:
            found = np.empty((count, *part.shape[1:]), kind)
        found[start : start + len(part)] = part.numpy()
        start += len(part)
    return found


KINDS = (np.float32, np.float64, np.float16)  # of features that are read as they are, without a copy


class RoPAWSClassifier(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    ClassifierMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Open-set semi-supervised classifier on feature arrays.

    For a few labeled rows and many unlabeled ones, of which some belong to no class. Rows are scaled to unit
    length, centered, and compared by cosine in their 256 main directions; of raw measurements their length
    counts too, see `lengths`. A linear head is trained by RoPAWS
    on labeled and unlabeled rows; the class probabilities are the geometric mean of its soft nearest-neighbor
    classifier and of logistic regression on the labels. How likely a row belongs to any class comes from the
    density of the labels against that of all rows, before the head is trained.

    Rows are read in blocks, so that `X` may be a memory-mapped array (`numpy.load(file, mmap_mode="r")`) of
    float32, float64 or float16 that is larger than memory. Of more than 131,072 unlabeled rows a random
    sample of that size is learned from; every row gets its label.

    Parameters
    ----------
    head : "linear" or None, default="linear"
        "linear" trains a head, unless the labels say that it does more harm than good: see `head_`. None
        propagates the labels through the unlabeled rows as they are, Eq. (12) of the RoPAWS paper.
    prior : "pool", "distance" or None, default="pool"
        The in-domain prior. "pool" needs no setting: the ratio of the densities of labels and rows.
        "distance" is the paper's, Eq. (13). None takes every row for in-class.
    temperature : float or "auto", default="auto"
        Temperature of the similarity kernel. "auto" is 0.1 for a head; without one, the value at which the
        labeled rows best predict one another.
    prior_temperature : float or "auto", default="auto"
        With prior="distance": its temperature. "auto" takes it from the distances between labeled rows of the
        same class.
    label_ratio : float, default=5.0
        Weight of all labeled rows together relative to all unlabeled ones.
    regression_share : float, default=0.5
        Weight of logistic regression in the geometric mean, from 0 to 1.
    class_prior : "auto", "uniform", "labels" or array-like of shape (n_classes,), default="auto"
        How frequent the classes are among the rows that belong to any. "auto" estimates it from rows and
        labels; "uniform" takes them for equal; "labels" for as frequent as the labels are, which suits labels
        that are a random sample; or the frequencies themselves, in the order of `classes_`.
    voters : int or None, default=1024
        Without a head: number of unlabeled rows that vote, at most. None lets all of them vote, in quadratic
        time, and learns from all of them.
    steps : int, default=300
        Training steps of the head.
    lengths : "auto" or bool, default="auto"
        Whether the lengths of rows count, beside their directions. Those of a network's features do not;
        "auto" lets them count where there are at most 64 features. Columns in different units are a matter of
        `sklearn.preprocessing.StandardScaler` before this estimator.
    random_state : int, RandomState instance or None, default=0
        Controls batches, weights, and which rows of a large pool are learned from and vote.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The classes in `y`.
    transduction_ : ndarray of shape (n_samples,)
        The label of each row of `X` after fitting; labeled rows keep theirs.
    head_ : "linear" or None
        The head in use.
    head_reason_ : str
        Why it is used, or not.
    in_class_share_ : Share or None
        With prior="pool": estimated share of the unlabeled rows that belongs to the classes, and its
        interval.
    class_prior_ : ndarray of shape (n_classes,)
        The class frequencies in use, in the order of `classes_`.
    class_prior_interval_ : ndarray of shape (2, n_classes)
        Their 90 % intervals, low and high; from 0 to 1 with class_prior="uniform", which looks at nothing.
    threshold_ : float
        The in-domain probability below which a row is out-of-class. With prior="pool" errors of both kinds
        are balanced there: it is where the scores have a gap, or where the share of the rows is above.
    temperature_ : float
        The temperature in use.
    prior_temperature_ : float or None
        The temperature of the prior in use.
    n_features_in_ : int
        Number of features seen during `fit`.

    Examples
    --------
    >>> import numpy as np
    >>> from ropaws import RoPAWSClassifier
    >>> random = np.random.default_rng(0)
    >>> centers = np.eye(3) * 4
    >>> X = np.concatenate([center + random.normal(size=(50, 3)) for center in centers])
    >>> y = np.full(150, -1)
    >>> y[:3], y[50:53] = 0, 1                             # the last 50 rows are of no class
    >>> model = RoPAWSClassifier(head=None).fit(X, y)
    >>> model.predict([[4, 0, 0], [0, 4, 0]]).tolist()
    [0, 1]
    >>> bool(model.in_domain([[4.0, 0, 0]])[0] > model.in_domain([[0, 0, 4.0]])[0])
    True
    """

    def __init__(
        self,
        *,
        head: Literal["linear"] | None = "linear",
        prior: Literal["pool", "distance"] | None = "pool",
        temperature: float | Literal["auto"] = "auto",
        prior_temperature: float | Literal["auto"] = "auto",
        label_ratio: float = 5.0,
        regression_share: float = 0.5,
        class_prior: Literal["auto", "uniform", "labels"] | ArrayLike = "auto",
        voters: int | None = VOTERS,
        steps: int = 300,
        lengths: Literal["auto"] | bool = "auto",
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.head = head
        self.prior = prior
        self.temperature = temperature
        self.prior_temperature = prior_temperature
        self.label_ratio = label_ratio
        self.regression_share = regression_share
        self.class_prior = class_prior
        self.voters = voters
        self.steps = steps
        self.lengths = lengths
        self.random_state = random_state

    def fit(
        self,
        X: Any,  # noqa: N803 - scikit-learn's name
        y: Any,
        views: Any = None,
        out_of_class: Any = None,
        **others: Any,
    ) -> "RoPAWSClassifier":
        """Fit to labeled and unlabeled rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features of all rows.
        y : array-like of shape (n_samples,)
            Class of each row. Unlabeled rows have -1, None, NaN or an empty text.
        views : array-like of shape (n_samples, n_views, n_features), default=None
            Features of augmented versions of each row, which help the head.
        out_of_class : array-like of shape (n_samples,), default=None
            True for rows without a label that are known to belong to no class. They teach what is
            out-of-class, with prior="pool", and no class.
        **others : object
            None is taken. `sample_weight` is refused with the reason: labels stand for the in-class part of
            the rows, and `class_prior` says how much each class counts there.

        Returns
        -------
        RoPAWSClassifier
            The fitted estimator.
        """
        refuse_others(others)
        settings = self._settings()
        X = self._checked(X, ensure_min_samples=2)  # noqa: N806
        y, known = checked_labels(y, X)
        self.classes_, numbers = np.unique(y[known], return_inverse=True)
        checked_class_prior("class_prior", settings.class_prior, len(self.classes_))
        check_views(views, X)
        outside = checked_outside(out_of_class, known)
        learned = learned_rows(known, settings.voters, settings.seed, outside)
        if learned is not None:  # else all rows are looked at before anything is learned
            self._check_finite(X)
        points = self._prepared(X, views, learned)
        where = np.flatnonzero(known if learned is None else known[learned])
        labeled = LabeledRows(torch.from_numpy(where), torch.from_numpy(numbers), len(self.classes_))
        trial = self._trial(points, labeled, settings)
        self.head_, self.head_reason_ = "linear" if trial.use else None, trial.reason
        use = ClassifierSettings(**{**vars(settings), "head": trial.use})
        shown = self._project(self._scaled(X[outside])) if outside.any() else None
        self._classifier = OpenSetClassifier(points, labeled, use, outside=shown)
        self.temperature_ = self._classifier.temperature
        self.prior_temperature_ = self._classifier.prior_temperature
        self.in_class_share_ = self._classifier.share
        self._set_class_prior(self._classifier.class_prior)
        self.threshold_ = self._classifier.threshold
        winners = np.empty(len(X), np.int64)
        winners[known] = numbers
        if learned is None:
            hidden = np.flatnonzero(~known)
            parts = (
                self._winners(points.center[rows], rows) for rows in torch.from_numpy(hidden).split(BLOCK)
            )
            winners[hidden] = filled(len(hidden), parts, np.int64)
        else:
            np.copyto(winners, filled(len(X), map(self._winners, self._blocks(X)), np.int64), where=~known)
        self.transduction_ = self.classes_[winners]
        return self

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Predict the most likely class of each row.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples,)
            A class for every row; `in_domain` says whether it belongs to any.
        """
        check_is_fitted(self)
        winners = self._answers(X, self._winners, np.int64)
        return np.asarray(self.classes_[winners])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Accuracy on the rows that have a label; unlabeled ones, as in cross-validation, do not count.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.
        y : array-like of shape (n_samples,)
            Class of each row, or unlabeled as in `fit`.
        sample_weight : array-like of shape (n_samples,), default=None
            How much each row counts.

        Returns
        -------
        float
            From 0 to 1.
        """
        check_is_fitted(self)
        y, known = checked_labels(y, X)
        right = self.predict(_safe_indexing(X, np.flatnonzero(known))) == y[known]
        weights = None if sample_weight is None else np.asarray(sample_weight)[known]
        return float(np.average(right, weights=weights))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Predict the probability of each class, if a row belongs to any; `in_domain` says whether it does.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples, n_classes)
            Rows sum to 1; columns are in the order of `classes_`.
        """
        check_is_fitted(self)

        def probabilities(part: Tensor) -> Tensor:
            probs = self._classifier.classify(part).double()
            return probs / probs.sum(dim=1, keepdim=True)

        return self._answers(X, probabilities)

    def in_domain(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Predict the probability of belonging to any known class.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples,)
            Low where a row is out-of-class.
        """
        check_is_fitted(self)
        return self._answers(X, lambda part: self._classifier.judge(part).in_domain)

    def out_of_class(self, X: Any) -> NDArray[np.bool_]:  # noqa: N803
        """Tell which rows belong to no known class: those whose probability is below `threshold_`.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples,)
            True where a row is out-of-class.
        """
        return np.asarray(self.in_domain(X) < self.threshold_)

    def score_in_domain(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Rank rows from out-of-class (low) to in-class, also those whose probability is 1.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples,)
            With prior="pool" the log ratio of the densities.
        """
        check_is_fitted(self)
        return self._answers(X, lambda part: self._classifier.judge(part).score)

    def transform(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Embed rows: those of one class lie close together.

        Without a head these are the centered rows themselves, or their 256 main directions if there are more.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples, n_dims)
            Rows of unit length.
        """
        check_is_fitted(self)
        return self._answers(X, self._classifier.embed)

    @property
    def _n_features_out(self) -> int:
        return int(self._classifier.support.embeddings.shape[1])

    def _settings(self) -> ClassifierSettings:
        if self.head not in ("linear", None):
            raise ValueError(f"head must be 'linear' or None, got {self.head!r}")
        if self.prior not in ("pool", "distance", None):
            raise ValueError(f"prior must be 'pool', 'distance' or None, got {self.prior!r}")
        if not 0 <= self.regression_share <= 1:
            raise ValueError(f"regression_share must be from 0 to 1, got {self.regression_share}")
        if self.lengths != "auto" and not isinstance(self.lengths, bool):
            raise ValueError(f"lengths must be 'auto', True or False, got {self.lengths!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        return ClassifierSettings(
            head=self.head == "linear",
            prior=self.prior,
            temperature=None if self.temperature == "auto" else self.temperature,
            prior_temperature=None if self.prior_temperature == "auto" else self.prior_temperature,
            label_ratio=self.label_ratio,
            regression_share=self.regression_share,
            class_prior=checked_class_prior("class_prior", self.class_prior),
            voters=self.voters,
            steps=self.steps,
            seed=_seed(self.random_state),
        )

    def _set_class_prior(self, found: ClassPrior | None) -> None:
        count = len(self.classes_)
        self.class_prior_ = np.full(count, 1 / count)
        self.class_prior_interval_ = np.stack([np.zeros(count), np.ones(count)])
        if found is not None:
            self.class_prior_ = found.estimate.double().numpy()
            self.class_prior_interval_ = torch.stack([found.low, found.high]).double().numpy()

    def _trial(self, points: Points, labeled: LabeledRows, settings: ClassifierSettings) -> HeadTrial:
        if not settings.head:
            return HeadTrial(False, "head=None was asked for")
        return try_head(points, labeled, settings)

    def _winners(self, part: Tensor, learned: Tensor | None = None) -> Tensor:
        return self._classifier.classify(part, learned).argmax(dim=1)

    def _checked(self, X: Any, **more: Any) -> NDArray[Any]:  # noqa: N803
        """As an array; whether its values are finite is seen block by block."""
        return np.asarray(validate_data(self, X, dtype=list(KINDS), ensure_all_finite=False, **more))

    def _check_finite(self, X: NDArray[Any]) -> None:  # noqa: N803
        name = type(self).__name__
        for start in range(0, len(X), BLOCK):
            assert_all_finite(X[start : start + BLOCK], input_name="X", estimator_name=name)

    def _prepared(self, X: NDArray[Any], views: Any, learned: NDArray[np.int64] | None) -> Points:  # noqa: N803
        """The rows that are learned from, in their main directions.

        Once for all trials: features of a network have a thousand dimensions, most of them nearly empty.
        """
        few = X.shape[1] <= FEW_FEATURES if self.lengths == "auto" else self.lengths
        if few:
            self._check_finite(X)
        self._lift = lift_of(X if learned is None else X[learned]) if few else None
        dims = X.shape[1] + (self._lift is not None)
        self._project = projection(ArrayRows(X, self._scaled, learned, dims), trained=self.head is not None)
        rows = ArrayRows(X, self._lifted, learned)  # finite, as has been seen
        center = torch.cat([self._project(part) for part in rows.blocks(BLOCK)])
        if views is None:
            return Points(center)
        looks = ArrayRows(np.asarray(views), self._lifted, learned)
        return Points(center, torch.cat([self._project(part) for part in looks.blocks(BLOCK)]))

    def _answers(
        self,
        X: Any,  # noqa: N803
        answer: Callable[[Tensor], Tensor],
        kind: type = np.float64,
    ) -> NDArray[Any]:
        """Of all rows, a block at a time.   answer: (b, e) rows in their main directions  ->  (b, ...)"""
        X = self._checked(X, reset=False)  # noqa: N806
        return filled(len(X), map(answer, self._blocks(X)), kind)

    def _blocks(self, X: NDArray[Any]) -> Iterator[Tensor]:  # noqa: N803
        return (self._project(part) for part in ArrayRows(X, self._scaled).blocks(BLOCK))

    def _scaled(self, rows: NDArray[Any]) -> Tensor:
        self._check_finite(rows)
        return self._lifted(rows)

    def _lifted(self, rows: NDArray[Any]) -> Tensor:
        """(..., d)  ->  (..., d or d + 1)"""
        return scaled_rows(rows if self._lift is None else self._lift(rows))


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """A number is the seed itself, as in `ropaws train --train.seed`."""
    if isinstance(random_state, numbers.Integral) and random_state >= 0:
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))
