"""What to label next, on features whose clusters and classes are known."""

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws.classify.pool_prior import in_class_probability
from ropaws.core.features import main_points
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight import suggestions
from ropaws.insight.metrics import detection
from ropaws.insight.suggestions import OURS, STRATEGIES, Situation, coverage, row_weights, suggest


def pool(per_cluster=40, clusters=6, seed=0, spread=0.15, d=16):
    """Clusters around random directions.   ->  points (n, d), cluster of each, labels: none"""
    random = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(clusters, d, generator=random), dim=1)
    cluster = torch.arange(clusters).repeat_interleave(per_cluster)
    noise = spread * torch.randn(len(cluster), d, generator=random)
    points = F.normalize(centers[cluster] + noise, dim=1)
    return points, cluster, torch.full((len(points),), UNLABELED)


# Cold start


def test_without_labels_every_cluster_gets_one_and_stands_for_it():
    points, cluster, labels = pool()
    found = suggest(points, labels, classes=3, count=6)
    assert sorted(cluster[[pick.position for pick in found]].tolist()) == list(range(6))
    assert {pick.stands_for for pick in found} == {40}
    assert {(pick.in_class, pick.predicted, pick.margin) for pick in found} == {(1.0, -1, 0.0)}


def test_the_largest_cluster_is_first_and_its_pick_is_typical():
    points, cluster, labels = pool(60, 4, spread=0.2)
    kept = torch.cat([torch.arange(0, 60), *(torch.arange(60 * k, 60 * k + 15) for k in (1, 2, 3))])
    points, cluster, labels = points[kept], cluster[kept], labels[kept]
    first = suggest(points, labels, classes=4, count=4)[0]
    assert cluster[first.position] == 0
    to_mean = main_points(points)[:60] @ F.normalize(main_points(points)[:60].mean(dim=0), dim=0)
    assert (to_mean > to_mean[first.position]).sum() < 6  # among the tenth nearest to the middle


# With answers


def test_what_has_an_answer_is_covered():
    points, cluster, labels = pool()
    labels[[0, 40]] = torch.tensor([0, 1])  # clusters 0 and 1 are labeled
    labels[80] = OUT_OF_CLASS  # 2 is out-of-class
    found = suggest(points, labels, classes=5, count=3)
    assert sorted(cluster[[pick.position for pick in found]].tolist()) == [3, 4, 5]


def test_the_gate_decides_where_all_else_is_equal():
    points, cluster, labels = pool(30, 4)
    for likely in range(4):
        in_class = torch.where(cluster == likely, 0.9, 0.1)
        first = suggest(points, labels, classes=2, count=1, in_class=in_class)[0]
        assert cluster[first.position] == likely
        assert first.in_class == pytest.approx(0.9)


def test_doubt_about_the_class_decides_where_all_else_is_equal():
    points, cluster, labels = pool(30, 4)
    labels[0] = 0
    for doubtful in (1, 2, 3):
        probs = torch.where(
            (cluster == doubtful)[:, None], torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
        )
        first = suggest(points, labels, classes=2, count=1, in_class=torch.ones(120), probs=probs)[0]
        assert cluster[first.position] == doubtful
        assert first.margin == pytest.approx(0.0)


def test_doubt_that_comes_from_being_outside_does_not_count():
    """Probabilities are given in-class: a sure class stays sure however unlikely the row is in-class."""
    points, _, labels = pool(10, 2)
    labels[0] = 0
    sure = torch.tensor([0.99, 0.01]).expand(20, 2)
    found = [
        row_weights(Situation(points, labels, 2, torch.full((20,), p), sure))[5] for p in (1.0, 0.6, 0.2)
    ]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("looked_at", [1, 64])
def test_greedy_coverage_is_the_loop(monkeypatch, looked_at):
    """Each pick by the definition, one candidate after the other."""
    monkeypatch.setattr(suggestions, "LOOKED_AT", looked_at)
    points, _, labels = pool(12, 3, spread=0.5)
    points, random = main_points(points), np.random.default_rng(0)
    labels[[3, 20]] = torch.tensor([0, OUT_OF_CLASS])
    probs = torch.from_numpy(random.dirichlet([1, 1], 36)).float()
    situation = Situation(points, labels, 2, torch.from_numpy(random.random(36)).float(), probs)
    picks = coverage(situation, 5, 0)
    kernel = np.exp((points.numpy() @ points.numpy().T - 1) / suggestions.REACH)
    weights = row_weights(situation).numpy()
    free = [row for row in range(36) if labels[row] == UNLABELED]
    chosen = [3, 20]
    for pick in picks:

        def covered(rows):
            return sum(weights[i] * max(kernel[i, j] for j in rows) for i in free)

        left = [row for row in free if row not in chosen]
        assert covered([*chosen, pick]) == pytest.approx(
            max(covered([*chosen, row]) for row in left), rel=1e-5
        )
        chosen.append(pick)


def test_a_large_pool_is_sampled_by_weight(monkeypatch):
    points, cluster, labels = pool(100, 4)
    monkeypatch.setattr(suggestions, "MOST", 50)
    in_class = torch.where(cluster == 1, 1.0, 0.0)
    found = suggest(points, labels, classes=2, count=5, in_class=in_class)
    assert (cluster[[pick.position for pick in found]] == 1).all()
    assert found == suggest(points, labels, classes=2, count=5, in_class=in_class)


# What always holds


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 30),
    d=st.integers(1, 8),
    classes=st.integers(1, 4),
    count=st.integers(1, 40),
    seed=st.integers(0, 100),
    strategy=st.sampled_from([OURS, *STRATEGIES]),
    kind=st.sampled_from(["normal", "equal", "zero", "large"]),
)
def test_every_row_at_most_once_and_never_an_answered_one(n, d, classes, count, seed, strategy, kind):
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=random)
    features = {
        "normal": features,
        "equal": torch.ones(n, d),
        "zero": 0 * features,
        "large": 1e20 * features,
    }[kind]
    labels = torch.randint(OUT_OF_CLASS, classes, (n,), generator=random)
    found = suggest(features, labels, classes=classes, count=count, strategy=strategy, seed=seed)
    rows = [pick.position for pick in found]
    unlabeled = (labels == UNLABELED).nonzero().squeeze(1).tolist()
    assert len(set(rows)) == len(rows) == min(count, len(unlabeled))
    assert set(rows) <= set(unlabeled)
    assert sum(pick.stands_for for pick in found) <= len(unlabeled)
    for pick in found:
        assert 0 <= pick.in_class <= 1
        assert 0 <= pick.margin <= 1
        assert -1 <= pick.predicted < classes
    again = suggest(features, labels, classes=classes, count=count, strategy=strategy, seed=seed)
    assert again == found


def test_bad_arguments_are_named():
    points, _, labels = pool(5, 2)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        suggest(points, labels, classes=2, count=0)
    with pytest.raises(ValueError, match=r"strategy must be one of coverage, random, .* got best"):
        suggest(points, labels, classes=2, count=1, strategy="best")
    with pytest.raises(ValueError, match="not finite"):
        suggest(points / 0, labels, classes=2, count=1)


# In-class probability


def auroc(p, cluster, labels, inside):
    open_rows = labels == UNLABELED
    return detection(p[open_rows].double(), (cluster < inside)[open_rows]).auroc


def test_without_answers_all_may_be_in_class():
    points, _, labels = pool()
    assert torch.equal(in_class_probability(points, labels, classes=3), torch.ones(240))


def test_answers_vote_for_what_is_near_them():
    points, cluster, labels = pool()
    labels[[0, 40]] = torch.tensor([0, 1])
    labels[[120, 160]] = OUT_OF_CLASS
    found = in_class_probability(points, labels, classes=3)  # a class has no label: nothing is said of it
    means = [float(found[(cluster == k) & (labels == UNLABELED)].mean()) for k in range(6)]
    assert min(means[:2]) > 0.65
    assert max(means[3:5]) < 0.35
    assert means[2] == pytest.approx(0.5, abs=0.05)  # the share of the answers
    assert means[5] == pytest.approx(0.5, abs=0.05)
    assert (found[[0, 40]] == 1).all()
    assert (found[[120, 160]] == 0).all()


def test_unseen_classes_are_not_called_out_of_class():
    """Labels of two of three classes, and no other answer: they say nothing against the third."""
    points, _, labels = pool()
    labels[[0, 40]] = torch.tensor([0, 1])
    assert torch.equal(in_class_probability(points, labels, classes=3), torch.ones(240))


def test_with_labels_of_all_classes_the_pool_says_what_is_outside():
    points, cluster, labels = pool(spread=0.3)
    for number in range(3):
        labels[40 * number : 40 * number + 5] = number
    found = in_class_probability(points, labels, classes=3)
    assert auroc(found, cluster, labels, 3) > 0.95
    assert float(found[labels == UNLABELED].mean()) == pytest.approx(105 / 225, abs=0.2)


def test_labeled_outliers_help():
    points, cluster, labels = pool(60, 10, seed=3, spread=0.45)
    for number in range(4):
        labels[60 * number] = number
    alone = auroc(in_class_probability(points, labels, classes=4), cluster, labels, 4)
    for number in range(4, 10):
        labels[60 * number] = OUT_OF_CLASS
    both = auroc(in_class_probability(points, labels, classes=4), cluster, labels, 4)
    assert both > alone + 0.02


def test_probabilities_are_calibrated():
    """Of the rows that are said to be in-class with probability p, about a share p is."""
    said, true = [], []
    for seed in range(8):
        points, cluster, labels = pool(50, 10, seed=seed, spread=0.5)
        random = torch.Generator().manual_seed(seed)
        rows = torch.randperm(500, generator=random)[:50]
        labels[rows] = torch.where(cluster[rows] < 5, cluster[rows], OUT_OF_CLASS)
        found = in_class_probability(points, labels, classes=5)
        said.append(found[labels == UNLABELED])
        true.append((cluster < 5)[labels == UNLABELED])
    said, true = torch.cat(said), torch.cat(true).float()
    assert float(said.mean()) == pytest.approx(float(true.mean()), abs=0.05)
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.01)):
        mine = (said >= low) & (said < high)
        assert float(said[mine].mean()) == pytest.approx(float(true[mine].mean()), abs=0.15)


def test_main_points_are_centered_unit_rows_of_any_scale():
    features = torch.randn(200, 30, generator=torch.Generator().manual_seed(0)) + 5
    found = main_points(features, dims=10)
    assert found.shape == (200, 10)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(200))
    assert float(found.mean(dim=0).norm()) < 0.2
    torch.testing.assert_close(main_points(1000 * features, dims=10), found, atol=1e-4, rtol=1e-3)


def test_twenty_thousand_rows_take_seconds():
    random = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(50, 256, generator=random)
    which = torch.randint(50, (20_000,), generator=random)
    features = centers[which] + torch.randn(20_000, 256, generator=random)
    labels = torch.full((20_000,), UNLABELED)
    labels[:50] = torch.where(which[:50] < 20, which[:50], OUT_OF_CLASS)
    began = time.process_time()
    found = suggest(features, labels, classes=20, count=50)
    assert len(found) == 50
    assert time.process_time() - began < 60
