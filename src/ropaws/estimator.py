"""RoPAWS on feature arrays, as a scikit-learn estimator."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from ropaws.batch import Outputs
from ropaws.data.features import FeatureRows, principal_components
from ropaws.methods.propagation import VOTERS
from ropaws.models.heads import main_directions
from ropaws.training import feature_head
from ropaws.training.feature_classifier import (
    ClassifierSettings,
    FeatureClassifier,
    HeadTrial,
    LabeledRows,
    try_head,
)

UNLABELED = -1
BLOCK = 2048  # rows that are worked on at a time


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
        time.
    steps : int, default=300
        Training steps of the head.
    random_state : int, RandomState instance or None, default=0
        Controls batches, weights and the choice of the voters.

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
        X = validate_data(self, X, dtype=[np.float32, np.float64], ensure_min_samples=2)  # noqa: N806
        y, known = _labels(y, X)
        self.classes_, numbers = np.unique(y[known], return_inverse=True)
        labeled = LabeledRows(
            torch.from_numpy(np.flatnonzero(known)), torch.from_numpy(numbers), len(self.classes_)
        )
        rows, looks = _scaled_rows(X), _checked_views(views, X)
        # Once for all trials: features of a network have a thousand dimensions, most of them nearly empty.
        count = min(feature_head.DIMS, rows.shape[1])
        mean, components = principal_components(FeatureRows(rows), count)
        self._mean, self._components = mean.float(), components.float()
        features = FeatureRows(self._project(rows), None if looks is None else self._project(looks))
        trial = self._trial(features, labeled, settings)
        self.head_, self.head_reason_ = "linear" if trial.use else None, trial.reason
        use = ClassifierSettings(**{**vars(settings), "head": trial.use})
        self._classifier = FeatureClassifier(features, labeled, use)
        self.temperature_ = self._classifier.temperature
        self.prior_temperature_ = self._classifier.prior_temperature
        self.in_class_share_ = self._classifier.share
        winners = self._outputs(features.center).probs.argmax(dim=1).numpy()
        winners[known] = numbers
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
        winners = self.predict_proba(X).argmax(axis=1)
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
        probs = self._outputs(self._checked(X)).probs.double()
        return (probs / probs.sum(dim=1, keepdim=True)).numpy()

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
        return self._outputs(self._checked(X)).in_domain.double().numpy()

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
        return self._outputs(self._checked(X)).score.double().numpy()

    def transform(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Embed rows: those of one class lie close together.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples, n_dims)
            Rows of unit length.
        """
        rows = self._checked(X)
        return torch.cat([self._classifier.embed(part) for part in rows.split(BLOCK)]).double().numpy()

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

    def _outputs(self, features: Tensor) -> Outputs:
        parts = [self._classifier.predict(part) for part in features.split(BLOCK)]
        return Outputs(*map(torch.cat, zip(*parts, strict=True)))

    def _checked(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        return self._project(
            _scaled_rows(validate_data(self, X, dtype=[np.float32, np.float64], reset=False))
        )

    def _project(self, rows: Tensor) -> Tensor:
        """(n, ..., d)  ->  (n, ..., e)"""
        return torch.cat([main_directions(part, self._mean, self._components) for part in rows.split(BLOCK)])


def _checked_views(views: Any, X: NDArray[Any]) -> Tensor | None:  # noqa: N803
    if views is None:
        return None
    array = np.asarray(views)
    if array.ndim != 3 or (array.shape[0], array.shape[2]) != X.shape or array.shape[1] == 0:
        raise ValueError(
            f"views must be (n_samples, n_views, n_features) with those of X {X.shape}, got {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError("views has values that are not finite; repair or remove those rows")
    return _scaled_rows(array)


def _labels(y: Any, X: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:  # noqa: N803
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
    known = np.array([not _is_missing(label) for label in y], bool)
    if not known.any():
        raise ValueError(
            "y has no label: every entry is -1 (unlabeled) or missing; label a row of each class"
        )
    check_classification_targets(y[known])
    return y, known


def _is_missing(label: Any) -> bool:
    if isinstance(label, str):
        return label == ""
    return label is None or label != label or label == UNLABELED  # NaN is not equal to itself


def _scaled_rows(rows: NDArray[Any]) -> Tensor:
    """Rows whose largest entry is 1 in size, in float32; only their direction counts. Zeros stay.

    (..., d)  ->  (..., d)
    """
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return torch.from_numpy((rows / np.where(largest > 0, largest, 1)).astype(np.float32))
