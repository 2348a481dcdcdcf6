"""The cache of features: found by content, damaged segments dropped, bounded, shared."""

import os
import time

import numpy as np
import pytest

from ropaws.embedding import feature_cache
from ropaws.embedding.feature_cache import FeatureStore, default_folder

SHAPE = (2, 5)
NAME = "0" * 32


def entries(count, seed=0):
    random = np.random.default_rng(seed)
    keys = random.integers(0, 256, (count, 16)).astype(np.uint8)
    return keys, random.normal(size=(count, *SHAPE)).astype(np.float16)


def store(root, name=NAME, limit=1e9, lines=None):
    return FeatureStore(root, name, SHAPE, limit, (lines if lines is not None else []).append)


def rows_of(found, where):
    return np.stack([found.segments[number].rows[row] for number, row in where])


def test_what_was_written_is_found_by_key(tmp_path):
    keys, rows = entries(20)
    writer = store(tmp_path)
    writer.write(keys[:12], rows[:12])
    writer.write(keys[12:18], rows[12:18])
    for one in (writer, store(tmp_path)):
        where = one.find(keys[::-1])
        assert (where[:2] == -1).all()  # the last two were not written
        np.testing.assert_array_equal(rows_of(one, where[2:]), rows[:18][::-1])
    writer.write(keys[18:], rows[18:])
    assert (where[:2] == -1).all()
    assert (one.find(keys) >= 0).all()  # what another process has written since


def test_a_store_that_is_asked_again_and_again_says_what_a_new_one_says(tmp_path, monkeypatch):
    """Its keys are sorted anew now and then only; others write meanwhile, and a segment is damaged."""
    monkeypatch.setattr(feature_cache, "MANY_NEW", 3)
    keys, rows = entries(40)
    kept, other = store(tmp_path), store(tmp_path)
    sorted_anew = []
    make = feature_cache._Index.of.__func__
    monkeypatch.setattr(
        feature_cache._Index,
        "of",
        classmethod(lambda cls, given, start: sorted_anew.append(start) or make(cls, given, start)),
    )
    for start in range(0, 40, 4):
        (kept if start % 8 else other).write(keys[start : start + 4], rows[start : start + 4])
        sorted_anew.clear()
        where, fresh = kept.find(keys), store(tmp_path)
        found = where[:, 0] >= 0
        assert found.tolist() == [True] * (start + 4) + [False] * (36 - start)
        np.testing.assert_array_equal(rows_of(kept, where[found]), rows[found])
        np.testing.assert_array_equal(rows_of(fresh, fresh.find(keys)[found]), rows[found])
    assert sorted_anew.count(0) <= 2  # by the new store, and seldom by the one that is kept
    path = kept.segments[2].path
    path.write_bytes(path.read_bytes().replace(rows[8].tobytes(), rows[9].tobytes()))
    kept._sound.clear()
    where = kept.find(keys)
    gone = where[:, 0] < 0
    assert gone.sum() == 4
    np.testing.assert_array_equal(rows_of(kept, where[~gone]), rows[~gone])


def test_another_backbone_has_its_own_features(tmp_path):
    keys, rows = entries(4)
    store(tmp_path).write(keys, rows)
    assert (store(tmp_path, "1" * 32).find(keys) == -1).all()


def test_segments_of_another_backbone_are_not_used_wherever_they_are(tmp_path):
    """Of the same shape, moved or copied into the folder of this one."""
    keys, rows = entries(12)
    other, own = store(tmp_path, "1" * 32), store(tmp_path)
    for part in range(3):
        other.write(keys[4 * part : 4 * part + 4], rows[4 * part : 4 * part + 4])
    for path in other.folder.iterdir():
        path.rename(own.folder / path.name)
    lines = []
    fresh = store(tmp_path, lines=lines)
    assert (fresh.find(keys) == -1).all()
    assert len(lines) == 3
    assert all(
        "another backbone, or of other views); its features are computed again" in line for line in lines
    )
    fresh.write(keys[:4], -rows[:4])
    where = fresh.find(keys)
    np.testing.assert_array_equal(rows_of(fresh, where[:4]), -rows[:4])
    assert (where[4:] == -1).all()


@pytest.mark.parametrize("damage", ["rows", "keys", "short", "empty", "text", "shape"])
def test_a_damaged_segment_is_dropped_with_a_line(tmp_path, damage):
    keys, rows = entries(8)
    writer = store(tmp_path)
    writer.write(keys[:4], rows[:4])
    (path,) = writer.folder.glob("*.safetensors")
    writer.write(keys[4:], rows[4:])
    content = bytearray(path.read_bytes())
    if damage == "rows":
        content[content.index(rows[0].tobytes())] ^= 255
    elif damage == "keys":
        content[content.index(keys[0].tobytes())] ^= 255
    elif damage == "short":
        content = content[:-10]
    elif damage == "empty":
        content = b""
    elif damage == "text":
        content = b"\x10\0\0\0\0\0\0\0" + b"not JSON at all."
    elif damage == "shape":
        content = content.replace(b"[4,2,5]", b"[4,5,2]")
    path.write_bytes(content)
    lines = []
    where = store(tmp_path, lines=lines).find(keys)
    assert (where[:4] == -1).all()
    assert (where[4:] >= 0).all()
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert "computed again" in lines[0]
    assert not path.exists()


def test_the_longest_unused_segments_make_room_and_nothing_else_does(tmp_path):
    keys, rows = entries(30)
    old = store(tmp_path, "a" * 32)
    for part in range(3):
        old.write(keys[part * 10 : part * 10 + 10], rows[part * 10 : part * 10 + 10])
    files = [old.folder / path.name for path in old.folder.iterdir()]
    ages = {path: 1000.0 * number for number, path in enumerate(files)}
    for path, age in ages.items():
        os.utime(path, (age, age))
    photo, stale = tmp_path / "photos" / "mine.jpg", old.folder / f".{'b' * 32}.safetensors.{'c' * 16}.tmp"
    notes = old.folder / "notes.txt"
    photo.parent.mkdir()
    for path in (photo, stale, notes):
        path.write_bytes(b"x" * 1000)
        os.utime(path, (0, 0))
    size = files[0].stat().st_size
    fresh = store(tmp_path, "d" * 32, limit=2.5 * size)
    fresh.make_room(10)
    left = sorted(old.folder.glob("*.safetensors"))
    assert left == [max(files, key=ages.get)]  # the most recently used one
    assert photo.exists()
    assert notes.exists()
    assert not stale.exists()


def test_segments_in_use_stay(tmp_path):
    keys, rows = entries(10)
    one = store(tmp_path, limit=100)
    one.write(keys, rows)
    assert (one.find(keys) >= 0).all()
    one.make_room(1000)
    assert (store(tmp_path).find(keys) >= 0).all()


def test_use_renews_a_segment(tmp_path):
    keys, rows = entries(3)
    one = store(tmp_path)
    one.write(keys, rows)
    (path,) = one.folder.iterdir()
    os.utime(path, (0, 0))
    one.find(keys)
    assert path.stat().st_mtime > time.time() - 60


def test_more_than_the_cache_may_hold_is_an_error_that_says_what_to_change(tmp_path):
    with pytest.raises(ValueError, match=r"100 images in 2 views each take .* data\.cache_gb=.*frozen_views"):
        store(tmp_path, limit=100).check_room(100)


def test_a_folder_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.feature_cache: .*file cannot be a folder"):
        store(tmp_path / "file")


def test_the_default_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "ropaws/features"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(feature_cache.Path, "home", lambda: tmp_path / "me")
    assert default_folder() == tmp_path / "me/.cache/ropaws/features"
