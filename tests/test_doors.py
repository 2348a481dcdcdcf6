"""The same rows and labels get the same answers through every door: estimator, run, page."""

import numpy as np
import pytest
import torch

from ropaws import RoPAWSClassifier, Run, evaluate, train_on
from ropaws.core.features import FeatureRows
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore.fitting import Answered, fit_round
from ropaws.explore.pool import in_main_directions
from tests.classify.test_pool_prior import mixture


@pytest.fixture(scope="module")
def rows():
    """Three classes, 6 labels each, and as many rows of no class.   ->  X (n, d), y (n,), labeled first"""
    points, truth, labeled = mixture(60, 60, labels=6, seed=3)
    rest = torch.ones(len(points), dtype=torch.bool)
    rest[labeled] = False
    order = torch.cat([labeled, rest.nonzero().squeeze(1)])
    y = torch.full((len(points),), UNLABELED)
    y[: len(labeled)] = truth[labeled]
    return points[order].half().float().numpy(), y.numpy()


@pytest.fixture(scope="module")
def estimator(rows):
    # These few dimensions stand for the features of a network, of which directions alone count.
    model = RoPAWSClassifier(lengths=False).fit(*rows)
    assert model.head_ == "linear"
    return model


def answered(y):
    none = torch.zeros(len(y), dtype=torch.bool)
    return Answered(torch.from_numpy(y), (0, 1, 2), none, none)


def page(X, y):  # noqa: N803
    points = in_main_directions(FeatureRows(torch.from_numpy(X)), torch.arange(len(X)))
    return fit_round(points, answered(y), lambda *_: None)


def test_a_run_says_what_the_estimator_says(rows, estimator, tmp_path):
    X, y = rows  # noqa: N806
    known = y >= 0
    run = Run(train_on((X[known], y[known]), X[~known], out=tmp_path / "run", device="cpu"))
    found = run.predict(X)
    probs = np.array([prediction.probabilities for prediction in found])
    # Rows are scaled before they are normalized there: Adam's first steps make more of the last digit.
    np.testing.assert_allclose(probs, estimator.predict_proba(X), atol=5e-3)
    in_domain = np.array([prediction.in_domain for prediction in found])
    np.testing.assert_allclose(in_domain, estimator.in_domain(X), atol=1e-4)
    assert in_domain.min() < 0.3 < 0.7 < in_domain.max()
    figures = evaluate(run.path)["features"]
    assert figures["on"] == "labels"
    for name in ("own", "logistic"):  # of fits that have not seen the label
        assert figures[name]["low"] < figures[name]["accuracy"] <= figures[name]["high"] <= 1
    assert figures["images"] == known.sum()


def test_the_page_says_what_the_estimator_says(rows, estimator):
    X, y = rows  # noqa: N806
    found = page(X, y)
    np.testing.assert_allclose(found.probs, estimator.predict_proba(X), atol=1e-4)
    unlabeled = y == UNLABELED
    np.testing.assert_allclose(found.in_class[unlabeled], estimator.in_domain(X)[unlabeled], atol=1e-4)
    assert (found.in_class[~unlabeled] == 1).all()
    assert found.share == estimator.in_class_share_
    for suggestion in found.suggestions:
        assert suggestion.in_class == pytest.approx(float(found.in_class[suggestion.position]))


def test_an_answer_of_out_of_class_lowers_what_is_near(rows):
    X, y = rows  # noqa: N806
    before = page(X, y)
    lowest = int(before.in_class.argmin())
    near = np.argsort(-(X @ X[lowest]))[:8]
    marked = y.copy()
    marked[near[:3]] = OUT_OF_CLASS
    after = page(X, marked)
    assert (after.in_class[near[:3]] == 0).all()
    assert (after.in_class[near[3:]] < 0.2).all()
    known = y >= 0
    assert (after.in_class[known] == 1).all()
