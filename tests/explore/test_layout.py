import numpy as np
import pytest
import torch

from ropaws.explore import layout
from ropaws.insight import neighbors
from tests.explore.pools import make_points, truth


def test_a_map_fits_its_window_and_keeps_neighbors_together():
    points = make_points(400)
    plane = neighbors.full_map(points)
    assert plane.shape == (400, 2)
    assert np.abs(plane).max() == pytest.approx(1)
    apart = np.linalg.norm(plane[:, None] - plane[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    nearest = apart.argmin(axis=1)
    assert (truth(400)[nearest] == truth(400)).mean() > 0.9


def test_images_outside_the_sample_stand_among_their_like(monkeypatch):
    monkeypatch.setattr(neighbors, "LANDMARKS", 100)
    plane = neighbors.full_map(make_points(400))
    centers = np.stack([plane[truth(400) == kind].mean(axis=0) for kind in range(4)])
    nearest = np.linalg.norm(plane[:, None] - centers[None], axis=2).argmin(axis=1)
    assert (nearest == truth(400)).mean() > 0.95
    assert len(np.unique(plane.round(6), axis=0)) == 400  # nobody hides another


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_few_images_have_a_map(count):
    for draw in (neighbors.quick_map, neighbors.full_map):
        plane = draw(make_points(8)[:count])
        assert plane.shape == (count, 2)
        assert np.isfinite(plane).all()


def test_equal_images_have_a_map():
    assert np.isfinite(neighbors.full_map(torch.ones(10, 5))).all()
    assert np.isfinite(neighbors.quick_map(torch.zeros(10, 1))).all()


def test_a_map_is_kept_for_the_same_features_only(tmp_path):
    points = make_points(40)
    plane = neighbors.quick_map(points)
    layout.write_map(tmp_path / "map.npz", plane, points)
    assert np.array_equal(layout.read_map(tmp_path / "map.npz", points), plane)
    assert layout.read_map(tmp_path / "map.npz", points + 1) is None
    assert layout.read_map(tmp_path / "none.npz", points) is None
    for damage in (b"", b"PK", (tmp_path / "map.npz").read_bytes()[:100]):
        (tmp_path / "map.npz").write_bytes(damage)
        assert layout.read_map(tmp_path / "map.npz", points) is None


def test_a_map_with_any_damaged_byte_is_read_as_it_was_or_not_at_all(tmp_path):
    points = make_points(4)
    plane = neighbors.quick_map(points)
    path = tmp_path / "map.npz"
    layout.write_map(path, plane, points)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for value in (0, 1, 8, 255, whole[place] ^ 64):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            found = layout.read_map(path, points)
            assert found is None or np.array_equal(found, plane)
