"""Neighbors and near duplicates: against all pairs, and the index against exact search."""

import numpy as np
import pytest
import torch

from ropaws.insight import neighbors
from ropaws.insight.neighbors import near_duplicates, other_neighbors


def test_neighbors_are_those_of_a_plain_loop():
    points = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    points[7:20] = points[7]  # more copies than are asked for
    found = other_neighbors(points, 4)
    rows = points.numpy() / np.linalg.norm(points.numpy(), axis=1, keepdims=True)
    cosine = rows @ rows.T
    np.fill_diagonal(cosine, -np.inf)
    np.testing.assert_allclose(found.similarity, -np.sort(-cosine, axis=1)[:, :4], atol=1e-5)
    assert all(number not in row for number, row in enumerate(found.position.tolist()))


def clouds(count, dims=24, copies=1, noise=0.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(count, dims, generator=random).repeat(copies, 1)
    return points + noise * torch.randn(points.shape, generator=random)


def test_an_index_finds_nearly_the_neighbors_of_exact_search(monkeypatch):
    pytest.importorskip("faiss")
    points = clouds(40, copies=50, noise=0.5)
    exact = other_neighbors(points, 5)
    monkeypatch.setattr(neighbors, "EXACT", 100)
    found = other_neighbors(points, 5)
    assert exact.recall == 1
    same = (found.position[:, :, None] == exact.position[:, None]).any(dim=1).float().mean()
    assert same > 0.9
    assert found.recall == pytest.approx(float(same), abs=0.05)
    assert all(number not in row for number, row in enumerate(found.position.tolist()))


def test_without_an_index_too_many_rows_are_refused(monkeypatch):
    monkeypatch.setattr(neighbors, "EXACT", 10)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(ValueError, match=r"ropaws\[index\]"):
        other_neighbors(clouds(30), 5)


def check_groups(points, group):
    """No pair is missed, and every member is like its leader."""
    rows = torch.nn.functional.normalize(points.double(), dim=1)
    alike = (rows @ rows.T >= neighbors.ALIKE).fill_diagonal_(False).numpy()
    alone = group < 0
    assert not alike[alone][:, alone].any()
    leaders = np.unique(group[~alone])
    assert (group[leaders] == leaders).all()
    assert not alike[alone][:, leaders].any()
    members = np.flatnonzero(~alone & (group != np.arange(len(group))))
    assert alike[members, group[members]].all()


@pytest.mark.parametrize("noise", [0.001, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("leaf", [4, 512])
def test_near_duplicates_are_found(monkeypatch, noise, leaf):
    monkeypatch.setattr(neighbors, "LEAF", leaf)
    monkeypatch.setattr(neighbors, "TILE", 7)
    monkeypatch.setattr(neighbors, "SKETCH", 8)
    points = clouds(60, copies=3, noise=noise)
    group = near_duplicates(points)
    check_groups(points, group)
    assert (group >= 0).all() == (noise < 0.1)


def test_boxes_that_are_far_apart_are_not_compared(monkeypatch):
    monkeypatch.setattr(neighbors, "LEAF", 16)
    rows = torch.nn.functional.normalize(clouds(256, dims=3), dim=1)
    compared = sum(len(rows) * len(others) for rows, others in neighbors._Boxes(rows).near(0.03))
    assert compared < 256 * 256 / 4  # of half of all pairs: each is looked at once


def test_of_many_rows_an_index_finds_nearly_all_near_duplicates(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr(neighbors, "EXACT", 100)
    monkeypatch.setattr(neighbors, "_groups_by_boxes", None)
    points = clouds(700, copies=3, noise=0.03)
    group = near_duplicates(points)
    assert (group >= 0).mean() > 0.97  # each row has two others that are like it
    rows = torch.nn.functional.normalize(points, dim=1)
    members = np.flatnonzero(group >= 0)
    assert ((rows[members] * rows[group[members]]).sum(dim=1) > neighbors.ALIKE - 1e-3).all()
    copies = near_duplicates(torch.ones(3000, 16))
    assert (copies == 0).all()


@pytest.mark.parametrize("copies", [0, 1, 2, 3000])
def test_a_thousand_copies_are_one_group(copies):
    found = near_duplicates(torch.ones(copies, 16))
    assert len(np.unique(found)) == min(copies, 1)
    assert (found >= 0).all() == (copies != 1)


def test_rows_of_zeros_have_no_duplicates():
    assert (near_duplicates(torch.zeros(50, 8)) == -1).all()
