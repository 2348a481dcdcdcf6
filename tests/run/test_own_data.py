"""Training on arrays of features from Python."""

import json

import numpy as np
import pytest

import ropaws

RANDOM = np.random.default_rng(0)
LABELED = RANDOM.normal(size=(6, 5)) + 5 * np.eye(5)[[0, 1, 2, 0, 1, 2]]
NAMES = np.array(["a", "b", "c", "a", "b", "c"])
POOL = RANDOM.normal(size=(90, 5)) + 5 * np.eye(5)[np.arange(90) % 3]


def test_features_are_kept_with_the_run_and_trained_on(tmp_path):
    run = ropaws.train_on((LABELED, NAMES), [POOL[:50], POOL[50:]], out=tmp_path / "run",
                          test=(POOL[:6], ["a", "b", "c", "a", "b", "z"]))  # fmt: skip
    assert (run / "inputs/features.npz").exists()
    found = ropaws.Run(run)
    assert found.class_names == ("a", "b", "c")
    assert found.facts.images == 96
    assert found.corpus.test_labels.tolist() == [0, 1, 2, 0, 1, -2]
    assert [p.nearest_class for p in ropaws.predict(run, POOL[:3])] == ["a", "b", "c"]
    assert json.loads((run / "environment.json").read_text())["choices"][0].startswith("features as they are")


@pytest.mark.parametrize(
    ("labeled", "unlabeled", "options", "words"),
    [
        ((LABELED, NAMES), POOL[:, :4], {}, "unlabeled features must have 5 dimensions as the others, got 4"),
        ((LABELED, NAMES), POOL * np.nan, {}, "unlabeled features: row 0 is not finite"),
        ((LABELED, NAMES[:3]), POOL, {}, "labels must be one for each of 6 rows"),
        ((LABELED, NAMES), [POOL.astype(int)], {}, r"unlabeled features must be an array \(n, d\) of floats"),
        ((LABELED, NAMES), POOL, {"backbone": "small"}, "features take no backbone"),
        ((LABELED, NAMES), POOL, {"test": POOL}, "test must be a pair of features and labels"),
        ((LABELED, np.full(6, -1)), POOL, {}, "no label at all"),
    ],
)
def test_features_that_do_not_fit_get_one_line(tmp_path, labeled, unlabeled, options, words):
    with pytest.raises(ValueError, match=words):
        ropaws.train_on(labeled, unlabeled, out=tmp_path / "run", **options)
    assert not (tmp_path / "run/config.json").exists()
