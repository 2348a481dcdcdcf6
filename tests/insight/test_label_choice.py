"""The strategies that suggestions are compared with, each against what its definition says."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight import suggestions as choice
from ropaws.insight.suggestions import STRATEGIES, Situation, class_probs, margins


@pytest.fixture
def situation():
    """Four clusters of 30, 20, 20 and 10 rows; the first has a label, the second is out-of-class."""
    random = torch.Generator().manual_seed(2)
    centers = F.normalize(torch.randn(4, 12, generator=random), dim=1)
    cluster = torch.arange(4).repeat_interleave(torch.tensor([30, 20, 20, 10]))
    points = F.normalize(centers[cluster] + 0.1 * torch.randn(80, 12, generator=random), dim=1)
    labels = torch.full((80,), UNLABELED)
    labels[0], labels[30] = 0, OUT_OF_CLASS
    in_class = torch.where(cluster == 2, 0.9, 0.1)
    return Situation(points, labels, 2, in_class, torch.full((80, 2), 0.5)), cluster


def fresh(situation):
    """Without any answer."""
    return situation._replace(labels=torch.full_like(situation.labels, UNLABELED))


def test_random_rows_are_spread_evenly(situation):
    found, _ = situation
    counts = np.zeros(80)
    for seed in range(400):
        counts[choice.random_rows(found, 8, seed)] += 1
    assert counts[[0, 30]].tolist() == [0, 0]
    assert counts[counts > 0].std() < 2 * np.sqrt(400 * 8 / 78)
    assert (counts > 0).sum() == 78


def test_gated_random_takes_likely_rows_first(situation):
    found, cluster = situation
    assert set(cluster[choice.gated_random(found, 20, 0)].tolist()) == {2}
    more = choice.gated_random(found, 25, 0)
    assert set(cluster[more[:20]].tolist()) == {2}
    uneven = found._replace(in_class=found.in_class * torch.linspace(0.8, 1, 80))
    picks = {row for seed in range(30) for row in choice.gated_random(uneven, 5, seed)}
    assert len(picks) == 20  # among likely rows the likeliest have no advantage


@pytest.mark.parametrize("name", ["k-means", "typiclust"])
def test_clusters_without_an_answer_come_first_the_largest_first(situation, name):
    found, cluster = situation
    assert cluster[STRATEGIES[name](found, 2, 0)].tolist() == [2, 3]
    assert cluster[STRATEGIES[name](fresh(found), 4, 0)].tolist()[::3] == [0, 3]


def test_k_means_takes_the_row_nearest_to_the_center(situation):
    found, cluster = situation
    pick = choice.k_means_centers(found, 2, 0)[0]
    rows = (cluster == 2).nonzero().squeeze(1)
    assert pick == int(rows[(found.points[rows] - found.points[rows].mean(dim=0)).norm(dim=1).argmin()])


def test_typiclust_takes_the_row_with_the_nearest_neighbors(situation):
    found, cluster = situation
    pick = choice.typiclust(found, 2, 0)[0]
    points = found.points[cluster == 2].numpy()
    distances = np.sort(np.linalg.norm(points[:, None] - points[None], axis=2), axis=1)
    assert pick == 50 + int(distances[:, 1:11].mean(axis=1).argmin())  # half of its 20 rows


def test_probcover_covers_the_most_rows_in_its_radius(situation):
    found, cluster = situation
    start = fresh(found)
    picks = choice.probcover(start, 4, 0)
    near = torch.cdist(start.points, start.points)
    member = choice.k_means(start.points, 2, seed=0).member
    radius = choice._pure_radius(near, member)
    inside = near < radius
    assert int(inside[picks[0]].sum()) == int(inside.sum(dim=1).max())
    assert len(set(cluster[picks].tolist())) >= 2
    pure = [len(member[row].unique()) == 1 for row in inside]
    assert np.mean(pure) >= 0.95
    wider = [len(member[row].unique()) == 1 for row in near < 1.1 * radius]
    assert np.mean(wider) < 0.95


def test_margin_takes_what_is_least_sure():
    probs = torch.tensor([[0.9, 0.1], [0.55, 0.45], [0.6, 0.4], [0.5, 0.5]])
    labels = torch.tensor([UNLABELED, UNLABELED, UNLABELED, 0])
    found = Situation(torch.eye(4), labels, 2, torch.ones(4), probs)
    assert choice.smallest_margin(found, 2, 0) == [1, 2]
    torch.testing.assert_close(margins(probs), torch.tensor([0.8, 0.1, 0.2, 0.0]))
    assert margins(torch.ones(3, 1)).tolist() == [1.0] * 3  # one class leaves no doubt


def test_coreset_takes_the_farthest_row_each_time(situation):
    found, _ = situation
    picks = choice.coreset(found, 6, 0)
    distances = torch.cdist(found.points, found.points)
    answered = [0, 30]
    for pick in picks:
        far = distances[:, answered].amin(dim=1)
        assert float(far[pick]) == pytest.approx(float(far.max()), abs=1e-3)
        answered.append(pick)


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_rows_where_more_are_asked_for(situation, name):
    found, _ = situation
    picks = STRATEGIES[name](found, 1000, 3)
    assert sorted(picks) == [row for row in range(80) if row not in (0, 30)]


def test_class_probs_are_even_without_labels_and_right_with_them(situation):
    found, cluster = situation
    none = class_probs(found.points, torch.full((80,), OUT_OF_CLASS), 4)
    assert torch.equal(none, torch.full((80, 4), 0.25))
    labels = torch.full((80,), UNLABELED)
    labels[[0, 30, 50]] = torch.tensor([0, 1, 2])
    assert (class_probs(found.points, labels, 4).argmax(dim=1)[:70] == cluster[:70]).all()
    many = torch.arange(30)  # as many classes as labels, without a warning
    assert class_probs(torch.eye(30), many, 30).argmax(dim=1).equal(many)
