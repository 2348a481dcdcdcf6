"""Near copies in groups: the same as by all pairs, in memory that does not grow with the pairs."""

import time
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws.pool import check as module
from ropaws.pool.check import THUMB, Findings, Groups, Look, _near_groups, near_copies


def look(number, thumb):
    return Look(
        f"{number}.png", (30, 40), f"mark {number}", thumb.clip(0, 255).astype(np.uint8).tobytes(), ""
    )


def variants(count, scenes, seed=0):
    """Images of some scenes, with a little noise: those of one scene are alike."""
    random = np.random.default_rng(seed)
    patterns = random.integers(40, 200, (scenes, THUMB * THUMB))
    return [look(i, patterns[i % scenes] + random.integers(0, 3, THUMB * THUMB)) for i in range(count)]


@settings(deadline=None)
@given(
    st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12), st.data()
)
def test_groups_are_those_of_all_pairs(count, pairs, data):
    pairs = [(one % count, other % count) for one, other in pairs]
    groups = Groups(count)
    size = data.draw(st.integers(1, 5))
    for start in range(0, count, size):
        rows = np.arange(start, min(count, start + size))
        alike = np.array([[(row, column) in pairs for column in range(count)] for row in rows])
        groups.join(rows, np.arange(count), alike)
    label = list(range(count))
    for _ in range(count):
        for one, other in pairs:
            label[one] = label[other] = min(label[one], label[other])
    members = ([i for i in range(count) if label[i] == first] for first in dict.fromkeys(label))
    assert groups.listed() == [group for group in members if len(group) > 1]


def test_blocks_make_no_difference(monkeypatch):
    looks = variants(60, 7)
    labels = [str(i % 2) if i % 3 else None for i in range(60)]
    whole = _near_groups(looks, labels)
    monkeypatch.setattr(module, "BLOCK", 5)
    assert _near_groups(looks, labels) == whole
    assert whole[0] == [list(range(scene, 60, 7)) for scene in range(7)]
    for group in whole[1]:
        assert {labels[i] for i in group} == {"0", "1"}


def test_the_same_pixels_are_no_near_copy():
    one, other, flat = *variants(2, 1), look(2, np.full(THUMB * THUMB, 90))
    same = other._replace(mark=one.mark)
    assert [tile.alike.tolist() for tile in near_copies([one], [one, same, flat, other])] == [
        [[False, False, False, True]]
    ]


def test_only_near_copies_with_another_label_are_conflicts():
    """A chain: the ends are not alike, and only one link joins two labels."""
    near, conflicting = _near_groups(variants(4, 1), ["cat", "cat", None, "dog"])
    assert near == [[0, 1, 2, 3]]
    assert conflicting == [[0, 1, 3]]
    assert _near_groups(variants(4, 1), ["cat", "cat", None, None])[1] == []


def test_thousands_of_look_alikes_are_one_group_in_little_memory():
    looks = variants(6000, 1)
    tracemalloc.start()
    began = time.monotonic()
    try:
        near, _ = _near_groups(looks, ["cat"] * 6000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert near == [list(range(6000))]
    assert peak < 150e6  # 36 million pairs
    assert time.monotonic() - began < 60
    groups = [[look.path for look in looks]]
    classes = {"cat": 6000, "dog": 6000}
    findings = Findings(classes=classes, unlabeled=0, test={}, typical_side=30.0, lookalikes=groups)
    (line,) = findings.warnings()
    assert line.startswith("1 group of images (6,000 in all) nearly the same")
