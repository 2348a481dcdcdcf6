"""RoPAWS on feature arrays, as a scikit-learn estimator."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ropaws.data.array_rows import ArrayRows
from ropaws.data.features import FeatureRows
from ropaws.methods.propagation import VOTERS
from ropaws.training.feature_arrays import (
    BLOCK,
    check_views,
    checked_labels,
    filled,
    learned_rows,
    projection,
    scaled_rows,
)
from ropaws.training.feature_classifier import (
    ClassifierSettings,
    FeatureClassifier,
    HeadTrial,
    LabeledRows,
    try_head,
)

KINDS = (np.float32, np.float64, np.float16)  # of features that are read as they are, without a copy


class RoPAWSClassifier(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    ClassifierMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Open-set semi-supervised classifier on feature arrays.

    For a few labeled rows and many unlabeled ones, of which some belong to no class. Rows are scaled to unit
    length, centered, and compared by cosine in their 256 main directions. A linear head is trained by RoPAWS
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
    voters : int or None, default=1024
        Without a head: number of unlabeled rows that vote, at most. None lets all of them vote, in quadratic
        time, and learns from all of them.
    steps : int, default=300
        Training steps of the head.
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
        voters: int | None = VOTERS,
        steps: int = 300,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.head = head
        self.prior = prior
        self.temperature = temperature
        self.prior_temperature = prior_temperature
        self.label_ratio = label_ratio
        self.regression_share = regression_share
        self.voters = voters
        self.steps = steps
        self.random_state = random_state

    def fit(self, X: Any, y: Any, views: Any = None) -> "RoPAWSClassifier":  # noqa: N803 - scikit-learn's name
        """Fit to labeled and unlabeled rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features of all rows.
        y : array-like of shape (n_samples,)
            Class of each row. Unlabeled rows have -1, None, NaN or an empty text.
        views : array-like of shape (n_samples, n_views, n_features), default=None
            Features of augmented versions of each row, which help the head.

        Returns
        -------
        RoPAWSClassifier
            The fitted estimator.
        """
        settings = self._settings()
        X = self._checked(X, ensure_min_samples=2)  # noqa: N806
        y, known = checked_labels(y, X)
        self.classes_, numbers = np.unique(y[known], return_inverse=True)
        check_views(views, X)
        learned = learned_rows(known, settings.voters, settings.seed)
        if learned is not None:  # else all rows are looked at before anything is learned
            self._check_finite(X)
        features = self._prepared(X, views, learned)
        where = np.flatnonzero(known if learned is None else known[learned])
        labeled = LabeledRows(torch.from_numpy(where), torch.from_numpy(numbers), len(self.classes_))
        trial = self._trial(features, labeled, settings)
        self.head_, self.head_reason_ = "linear" if trial.use else None, trial.reason
        use = ClassifierSettings(**{**vars(settings), "head": trial.use})
        self._classifier = FeatureClassifier(features, labeled, use)
        self.temperature_ = self._classifier.temperature
        self.prior_temperature_ = self._classifier.prior_temperature
        self.in_class_share_ = self._classifier.share
        winners = np.empty(len(X), np.int64)
        winners[known] = numbers
        if learned is None:
            hidden = np.flatnonzero(~known)
            parts = (self._winners(features[rows], rows) for rows in torch.from_numpy(hidden).split(BLOCK))
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
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        return ClassifierSettings(
            head=self.head == "linear",
            prior=self.prior,
            temperature=None if self.temperature == "auto" else self.temperature,
            prior_temperature=None if self.prior_temperature == "auto" else self.prior_temperature,
            label_ratio=self.label_ratio,
            regression_share=self.regression_share,
            voters=self.voters,
            steps=self.steps,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )

    def _trial(self, features: FeatureRows, labeled: LabeledRows, settings: ClassifierSettings) -> HeadTrial:
        if not settings.head:
            return HeadTrial(False, "head=None was asked for")
        return try_head(features, labeled, settings)

    def _winners(self, part: Tensor, learned: Tensor | None = None) -> Tensor:
        return self._classifier.classify(part, learned).argmax(dim=1)

    def _checked(self, X: Any, **more: Any) -> NDArray[Any]:  # noqa: N803
        """As an array; whether its values are finite is seen block by block."""
        return np.asarray(validate_data(self, X, dtype=list(KINDS), ensure_all_finite=False, **more))

    def _check_finite(self, X: NDArray[Any]) -> None:  # noqa: N803
        name = type(self).__name__
        for start in range(0, len(X), BLOCK):
            assert_all_finite(X[start : start + BLOCK], input_name="X", estimator_name=name)

    def _prepared(self, X: NDArray[Any], views: Any, learned: NDArray[np.int64] | None) -> FeatureRows:  # noqa: N803
        """The rows that are learned from, in their main directions.

        Once for all trials: features of a network have a thousand dimensions, most of them nearly empty.
        """
        self._project = projection(ArrayRows(X, self._scaled, learned), trained=self.head is not None)
        rows = ArrayRows(X, scaled_rows, learned)  # finite, as has been seen
        center = torch.cat([self._project(part) for part in rows.blocks(BLOCK)])
        if views is None:
            return FeatureRows(center)
        looks = ArrayRows(np.asarray(views), scaled_rows, learned)
        return FeatureRows(center, torch.cat([self._project(part) for part in looks.blocks(BLOCK)]))

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
        return scaled_rows(rows)
