"""RoPAWS's classifier on feature arrays, as a scikit-learn estimator."""

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ropaws import equations as eq
from ropaws.methods.propagation import VOTERS, Kernel, Voters, ask_voters, choose_voters, solve_voters
from ropaws.methods.soft_nn import (
    TYPICAL_PRIOR,
    LabeledEmbeddings,
    class_probabilities,
    fitted_prior_temperature,
    leave_one_out,
    nearest_same_class,
)

UNLABELED = -1
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # to choose from
AS_GOOD = 0.02  # difference of mean log likelihood that does not count
JUDGES = 4096  # labeled rows that choose, at most
BLOCK = 1024  # rows that are worked on at a time


class RoPAWSClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Open-set semi-supervised classifier on feature arrays.

    Rows are scaled to unit length and compared by cosine. Labels are propagated through the unlabeled rows,
    and a row far from every label counts as out-of-class: Eq. (12) and (13) of the RoPAWS paper. Time grows
    with the number of rows times `voters`; no matrix of all pairs of rows is made.

    Features that share a large common part, such as pixels, may do better if their mean is subtracted first.

    Parameters
    ----------
    temperature : float or "auto", default="auto"
        Temperature of the similarity kernel. "auto" takes the one at which the labeled rows best predict one
        another. The networks of this package are trained with 0.1.
    prior_temperature : float, "auto" or None, default="auto"
        Temperature of the in-domain prior. "auto" takes it from the distances between labeled rows of the
        same class. None switches the prior off.
    label_ratio : float, default=5.0
        Weight of all labeled rows together relative to all unlabeled ones.
    voters : int or None, default=1024
        Number of unlabeled rows that vote, at most. None lets all of them vote, in quadratic time.
    random_state : int, RandomState instance or None, default=0
        Controls the choice of the voters.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The classes in `y`, without -1.
    transduction_ : ndarray of shape (n_samples,)
        The label of each row of `X` after fitting; labeled rows keep theirs.
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
    >>> X = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [-1.0, -1.0]])
    >>> y = np.array([0, -1, 1, -1, -1])
    >>> model = RoPAWSClassifier(temperature=0.1, prior_temperature=0.1).fit(X, y)
    >>> model.predict(X[:4]).tolist()
    [0, 0, 1, 1]
    >>> bool(model.in_domain(X)[4] < 0.01)  # far from every label
    True
    """

    def __init__(
        self,
        *,
        temperature: float | Literal["auto"] = "auto",
        prior_temperature: float | Literal["auto"] | None = "auto",
        label_ratio: float = 5.0,
        voters: int | None = VOTERS,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.temperature = temperature
        self.prior_temperature = prior_temperature
        self.label_ratio = label_ratio
        self.voters = voters
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "RoPAWSClassifier":  # noqa: N803 - scikit-learn's name
        """Fit to labeled and unlabeled rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features of all rows.
        y : array-like of shape (n_samples,)
            Class of each row, or -1 for unlabeled. If classes are strings, use an array of dtype object with
            the number -1.

        Returns
        -------
        RoPAWSClassifier
            The fitted estimator.
        """
        X, y = validate_data(self, X, y, dtype=[np.float32, np.float64], ensure_min_samples=2)  # noqa: N806
        known = np.array([label != UNLABELED for label in y], bool)  # names among which there may be a -1
        if y.dtype.kind in "US" and (y == str(UNLABELED)).any():
            raise ValueError(
                "y has the text '-1'; to mark an unlabeled row among names use the number -1 in an array of"
                " dtype object"
            )
        if not known.any():
            raise ValueError("y has no label: every entry is -1 (unlabeled); label a row of each class")
        check_classification_targets(y[known])
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.classes_, numbers = np.unique(y[known], return_inverse=True)
        self._support = _unit_rows(X[known])
        labels = torch.from_numpy(numbers)
        self._labels = F.one_hot(labels, len(self.classes_)).to(self._support.dtype)
        self.temperature_ = self._chosen_temperature(labels)
        self.prior_temperature_ = self._chosen_prior_temperature(labels)
        unlabeled = np.flatnonzero(~known)
        chosen = unlabeled[choose_voters(len(unlabeled), self.voters, seed=seed).numpy()]
        self._voters = self._solve(_unit_rows(X[chosen]))
        winners = np.empty(len(X), np.int64)
        if self._voters is not None:
            for start in range(0, len(X), BLOCK):  # no copy of X is made
                mass = self._mass(_unit_rows(X[start : start + BLOCK]))
                winners[start : start + BLOCK] = mass.argmax(dim=1).numpy()
            winners[chosen] = self._voters.mass.argmax(dim=1).numpy()  # voters have no say on themselves
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
        """Predict the probability of each class; near uniform where a row looks out-of-class.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        ndarray of shape (n_samples, n_classes)
            Rows sum to 1; columns are in the order of `classes_`.
        """
        return eq.complete_posterior(self._mass(self._checked(X))).probs.double().numpy()

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
        return eq.complete_posterior(self._mass(self._checked(X))).in_domain.double().numpy()

    def _checked(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        rows = _unit_rows(validate_data(self, X, dtype=[np.float32, np.float64], reset=False))
        return rows.to(self._support.dtype)

    def _chosen_temperature(self, labels: Tensor) -> float:
        """The most likely one, each labeled row predicted by the others; 0.1 for single labels."""
        if self.temperature != "auto":
            return self.temperature
        rows = (torch.bincount(labels)[labels] > 1).nonzero().squeeze(1)[:JUDGES]
        if len(rows) < 2:
            return 0.1
        labels = labels[rows]
        support = LabeledEmbeddings(self._support[rows], labels, len(self.classes_))

        def log_likelihood(temperature: float) -> float:
            probs = leave_one_out(support, temperature=temperature)
            return float(probs.gather(1, labels[:, None]).clamp_min(1e-6).log().mean())

        found = {temperature: log_likelihood(temperature) for temperature in TEMPERATURES}
        # Among those that do as well the widest kernel, which hears of more neighbors.
        return max(t for t, value in found.items() if value >= max(found.values()) - AS_GOOD)

    def _chosen_prior_temperature(self, labels: Tensor) -> float | None:
        if self.prior_temperature != "auto":
            return self.prior_temperature
        return fitted_prior_temperature(nearest_same_class(self._support, labels), TYPICAL_PRIOR)

    @property
    def _kernel(self) -> Kernel:
        return Kernel(
            temperature=self.temperature_,
            prior_temperature=self.prior_temperature_,
            label_ratio=self.label_ratio,
        )

    def _solve(self, voters: Tensor) -> Voters | None:
        return solve_voters(voters, self._support, self._labels, self._kernel) if len(voters) else None

    def _mass(self, queries: Tensor) -> Tensor:
        """From the labels and the voters; without unlabeled rows, PAWS's prediction times the prior."""
        if self._voters is not None:
            return ask_voters(queries, self._support, self._labels, self._voters, self._kernel)
        labeled = LabeledEmbeddings(self._support, self._labels.argmax(dim=1), len(self.classes_))
        mass = class_probabilities(queries, labeled, temperature=self.temperature_)
        if self.prior_temperature_ is None:
            return mass
        prior = eq.in_domain_prior(queries, self._support, temperature=self.prior_temperature_)
        return mass * prior[:, None]


def _unit_rows(X: NDArray[Any]) -> Tensor:  # noqa: N803
    """A row of zeros has no direction; it stays, similar to nothing."""
    rows = torch.from_numpy(np.require(X, requirements=["C", "W"]))  # a copy where X is read-only
    return F.normalize(rows, dim=1, eps=math.sqrt(eq.TINY))
