"""Groups of rows, and how many kinds there are."""

import pytest
import torch
import torch.nn.functional as F

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight.groups import Kinds, Tree, k_means, new_classes


def pool(sizes, *, known, labels=5, spread=0.15, d=32, seed=0):
    """Clusters of these sizes, the first `known` of which are classes.

    ->  points, cluster, labels, in-class probability, class probabilities
    """
    random = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(len(sizes), d, generator=random), dim=1)
    cluster = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    points = centers[cluster] + spread * torch.randn(len(cluster), d, generator=random)
    given = torch.full((len(cluster),), UNLABELED)
    for k in range(known):
        given[(cluster == k).nonzero()[:labels, 0]] = k
    probs = F.one_hot(cluster.clamp_max(known - 1), known).float()
    return points, cluster, given, (cluster < known).float(), probs


@pytest.mark.parametrize(("known", "new"), [(2, 1), (3, 5), (6, 3), (1, 4), (4, 12)])
def test_the_number_of_kinds_is_found_from_how_large_the_classes_are(known, new):
    points, cluster, labels, in_class, probs = pool([40] * (known + new), known=known)
    found = new_classes(points, labels, in_class, probs)
    assert len(found) == new
    for group in found:
        assert len(cluster[group.members].unique()) == 1
        assert len(group.members) == 40


def test_kinds_within_kinds_are_as_fine_as_the_classes():
    """Six groups of two each: with wide classes six kinds, with narrow ones twelve."""
    random = torch.Generator().manual_seed(0)
    wide = F.normalize(torch.randn(9, 48, generator=random), dim=1)
    narrow = wide.repeat_interleave(2, 0) + 0.45 * F.normalize(torch.randn(18, 48, generator=random), dim=1)
    fine = torch.arange(18).repeat_interleave(40)
    points = narrow[fine] + 0.04 * torch.randn(len(fine), 48, generator=random)
    counts = {}
    for name, cluster, known in (("wide", fine // 2, 3), ("narrow", fine, 6)):
        labels = torch.full((len(fine),), UNLABELED)
        for k in range(known):
            labels[(cluster == k).nonzero()[::20, 0]] = k
        probs = F.one_hot(cluster.clamp_max(known - 1), known).float()
        counts[name] = len(new_classes(points, labels, (cluster < known).float(), probs))
    assert counts["wide"] == 6
    assert 10 <= counts["narrow"] <= 13


def test_members_are_ordered_by_typicality_and_groups_by_size():
    points, _, labels, in_class, probs = pool([40, 40, 20, 60, 30], known=2, spread=0.08)
    found = new_classes(points, labels, in_class, probs)
    assert [len(group.members) for group in found] == [60, 30, 20]
    for group in found:
        assert (group.typicality.diff() <= 0).all()
        assert 0 <= float(group.typicality.min()) <= float(group.typicality.max()) <= 1
        center = points[group.members].mean(dim=0)
        far = (points[group.members] - center).norm(dim=1)
        assert float(far[:5].mean()) < float(far[-5:].mean())


def test_a_number_that_is_asked_for_is_kept():
    points, _, labels, in_class, probs = pool([40] * 5, known=2)
    for count in (1, 2, 7):
        assert len(new_classes(points, labels, in_class, probs, groups=count)) == count
    assert new_classes(points, labels, in_class, probs, groups=121) == []  # of 120 rows


def test_rows_that_a_person_called_out_of_class_may_form_a_new_class():
    points, cluster, labels, in_class, probs = pool([40] * 3, known=2)
    labels[cluster == 2] = OUT_OF_CLASS
    (group,) = new_classes(points, labels, in_class, probs)
    assert group.members.sort().values.tolist() == list(range(80, 120))


def test_few_rows_or_none_are_no_class():
    points, _, labels, in_class, probs = pool([40, 40, 9], known=2)
    assert new_classes(points, labels, in_class, probs) == []
    assert new_classes(points, labels, torch.ones(len(points)), probs) == []


def test_the_threshold_says_which_rows_are_grouped():
    points, cluster, labels, in_class, probs = pool([40] * 4, known=2)
    in_class = torch.where(cluster == 3, 0.4, in_class)
    assert len(new_classes(points, labels, in_class, probs)) == 2
    (group,) = new_classes(points, labels, in_class, probs, threshold=0.3)
    assert (cluster[group.members] == 2).all()


def test_the_same_rows_give_the_same_groups():
    points, _, labels, in_class, probs = pool([40] * 6, known=2, spread=0.4)
    first, second = (new_classes(points, labels, in_class, probs) for _ in range(2))
    assert [group.members.tolist() for group in first] == [group.members.tolist() for group in second]


def test_rows_that_are_all_alike_are_one_kind():
    points, _, labels, in_class, probs = pool([40] * 4, known=2)
    points[80:] = points[80]
    (group,) = new_classes(points, labels, in_class, probs)
    assert len(group.members) == 80


def test_where_silhouettes_say_nothing_the_likely_number_does(monkeypatch):
    tree = Tree(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(tree, "_apart", lambda count: 0.2)
    assert 7 <= tree.best(Kinds(2, 10, 40)) <= 10
    assert 3 <= tree.best(Kinds(2, 4, 40)) <= 4
    monkeypatch.setattr(tree, "_apart", lambda count: 0.1 + 0.2 * (count > 20))
    assert tree.best(Kinds(2, 10, 40)) > 20  # a clear silhouette outweighs it
    assert tree.best(Kinds(1, 1, 1)) == 1


def test_spread_is_the_sum_of_squares_over_what_is_free():
    random = torch.Generator().manual_seed(0)
    points = torch.randn(50, 4, generator=random)
    direct = float(((points - points.mean(dim=0)) ** 2).sum()) / 49
    assert Tree(points).spread(1) == pytest.approx(direct, rel=1e-5)
    assert Tree(points).spread(50) == 0


def test_k_means_finds_the_clusters_and_tells_distances():
    points, cluster, *_ = pool([40] * 6, known=1, spread=0.1)
    found = k_means(points, 6)
    assert all(len(found.member[cluster == k].unique()) == 1 for k in range(6))
    torch.testing.assert_close(
        found.distance, (points - found.centers[found.member]).norm(dim=1), atol=1e-3, rtol=1e-3
    )
    assert len(k_means(torch.ones(5, 2), 3).centers) == 1  # no more clusters than different rows
