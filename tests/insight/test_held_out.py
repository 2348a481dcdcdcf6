"""Logistic regression on features, labels held out, learning curves, and their standard errors."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.classify.classifier import ClassifierSettings
from ropaws.classify.head import LabeledRows
from ropaws.classify.logistic import fit_logistic
from ropaws.insight import held_out
from ropaws.insight.held_out import accuracy, difference


def clusters(per_class, *, classes=3, dims=8, spread=0.3, seed=0):
    """Points around one center per class, far from the origin as the features of a network are."""
    random = torch.Generator().manual_seed(seed)
    centers = torch.eye(dims)[:classes] + 2
    labels = torch.arange(classes).repeat_interleave(per_class)
    points = centers[labels] + spread * torch.randn(len(labels), dims, generator=random)
    return points, labels


@pytest.mark.parametrize(("per_class", "dims"), [(3, 40), (30, 8)])  # fewer rows than dimensions, and more
@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression_is_that_of_scikit_learn(per_class, dims, classes):
    from sklearn.linear_model import LogisticRegression

    points, labels = clusters(per_class, classes=classes, dims=dims)
    queries, _ = clusters(20, classes=classes, dims=dims, seed=1)
    rows = F.normalize(points.double(), dim=1)
    mean = rows.mean(dim=0)
    scale = (rows - mean).square().sum(dim=1).mean().sqrt()
    plain = LogisticRegression(C=10, max_iter=5000, tol=1e-8).fit((rows - mean) / scale, labels)
    expected = plain.predict_proba((F.normalize(queries.double(), dim=1) - mean) / scale)
    found = fit_logistic(points, labels, classes=classes)(queries)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)


def test_a_class_without_a_label_is_never_predicted():
    points, labels = clusters(4, classes=2)
    probs = fit_logistic(points, labels * 2, classes=4)(points)
    assert probs[:, [1, 3]].max() == 0
    assert (probs.argmax(dim=1) == labels * 2).all()
    only = fit_logistic(points[:4], labels[:4] + 1, classes=3)(points)
    assert (only[:, 1] == 1).all()


def test_points_that_are_all_alike_do_no_harm():
    points, labels = torch.ones(6, 5), torch.tensor([0, 0, 1, 1, 2, 2])
    probs = fit_logistic(points, labels, classes=3)(points)
    assert probs.isfinite().all()
    assert held_out.held_out(points, labels, held_out.logistic, classes=3).isfinite().all()


def test_what_is_held_out_is_not_learned_from():
    """Labels at random: those who saw them would be right, those who did not are at chance."""
    random = torch.Generator().manual_seed(0)
    points, labels = torch.randn(200, 400, generator=random), torch.arange(2).repeat(100)
    assert (fit_logistic(points, labels, classes=2)(points).argmax(dim=1) == labels).double().mean() > 0.9
    for classify in held_out.CLASSIFIERS.values():
        right = held_out.held_out(points, labels, classify, classes=2)
        assert len(right) == 200
        assert abs(float(right.mean()) - 0.5) < 0.12


def test_every_label_is_held_out_once_a_repeat_with_as_many_of_each_class(monkeypatch):
    seen = []

    def classify(rows, labels, queries, classes):
        seen.append((torch.bincount(labels, minlength=classes).tolist(), queries[:, 0].tolist()))
        return torch.zeros(len(queries), dtype=torch.long)

    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    right = held_out.held_out(torch.arange(7.0)[:, None], labels, classify, classes=3)
    assert right.tolist() == [1, 1, 1, 0, 0, 0]  # the only one of its class is not judged
    assert len(seen) == 3 * held_out.REPEATS
    assert all(counts[:2] == [2, 2] for counts, _ in seen)
    for start in range(0, len(seen), 3):
        out = [row for _, rows in seen[start : start + 3] for row in rows]
        assert sorted(out) == list(range(7))


def test_nothing_can_be_held_out_of_single_labels():
    with pytest.raises(ValueError, match="at least 2"):
        held_out.held_out(torch.eye(3), torch.arange(3), held_out.logistic, classes=3)


def test_soft_nearest_neighbors_count_classes_alike():
    rows = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), dim=1)
    query = F.normalize(torch.tensor([[1.0, 1.2]]), dim=1)
    found = held_out.soft_nn_probs(rows, torch.tensor([0, 0, 0, 1]), query, 2, temperature=5.0)
    assert found.argmax(dim=1).tolist() == [1]


def test_refits_have_not_seen_the_labels_that_they_judge():
    """Labels that say nothing: a classifier that had seen them would be right all the time."""
    points, truth = clusters(40)
    points = F.normalize(F.normalize(points, dim=1) - F.normalize(points, dim=1).mean(dim=0), dim=1)
    rows = torch.arange(0, len(points), 4)
    settings = ClassifierSettings(steps=20)
    good = held_out.held_out_refits(points, LabeledRows(rows, truth[rows], 3), settings)
    assert float(good.double().mean()) > 0.9
    random = torch.randint(3, (len(rows),), generator=torch.Generator().manual_seed(0))
    bad = held_out.held_out_refits(points, LabeledRows(rows, random, 3), settings)
    assert float(bad.double().mean()) < 0.6
    lone = torch.tensor([0, 0, 0, 1])
    judged = held_out.held_out_refits(points, LabeledRows(rows[:4], lone, 2), settings)
    assert len(judged) == 3


def test_standard_errors():
    right = torch.tensor([True] * 80 + [False] * 20)
    found = accuracy(right)
    assert found.value == pytest.approx(0.8)
    assert found.error == pytest.approx(math.sqrt(0.8 * 0.2 / 100), rel=0.02)
    assert accuracy(torch.ones(10)).error > 0.05  # 10 of 10 is not certain
    other = right.clone()
    other[:2] = False
    gain = difference(right, other)
    assert gain.value == pytest.approx(0.02)
    assert gain.error == pytest.approx(math.sqrt(0.02 * 0.98 / 100))  # far below that of two accuracies
    assert difference(right, right) == (0, 0)


def test_a_learning_curve_rises_and_its_last_doubling_is_the_difference():
    points, labels = clusters(20, dims=30, spread=0.4)
    found = held_out.learning_curve(points, labels, classes=3)
    assert found.labels_per_class == [1, 2, 4, 8, 16]
    assert 55 <= found.images <= 60  # over all draws, nearly every label was held out
    for series in found.series.values():
        values = [point.value for point in series.accuracy]
        assert values[-1] > values[0] + 0.1
        assert series.last.value == pytest.approx(values[-1] - values[-2])
        assert all(0 < point.error < 0.15 for point in (*series.accuracy, series.last))


def test_a_learning_curve_on_tests_agrees_with_that_on_held_out_labels():
    points, labels = clusters(33, spread=0.8)
    tests, truth = clusters(300, spread=0.8, seed=1)
    out = held_out.learning_curve(points, labels, classes=3)
    test = held_out.curve_on_tests(points, labels, tests, truth, classes=3)
    assert (test.labels_per_class, test.images) == ([1, 2, 4, 8, 16, 32], 900)
    for name, series in out.series.items():
        for one, other in zip(series.accuracy, test.series[name].accuracy, strict=True):
            assert abs(one.value - other.value) < 3 * math.hypot(one.error, other.error)


def test_standard_errors_of_a_curve_cover_what_other_labels_would_give():
    """Over many data sets of 12 labels the errors that are said and the spread that is seen agree."""
    curves = [held_out.learning_curve(*clusters(4, spread=0.8, seed=seed), classes=3) for seed in range(25)]
    points = [curve.series["soft_nn"].accuracy[-1] for curve in curves]
    spread = np.std([point.value for point in points])
    said = np.mean([point.error for point in points])
    assert 0.5 < said / spread < 2


@pytest.mark.parametrize(("sizes", "expected"), [([2, 2, 2], None), ([1, 1, 9], None), ([3, 3, 3], [1, 2])])
def test_a_learning_curve_needs_three_labels_per_class(sizes, expected):
    labels = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    points = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0))
    found = held_out.learning_curve(points, labels, classes=3)
    assert (found and found.labels_per_class) == expected


def test_a_class_with_few_labels_keeps_one_to_test_on(monkeypatch):
    learned = []

    def classify(rows, labels, queries, classes):
        learned.append(torch.bincount(labels, minlength=classes).tolist())
        return torch.zeros(len(queries), dtype=torch.long)

    monkeypatch.setattr(held_out, "CLASSIFIERS", {"logistic": classify})
    labels = torch.tensor([0] * 9 + [1] * 9 + [2] * 9 + [3] * 2 + [4])
    points = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0))
    found = held_out.learning_curve(points, labels, classes=5)
    assert found.labels_per_class == [1, 2, 4, 8]
    assert learned[:4] == [[1, 1, 1, 1, 1], [2, 2, 2, 1, 1], [4, 4, 4, 1, 1], [8, 8, 8, 1, 1]]
    assert found.images <= 29  # the lone label is learned from, never tested on
