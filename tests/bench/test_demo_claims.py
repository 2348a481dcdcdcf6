"""The demo's claim, from training to table. Minutes: `make test-slow`."""

import json
import statistics

import pytest

from ropaws.cli.main import main


@pytest.mark.slow
def test_ropaws_beats_paws_over_three_seeds(tmp_path):
    """In accuracy, and in doubting what it cannot know; both tell out-of-class images apart."""
    main(["demo", "--seeds", "3", "--out", str(tmp_path)])
    methods = json.loads((tmp_path / "results.json").read_text())["methods"]
    paws, ropaws = (
        {key: statistics.mean(values) for key, values in methods[name].items()} for name in ("paws", "ropaws")
    )
    assert ropaws["accuracy"] > paws["accuracy"]
    assert min(ropaws["auroc"], paws["auroc"]) > 0.9
    assert ropaws["confidence_out"] < paws["confidence_out"] - 0.1
