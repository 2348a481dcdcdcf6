"""Analyses on arrays."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.classify.soft_nn import LabeledEmbeddings, leave_one_out
from ropaws.insight.baselines import fit_sskde, knn_predictions, logistic_predictions
from ropaws.insight.metrics import (
    class_accuracy,
    confusion_matrix,
    detection,
    expected_calibration_error,
    reliability,
)
from ropaws.insight.neighbors import nearest
from tests.oracles import leave_one_out as slow_leave_one_out
from tests.oracles import sskde as slow_sskde


def rows(n, seed, d=6, dtype=torch.float64):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def blobs(per_class, classes, seed, *, spread=0.15, d=16):
    """Clusters around random directions.   ->  points (classes * per_class, d), labels"""
    random = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(classes, d, generator=random), dim=1)
    labels = torch.arange(classes).repeat_interleave(per_class)
    noise = spread * torch.randn(len(labels), d, generator=random)
    return F.normalize(centers[labels] + noise, dim=1), labels


def test_nearest_neighbors_in_blocks(monkeypatch):
    queries, points = rows(17, 4), rows(11, 5)
    whole = nearest(queries, points, 3)
    monkeypatch.setattr("ropaws.insight.neighbors.BLOCK_BYTES", 100)
    blocks = nearest(queries, points, 3)
    assert torch.equal(whole.position, blocks.position)
    similarity = (queries @ points.T).numpy()
    assert np.array_equal(whole.position.numpy(), np.argsort(-similarity, axis=1)[:, :3])
    assert nearest(queries, points, 50).position.shape == (17, 11)


def test_leave_one_out_is_the_loop_over_the_others(monkeypatch):
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    support = rows(7, 6)
    expected = slow_leave_one_out(support.numpy(), labels.tolist(), 3, 0.1)
    known = LabeledEmbeddings(support, labels, 3)
    np.testing.assert_allclose(leave_one_out(known, temperature=0.1), expected)
    monkeypatch.setattr("ropaws.classify.soft_nn.BLOCK_BYTES", 60)
    np.testing.assert_allclose(leave_one_out(known, temperature=0.1), expected)
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(LabeledEmbeddings(support[:1], labels[:1], 3), temperature=0.1)


def test_sskde_is_the_loop():
    points, labels = rows(9, 7).numpy(), [0, 1, 2]
    expected = slow_sskde(points, labels, 3, 0.9, 5, 0.7, points[-1])
    density = fit_sskde(
        torch.tensor(points[:3]),
        torch.tensor(labels),
        torch.tensor(points[3:]),
        classes=3,
        iterations=5,
        gamma=0.7,
    )
    np.testing.assert_allclose(density(torch.tensor(points[-1:]))[0], expected, rtol=1e-10)


def test_sskde_does_not_depend_on_what_is_kept(monkeypatch):
    points, labels = rows(40, 8), torch.tensor([0, 1, 2])
    whole = fit_sskde(points[:3], labels, points[3:], classes=3)(points)
    monkeypatch.setattr("ropaws.insight.baselines.KERNEL_BYTES", 8 * 40 * 7)
    torch.testing.assert_close(fit_sskde(points[:3], labels, points[3:], classes=3)(points), whole)
    torch.testing.assert_close(whole.sum(dim=1), torch.ones(40, dtype=torch.float64))


def test_sskde_with_its_flat_kernel_still_tells_clusters_apart():
    points, truth = blobs(100, 4, seed=3)
    density = fit_sskde(points[::50], truth[::50], points, classes=4)  # gamma = 1 / d
    assert (density(points).argmax(dim=1) == truth).double().mean() > 0.95


@pytest.mark.parametrize("rival", [knn_predictions, logistic_predictions])
def test_rivals_learn_clusters_from_a_few_labels_or_one(rival):
    points, truth = blobs(30, 3, seed=4)
    for every in (5, 30):  # six labels a class, and one
        found = rival(points[::every], truth[::every], points)
        assert (found == truth.numpy()).mean() > 0.95


def test_detection_figures_are_those_of_the_definitions():
    random = np.random.default_rng(0)
    scores = np.concatenate([random.normal(0.4, 0.2, 300), random.normal(0.1, 0.2, 200)]).clip(-1, 1)
    inside = np.arange(500) < 300
    found = detection(torch.tensor(scores), torch.tensor(inside))
    pairs = scores[inside][:, None] - scores[~inside]
    assert found.auroc == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-6)
    # The highest threshold that lets 95 % of the in-class ones through.
    threshold = np.sort(scores[inside])[::-1][int(np.ceil(0.95 * 300)) - 1]
    assert found.fpr95 == pytest.approx((scores[~inside] >= threshold).mean(), abs=1e-6)
    for area, wanted, order in ((found.aupr_in, inside, -scores), (found.aupr_out, ~inside, scores)):
        ranked = wanted[np.argsort(order, kind="stable")]
        precision = np.cumsum(ranked) / np.arange(1, 501)
        assert area == pytest.approx(precision[ranked].mean(), abs=1e-3)


def test_reliability_bins_make_up_the_ece():
    random = np.random.default_rng(1)
    probs = torch.tensor(random.dirichlet([0.5, 0.5, 0.5], 400))
    truth = torch.tensor(random.integers(0, 3, 400))
    bins = reliability(probs, truth)
    assert len(bins) == 15
    assert sum(item.images for item in bins) == 400
    gap = sum(item.images * abs(item.confidence - item.accuracy) for item in bins) / 400
    assert gap == pytest.approx(expected_calibration_error(probs, truth), abs=1e-6)
    assert all(item.low <= item.confidence <= item.high for item in bins if item.images)


def test_confusion_counts_and_knows_empty_classes():
    matrix = confusion_matrix(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 0]), classes=3)
    assert matrix.tolist() == [[2, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert class_accuracy(matrix) == [2 / 3, 1.0, None]
