"""What a person would try on features first, and the paper's methods on the head that ours uses.

Every rival gets what ours makes of the features: unit rows around the mean of the pool, in their 256 main
directions. Each answers with class probabilities of the test rows and with every in-class score that it
offers: the one with the highest AUROC counts.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from feature_tasks import Array, Data
from method_heads import start_encoder, train_head
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.semi_supervised import LabelPropagation, LabelSpreading, SelfTrainingClassifier
from torch import Tensor

from ropaws import RoPAWSClassifier
from ropaws.classify import head
from ropaws.classify.head import LabeledRows
from ropaws.core.features import FeatureRows, main_directions, principal_components
from ropaws.methods import PAWS, LabeledEmbeddings, Method, RoPAWS


class Answer(NamedTuple):
    """Of the test rows."""

    probs: Array  # (t, c)
    scores: Mapping[str, Array]  # each (t,), high in-class
    share: float | None = None  # estimated, of the pool
    words: str = ""


class Problem(NamedTuple):
    """A draw of labels."""

    data: Data
    labeled: Array  # positions
    rows: Array  # (n, d) prepared features of the pool
    test: Array  # (t, d)
    seed: int

    @property
    def y(self) -> Array:
        """scikit-learn's way to say unlabeled."""
        y = np.full(len(self.rows), -1)
        y[self.labeled] = self.data.truth[self.labeled]
        return y

    @property
    def known(self) -> Array:
        return self.data.truth[self.labeled]


def problem(data: Data, labels: int, seed: int) -> Problem:
    features = FeatureRows(torch.from_numpy(data.features))
    mean, components = (
        part.float() for part in principal_components(features, min(head.DIMS, features.shape[1]))
    )
    rows, test = (
        main_directions(torch.from_numpy(part), mean, components).numpy()
        for part in (data.features, data.test)
    )
    return Problem(data, data.draw(labels, seed), _unit(rows), _unit(test), seed)


def _unit(rows: Array) -> Array:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _cosine(p: Problem) -> Array:
    """To the nearest label."""
    return (p.test @ p.rows[p.labeled].T).max(axis=1)


def _regression() -> LogisticRegression:
    return LogisticRegression(C=10, class_weight="balanced", max_iter=2000)


def logistic_regression(p: Problem) -> Answer:
    probs = _regression().fit(p.rows[p.labeled], p.known).predict_proba(p.test)
    return Answer(probs, {"probability": probs.max(axis=1), "cosine": _cosine(p)})


def class_mean(p: Problem) -> Answer:
    means = _unit(np.stack([p.rows[p.labeled[p.known == c]].mean(axis=0) for c in range(p.data.classes)]))
    cosine = p.test @ means.T
    probs = _softmax(cosine / 0.1)
    return Answer(probs, {"cosine": cosine.max(axis=1), "probability": probs.max(axis=1)})


def neighbors(p: Problem) -> Answer:
    count = min(5, len(p.labeled) // p.data.classes)
    model = KNeighborsClassifier(count, metric="cosine", weights="distance", algorithm="brute")
    probs = model.fit(p.rows[p.labeled], p.known).predict_proba(p.test)
    return Answer(probs, {"cosine": _cosine(p), "probability": probs.max(axis=1)})


def label_spreading(p: Problem) -> Answer:
    return _graph(LabelSpreading(kernel="knn", n_neighbors=10, max_iter=100), p)


def label_propagation(p: Problem) -> Answer:
    return _graph(LabelPropagation(kernel="knn", n_neighbors=10, max_iter=1000), p)


def _graph(model: LabelSpreading | LabelPropagation, p: Problem) -> Answer:
    with np.errstate(all="ignore"):  # rows that no label reaches are divided by zero
        probs = np.nan_to_num(model.fit(p.rows, p.y).predict_proba(p.test), nan=1 / p.data.classes)
    return Answer(probs, {"probability": probs.max(axis=1), "cosine": _cosine(p)})


def self_training(p: Problem) -> Answer:
    model = SelfTrainingClassifier(_regression()).fit(p.rows, p.y)
    probs = model.predict_proba(p.test)
    return Answer(probs, {"probability": probs.max(axis=1), "cosine": _cosine(p)})


def oslo(p: Problem, *, inlier: float = 0.05, classes: float = 0.1, rounds: int = 2) -> Answer:
    """Boudiaf et al. 2023, with its defaults; the pool is the query set, test rows are judged afterwards."""
    labels = np.eye(p.data.classes)[p.known]
    sums, counts = labels.T @ p.rows[p.labeled], labels.sum(axis=0)
    means = sums / counts[:, None]

    def judge(rows: Array, shares: Array, times: int) -> tuple[Array, Array]:
        cosine = rows @ _unit(means).T
        for _ in range(times):
            inside = 1 / (1 + np.exp(-(shares * cosine).sum(axis=1) / inlier))
            shares = _softmax(inside[:, None] * cosine / classes)
        return inside, shares

    shares = np.full((len(p.rows), p.data.classes), 1 / p.data.classes)
    for _ in range(rounds):
        inside, shares = judge(p.rows, shares, 1)
        weights = inside[:, None] * shares
        means = (sums + weights.T @ p.rows) / (counts + weights.sum(axis=0))[:, None]
    inside, probs = judge(p.test, np.full((len(p.test), p.data.classes), 1 / p.data.classes), rounds)
    return Answer(probs, {"inlier": inside, "probability": probs.max(axis=1)})


def _softmax(logits: Array) -> Array:
    return F.softmax(torch.from_numpy(logits), dim=1).numpy()


def paws(p: Problem) -> Answer:
    return _trained(PAWS(), p)


def ropaws_of_the_paper(p: Problem) -> Answer:
    return _trained(RoPAWS(), p)


def _trained(method: Method, p: Problem) -> Answer:
    """The paper's loss and classifier, with its settings, on our head, views, steps and optimizer."""
    data = p.data
    views = None if data.views is None else torch.from_numpy(data.views)
    features = FeatureRows(torch.from_numpy(data.features), views)
    labeled = LabeledRows(torch.from_numpy(p.labeled), torch.from_numpy(p.known), data.classes)
    encoder = start_encoder(features)
    model = train_head(encoder, features, labeled, method, steps=head.STEPS, seed=p.seed)
    with torch.no_grad():
        support = LabeledEmbeddings(encoder([features[labeled.rows]])[0].h, labeled.labels, data.classes)
        found = method.predict(model, torch.from_numpy(data.test), support)
    scores: dict[str, Tensor] = {
        "similarity": (found.embedding @ support.embeddings.T).amax(dim=1),
        "probability": found.probs.amax(dim=1),
        "in-domain": found.score,
    }
    return Answer(found.probs.numpy(), {name: score.numpy() for name, score in scores.items()})


def ours(p: Problem) -> Answer:
    model = RoPAWSClassifier(random_state=p.seed).fit(p.data.features, p.y, views=p.data.views)
    share = model.in_class_share_
    return Answer(
        model.predict_proba(p.data.test),
        {"score": model.score_in_domain(p.data.test)},
        None if share is None else share.estimate,
        f"head: {model.head_}; {model.head_reason_}",
    )


OURS = "RoPAWSClassifier"
METHODS: dict[str, Callable[[Problem], Answer]] = {
    "logistic regression": logistic_regression,
    "class mean": class_mean,
    "k-NN": neighbors,
    "LabelSpreading": label_spreading,
    "LabelPropagation": label_propagation,
    "SelfTraining": self_training,
    "OSLO": oslo,
    "PAWS": paws,
    "RoPAWS, paper": ropaws_of_the_paper,
    OURS: ours,
}
