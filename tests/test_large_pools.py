"""Arrays larger than memory: the estimator reads them in blocks, and learns from a sample of the pool."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.format import open_memmap

from ropaws import RoPAWSClassifier
from ropaws.classify import estimator as feature_arrays
from tests.classify.test_estimator import semi

PROPAGATION = {"head": None, "prior": "distance", "regression_share": 0}


def everything(model, rows):
    """All that a fitted classifier answers."""
    asked = (model.predict, model.predict_proba, model.in_domain, model.score_in_domain, model.transform)
    return [model.transduction_, *(ask(rows) for ask in asked)]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("settings", [{"steps": 3}, PROPAGATION], ids=["head", "propagation"])
def test_a_memory_mapped_array_gives_what_the_array_gives(tmp_path, kind, settings):
    points, y, _ = semi()
    rows = points.astype(kind)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    expected = everything(RoPAWSClassifier(**settings).fit(rows, y), rows)
    for found, wanted in zip(
        everything(RoPAWSClassifier(**settings).fit(mapped, y), mapped), expected, strict=True
    ):
        assert np.array_equal(found, wanted)


def test_half_precision_is_widened_before_anything_is_computed():
    points, y, _ = semi()
    rows = points.astype(np.float16)
    wide = RoPAWSClassifier(**PROPAGATION).fit(rows.astype(np.float32), y)
    assert np.array_equal(
        RoPAWSClassifier(**PROPAGATION).fit(rows, y).predict_proba(rows), wide.predict_proba(rows)
    )


@pytest.mark.parametrize("settings", [{"steps": 5}, {"head": None}], ids=str)
def test_blocks_change_nothing_but_rounding(monkeypatch, settings):
    points, y, _ = semi()
    whole = everything(RoPAWSClassifier(**settings).fit(points, y), points)
    monkeypatch.setattr("ropaws.classify.estimator.BLOCK", 7)
    for found, wanted in zip(
        everything(RoPAWSClassifier(**settings).fit(points, y), points), whole, strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("settings", [{"steps": 30}, {"head": None}, PROPAGATION], ids=str)
def test_of_a_large_pool_a_sample_is_learned_from_and_every_row_gets_its_label(monkeypatch, settings):
    points, y, truth = semi(labels_each=4)
    unlabeled = int((y < 0).sum())
    whole = RoPAWSClassifier(voters=50, **settings).fit(points, y)
    monkeypatch.setattr(feature_arrays, "LEARNED", unlabeled)  # as many as there are: nothing is left out
    same = RoPAWSClassifier(voters=50, **settings).fit(points, y)
    assert np.array_equal(same.predict_proba(points), whole.predict_proba(points))
    monkeypatch.setattr(feature_arrays, "LEARNED", 100)
    some = RoPAWSClassifier(voters=50, **settings).fit(points, y)
    again = RoPAWSClassifier(voters=50, **settings).fit(points, y)
    assert np.array_equal(some.predict_proba(points), again.predict_proba(points))
    assert not np.array_equal(some.predict_proba(points), whole.predict_proba(points))
    known = truth < 3
    assert len(some.transduction_) == len(points)
    assert (some.transduction_[known] == truth[known]).mean() > 0.98
    assert np.array_equal(some.transduction_[y >= 0], y[y >= 0])
    assert np.array_equal(some.transduction_[y < 0], some.predict(points[y < 0]))


def test_the_sample_has_every_label_and_is_never_smaller_than_the_voters(monkeypatch):
    monkeypatch.setattr(feature_arrays, "LEARNED", 10)
    known = np.zeros(1000, bool)
    known[[3, 500, 999]] = True
    chosen = feature_arrays.learned_rows(known, 4, 0)
    assert len(chosen) == 13
    assert np.array_equal(chosen, np.unique(chosen))
    assert {3, 500, 999} <= set(chosen.tolist())
    assert not np.array_equal(chosen, feature_arrays.learned_rows(known, 4, 1))
    assert len(feature_arrays.learned_rows(known, 40, 0)) == 43
    assert feature_arrays.learned_rows(known, None, 0) is None  # all of them vote
    assert feature_arrays.learned_rows(known, 997, 0) is None


def test_a_value_that_is_not_finite_is_found_before_anything_is_learned(monkeypatch):
    points, y, _ = semi()
    monkeypatch.setattr(feature_arrays, "LEARNED", 20)
    left_out = feature_arrays.learned_rows(y >= 0, 5, 0)
    bad = next(row for row in range(len(points)) if row not in left_out)
    points[bad, 0] = np.nan
    monkeypatch.setattr(RoPAWSClassifier, "_prepared", lambda *_: pytest.fail("learns"))
    with pytest.raises(ValueError, match="Input X contains NaN"):
        RoPAWSClassifier(voters=5).fit(points, y)


MEASURED = """
import sys, threading
from pathlib import Path
import numpy as np
import torch
from ropaws import RoPAWSClassifier
from ropaws.classify import estimator as feature_arrays

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

torch.set_num_threads(1)
feature_arrays.LEARNED = 2048
X = np.load(sys.argv[1], mmap_mode="r")
y = np.full(len(X), -1)
y[:20] = np.arange(20) % 2
settings = dict(voters=32, steps=2)
for rows in (2000, len(X)):  # what is loaded once comes first
    peak, before, done = [anonymous()], anonymous(), threading.Event()
    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    RoPAWSClassifier(**settings).fit(X[:rows], y[:rows]).predict(X[:rows])
    RoPAWSClassifier(head=None, prior="distance", **settings).fit(X[:rows], y[:rows]).in_domain(X[:rows])
    done.set()
    thread.join()
print(peak[0] - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_no_copy_of_a_large_array_is_made(tmp_path):
    """200,000 x 256: 205 MB, of which a copy is more than what is allowed."""
    rows, dims = 200_000, 256
    array = open_memmap(tmp_path / "rows.npy", "w+", np.float32, (rows, dims))
    block = np.random.default_rng(0).normal(size=(1000, dims)).astype(np.float32)
    for start in range(0, rows, 1000):
        array[start : start + 1000] = block
    array.flush()
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "rows.npy")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(told) < array.nbytes // 2
