"""How much a point looks like the known classes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.classify import in_class_score
from ropaws.classify.in_class_score import (
    DENSITY_TEMPERATURE,
    Labeled,
    class_means,
    evidence,
    evidence_weights,
    held_out_evidence,
    known_points,
    log_density_ratio,
    refined_means,
)
from ropaws.insight.metrics import detection
from tests import oracles
from tests.insight.test_pool import blobs, rows

CLASSES = torch.tensor([0, 0, 0, 1, 2, 2])
LABELED = Labeled(rows(6, 1), CLASSES, 3)
POOL = rows(15, 2)


@pytest.mark.parametrize("prior", [None, torch.tensor([0.7, 0.1, 0.2], dtype=torch.float64)])
def test_the_density_ratio_is_that_of_kernel_means(prior):
    queries = rows(5, 3)
    found = log_density_ratio(queries, LABELED._replace(class_prior=prior), POOL, temperature=0.3)
    points, frequencies = LABELED.points.numpy(), None if prior is None else prior.tolist()
    expected = [
        oracles.log_density_ratio(x, points, CLASSES.tolist(), POOL.numpy(), 0.3, frequencies)
        for x in queries.numpy()
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_a_point_of_the_sample_does_not_count_itself():
    new = rows(1, 9)
    found = log_density_ratio(torch.cat([POOL[[3, 7]], new]), LABELED, POOL)
    for row, position in enumerate((3, 7)):
        others = POOL[[i for i in range(15) if i != position]]
        expected = log_density_ratio(POOL[[position]], LABELED, others)
        torch.testing.assert_close(found[row : row + 1], expected)
    everything = oracles.log_density_ratio(
        new[0].numpy(), LABELED.points.numpy(), CLASSES.tolist(), POOL.numpy(), DENSITY_TEMPERATURE, None
    )
    assert float(found[2]) == pytest.approx(everything)
    twice = torch.cat([POOL, POOL[[3]]])  # of equal images one counts: the other is another image
    expected = log_density_ratio(POOL[[3]], LABELED, POOL[[i for i in range(15) if i != 3]])
    assert (log_density_ratio(POOL[[3]], LABELED, twice) < expected).all()


@pytest.mark.parametrize("prior", [None, torch.tensor([0.7, 0.1, 0.2], dtype=torch.float64)])
def test_refined_means_are_oslos(prior):
    found = refined_means(LABELED._replace(class_prior=prior), POOL)
    points, frequencies = LABELED.points.numpy(), None if prior is None else prior.tolist()
    expected = oracles.refined_means(
        points, CLASSES.tolist(), POOL.numpy(), 5.0, 0.05, 0.1, rounds=2, prior=frequencies
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_class_without_labels_has_no_mean_and_no_say():
    without = Labeled(LABELED.points, CLASSES.clone().clamp_max(1), 3)
    known = known_points(without, POOL)
    assert not known.means[2].any()
    assert not known.refined[2].any()
    smaller = known_points(without._replace(class_count=2), POOL)
    torch.testing.assert_close(evidence(rows(4, 4), known), evidence(rows(4, 4), smaller))


def test_without_a_pool_that_looks_in_class_the_refined_means_stay():
    # A cosine of -1 to every class: the inlier probability is 0 to the last digit.
    far = -F.normalize(class_means(LABELED).sum(dim=0, keepdim=True), dim=1).repeat(50, 1)
    one_class = Labeled(LABELED.points[:1], CLASSES[:1], 1)
    away = -one_class.points.repeat(50, 1)
    torch.testing.assert_close(refined_means(one_class, away), class_means(one_class))
    assert not torch.equal(refined_means(one_class, far), class_means(one_class))


def test_evidence_is_high_in_class_and_alike_in_blocks(monkeypatch):
    points, truth = blobs(40, 4, seed=0)
    labeled = Labeled(points[[0, 1, 40, 41, 80, 81]], truth[[0, 1, 40, 41, 80, 81]], 3)  # none of the fourth
    known = known_points(labeled, points)
    whole = evidence(points, known)
    inside = truth < 3
    assert all(detection(piece, inside).auroc > 0.98 for piece in whole.T)
    monkeypatch.setattr(in_class_score, "BLOCK_BYTES", 4000)
    torch.testing.assert_close(evidence(points, known), whole)
    assert evidence(points[:0], known).shape == (0, 3)


def test_held_out_labels_look_like_in_class_images_of_the_pool():
    """What the prior rests on: without their own vote, labels are an unbiased sample."""
    points, truth = blobs(100, 5, seed=3, spread=0.5)
    chosen = torch.cat([(truth == c).nonzero().squeeze(1)[:10] for c in range(5)])
    labeled = Labeled(points[chosen], truth[chosen], 5)
    known = known_points(labeled, points)
    rest = torch.ones(500, dtype=torch.bool)
    rest[chosen] = False
    pool = evidence(points[rest], known)
    held = held_out_evidence(labeled, points)
    spread, mean = torch.std_mean(pool, dim=0)
    assert ((held.mean(dim=0) - mean).abs() < 4 * spread / math.sqrt(50)).all()
    counted = evidence(labeled.points, known)  # with their own vote they look better
    assert (counted.mean(dim=0) > held.mean(dim=0)).all()


def test_labels_are_held_out_one_by_one():
    found = held_out_evidence(LABELED, POOL)
    for row in range(6):
        kept = torch.arange(6) != row
        rest = Labeled(LABELED.points[kept], CLASSES[kept], 3)
        expected = evidence(LABELED.points[row : row + 1], known_points(rest, POOL))
        torch.testing.assert_close(found[row : row + 1], expected)


@pytest.mark.parametrize(
    "limits",
    [
        {"MOST_FOLDS": 2},
        {"MANY_LABELS": 5, "FEW_FOLDS": 2},
        {"MANY_LABELS": 5, "MANY_CLASSES": 2, "FEWEST_FOLDS": 2},
    ],
)
def test_many_labels_are_held_out_in_folds_and_a_lone_one_knows_nothing(monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(in_class_score, name, value)
    found = held_out_evidence(LABELED, POOL)
    kept = torch.tensor([False, True, False, True, False, True])
    rest = Labeled(LABELED.points[kept], CLASSES[kept], 3)
    torch.testing.assert_close(found[~kept], evidence(LABELED.points[~kept], known_points(rest, POOL)))
    lone = Labeled(LABELED.points[:1], CLASSES[:1], 1)
    assert held_out_evidence(lone, POOL).isnan().all()


@pytest.mark.parametrize(("labels", "classes"), [(1, 1), (10, 10), (250, 10), (0, 0)])
def test_the_pool_counts_for_more_with_fewer_labels(labels, classes):
    weights = evidence_weights(labels, classes, 1280)
    assert float(weights.sum()) == pytest.approx(1)
    assert weights[2] >= weights[0] == weights[1]
    of_pixels = evidence_weights(labels, classes, 65)
    assert float(of_pixels.sum()) == pytest.approx(1)
    assert float(of_pixels[0] / of_pixels[1]) == pytest.approx(3)
    assert of_pixels[2] / of_pixels[1] == pytest.approx(float(weights[2] / weights[1]))
