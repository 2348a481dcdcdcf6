"""Analyses on arrays."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.evaluation.baselines import knn_predictions, logistic_predictions
from ropaws.evaluation.calibration import expected_calibration_error, reliability
from ropaws.evaluation.confusion import class_accuracy, confusion_matrix
from ropaws.evaluation.label_errors import suspected_label_errors
from ropaws.evaluation.neighbors import nearest
from ropaws.evaluation.ood import detection
from ropaws.evaluation.sskde import fit_sskde
from ropaws.evaluation.suggestions import suggest
from ropaws.methods.soft_nn import LabeledEmbeddings, leave_one_out
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
    monkeypatch.setattr("ropaws.evaluation.neighbors.BLOCK_BYTES", 100)
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
    monkeypatch.setattr("ropaws.methods.soft_nn.BLOCK_BYTES", 60)
    np.testing.assert_allclose(leave_one_out(known, temperature=0.1), expected)
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(LabeledEmbeddings(support[:1], labels[:1], 3), temperature=0.1)


def errors(points, labels, classes):
    return suspected_label_errors(LabeledEmbeddings(points, labels, classes), temperature=0.1)


def test_flipped_labels_are_found_and_ranked_first():
    points, labels = blobs(20, 5, seed=1)
    assert errors(points, labels, 5) == []
    flipped = torch.tensor([3, 27, 55, 99])
    wrong = labels.clone()
    wrong[flipped] = (labels[flipped] + 1) % 5
    found = errors(points, wrong, 5)
    assert {error.position for error in found} == set(flipped.tolist())
    for error in found:
        assert error.label == wrong[error.position]
        assert error.suspected == labels[error.position]
        assert error.other > 0.5 > error.own
    gaps = [error.other - error.own for error in found]
    assert gaps == sorted(gaps, reverse=True)


def test_a_lone_label_is_not_suspected():
    points, labels = blobs(5, 2, seed=2)
    lone = torch.tensor([2])
    found = errors(torch.cat([points, points[:1]]), torch.cat([labels, lone]), 3)
    assert 10 not in {error.position for error in found}
    assert errors(points[:1], labels[:1], 2) == []


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
    monkeypatch.setattr("ropaws.evaluation.sskde.KERNEL_BYTES", 8 * 40 * 7)
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


def suggested(points, probs, in_domain, support, **kwargs):
    return suggest(points, probs, in_domain, support, threshold=0.5, width=0.1, **kwargs)


def test_a_suggestion_stands_for_doubt_that_no_label_explains():
    """Three clusters: one has a label, one is small and sure, one is large and in doubt."""
    points, cluster = blobs(40, 3, seed=5, spread=0.05)
    probs = torch.full((120, 2), 0.5)
    probs[cluster == 1] = torch.tensor([0.999, 0.001])
    probs[cluster == 0] = torch.tensor([0.001, 0.999])
    inside = torch.ones(120)
    first, *_ = suggested(points, probs, inside, points[:1], count=1)
    assert cluster[first.position] == 2
    assert first.kind == "doubtful"
    assert first.stands_for > 20


def test_suggestions_are_diverse():
    """One pick explains a large cluster; the next go to the small ones."""
    points, cluster = blobs(60, 4, seed=6, spread=0.04)
    kept = torch.cat(
        [torch.arange(0, 10), torch.arange(60, 120), torch.arange(120, 135), torch.arange(180, 195)]
    )
    points, cluster = points[kept], cluster[kept]
    even = torch.full((100, 4), 0.25)
    picks = suggested(points, even, torch.ones(100), points[:1], count=3)
    assert cluster[picks[0].position] == 1
    assert set(cluster[[pick.position for pick in picks]].tolist()) == {1, 2, 3}
    gains = [pick.gain for pick in picks]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("likely", [1, 2])
def test_what_is_likelier_in_class_is_suggested_first(likely):
    points, cluster = blobs(30, 3, seed=11, spread=0.05)
    inside = torch.where(cluster == likely, 0.95, 0.55)
    picks = suggested(points, torch.full((90, 2), 0.5), inside, points[:1], count=1)
    assert cluster[picks[0].position] == likely


def test_clusters_outside_are_likely_new_classes():
    points, cluster = blobs(60, 5, seed=7, spread=0.1)
    inside = (cluster < 3).float()
    probs = torch.full((300, 3), 1 / 3)
    picks = suggested(points, probs, inside, points[:1], count=10)
    new = [pick for pick in picks if pick.kind == "new class"]
    assert len(picks) == 10
    assert len({pick.position for pick in picks}) == 10
    assert {int(cluster[pick.position]) for pick in new} == {3, 4}
    assert any(pick.kind == "new class" for pick in picks[:5])  # near the top, not all at the end


def test_suggestions_when_all_is_outside_or_little_is_there():
    points, _ = blobs(3, 2, seed=8)
    probs = torch.full((6, 2), 0.5)
    picks = suggested(points, probs, torch.zeros(6), points[:1], count=4)
    assert len({pick.position for pick in picks}) == 4
    assert len(suggested(points, probs, torch.ones(6), points[:1], count=50)) == 6
    with pytest.raises(ValueError, match="count must be at least 1"):
        suggested(points, probs, torch.ones(6), points[:1], count=0)
