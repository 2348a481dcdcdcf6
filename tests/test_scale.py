"""Labels and features by batches and parts: in any engine the same as in one process."""

import json
import math
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import ropaws
from ropaws.cli.main import main
from ropaws.pool.listing import Pool
from ropaws.run.label_files import FIELDS
from ropaws.scale import ERROR, Labeler, RayOptions, read_parts, write_parts
from tests.photos import fails


@pytest.fixture(scope="module")
def labeler(trained):
    return Labeler(trained[0])


@pytest.fixture
def files(trained):
    return sorted((trained[1] / "pool").iterdir())


def paths(files):
    return {"path": np.array([str(file) for file in files])}


def test_a_batch_has_the_predictions_of_the_run_in_order(trained, labeler, files):
    found = labeler(paths(files[::-1]))
    expected = ropaws.predict(trained[0], files[::-1])
    assert found["path"].tolist() == [str(file) for file in files[::-1]]
    assert found["label"].tolist() == [row.label for row in expected]
    assert found["in_domain"].tolist() == [round(row.in_domain, 6) for row in expected]
    for value, row in zip(found["confidence"].tolist(), expected, strict=True):
        assert math.isnan(value) if row.confidence is None else value == round(row.confidence, 6)
    assert list(found) == labeler.names
    assert list(found)[: len(FIELDS)] == list(FIELDS)


def test_bytes_are_labeled_as_files_are(labeler, files):
    by_path = labeler(paths(files))
    by_bytes = labeler({"bytes": np.array([file.read_bytes() for file in files], object), **paths(files)})
    for name, values in by_path.items():
        np.testing.assert_array_equal(values, by_bytes[name])


def test_what_cannot_be_read_is_a_row_with_the_reason(labeler, files):
    data = np.array([files[0].read_bytes(), b"%!PS-Adobe", b""], object)
    found = labeler({"bytes": data})
    assert [bool(reason) for reason in found[ERROR]] == [False, True, True]
    assert found["path"].tolist() == ["row 0", "row 1", "row 2"]
    assert found["label"].tolist()[1:] == ["", ""]
    assert np.isnan(found["in_domain"]).tolist() == [False, True, True]


def test_a_data_frame_comes_back_as_one(labeler, files):
    pandas = pytest.importorskip("pandas")
    found = labeler(pandas.DataFrame(paths(files[:3])))
    assert isinstance(found, pandas.DataFrame)
    assert found["label"].tolist() == labeler(paths(files[:3]))["label"].tolist()


def test_an_empty_batch_has_the_columns(labeler):
    assert {name: len(values) for name, values in labeler(paths([])).items()} == dict.fromkeys(
        labeler.names, 0
    )


def test_a_batch_without_images_is_named(labeler):
    with pytest.raises(ValueError, match="needs a column path or bytes; it has picture"):
        labeler({"picture": []})


def test_it_is_small_when_pickled_also_after_use(labeler, files):
    labeler(paths(files[:1]))
    content = pickle.dumps(labeler)
    assert len(content) < 1000
    assert (
        pickle.loads(content)(paths(files[:2]))["label"].tolist()
        == labeler(paths(files[:2]))["label"].tolist()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "labels.csv"], "a folder of parquet files is written, got labels.csv"),
        (
            ["--out", "parts", "--propagate"],
            "--propagate needs all images in one process; leave --engine ray out",
        ),
        (["--out", "parts", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["--out", "parts", "--gpus", "-1"], "--gpus must be at least 0, got -1"),
    ],
)
def test_options_that_do_not_fit_are_one_line(trained, capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    run, photos = trained
    assert message in fails(capsys, "predict", run, photos / "pool", "--engine", "ray", *arguments)


def test_a_cluster_that_is_not_there_is_one_line(trained, capsys, monkeypatch, tmp_path):
    """Ray itself waits half a minute before it says so."""
    ray = pytest.importorskip("ray")

    def init(address, **_):
        raise ConnectionError(f"Could not read from GCS at {address}\nand more lines")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    run, photos = trained
    call = ["predict", run, photos / "pool", "--engine", "ray", "--out", tmp_path / "parts"]
    line = fails(capsys, *call, "--address", "10.0.0.9:6379")
    assert "--address: no Ray cluster at 10.0.0.9:6379 (Could not read from GCS at 10.0.0.9" in line
    assert not list((tmp_path / "parts").glob("*.parquet"))


# With a Ray of this machine

DIES_ONCE = """
    import os, sys
    from pathlib import Path
    from ropaws.pool.listing import Pool
    from ropaws.scale import Labeler, RayOptions, write_parts

    class DiesOnce(Labeler):
        def rows(self, images):
            mark = self.run.parent / "died"
            if any("noise-3" in str(image) for image in images) and not mark.exists():
                mark.touch()
                os._exit(1)
            return super().rows(images)

    run, pool, out = sys.argv[1:]
    print("computed", write_parts(DiesOnce(run), Pool.open(Path(pool)).images, out, RayOptions(part=5)))
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing_and_writes_nothing_twice(trained, tmp_path):
    run, photos = trained
    script = tmp_path / "dies.py"
    script.write_text(textwrap.dedent(DIES_ONCE))
    call = [sys.executable, script, run, photos / "pool", tmp_path / "parts"]
    # Ray gives its workers the lowest priority but four: beside other programs they would hardly compute.
    environment = os.environ | {"RAY_worker_niceness": "0"}
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert (run.parent / "died").exists()
    main(["predict", str(run), str(photos / "pool"), "--out", str(tmp_path / "labels.jsonl")])
    expected = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    for row, other in zip(read_parts(tmp_path / "parts"), expected, strict=True):
        assert row.pop(ERROR) == ""
        if other["confidence"] is None:
            assert math.isnan(row.pop("confidence"))
            del other["confidence"]
        assert row == other


@pytest.mark.slow
def test_by_command_parts_that_are_there_stay_and_other_jobs_are_refused(trained, tmp_path, capsys):
    run, photos = trained
    out = tmp_path / "parts"
    call = ["predict", str(run), str(photos / "pool"), "--engine", "ray", "--out", str(out), "--part", "20"]
    main(call)
    first, second = sorted(out.glob("part-*.parquet"))
    before = first.stat().st_mtime_ns
    second.unlink()
    main(call)
    assert "1 parts were computed now" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == before
    assert second.exists()
    assert "holds parts of another job (threshold differ)" in fails(capsys, *call, "--threshold", "0.7")


@pytest.mark.slow
def test_features_are_those_of_embed(trained, tmp_path):
    _, photos = trained
    common = [
        "embed",
        str(photos / "pool"),
        "--backbone",
        "efficientnet-lite0",
        "--size",
        "32",
        "--views",
        "0",
    ]
    main([*common, "--out", str(tmp_path / "one.npz")])
    main([*common, "--engine", "ray", "--out", str(tmp_path / "parts"), "--part", "20"])
    with np.load(tmp_path / "one.npz") as one:
        rows = list(read_parts(tmp_path / "parts"))
        assert [row["path"] for row in rows] == one["names"].tolist()
        np.testing.assert_array_equal([row["features"] for row in rows], one["features"].astype(np.float64))


def test_nothing_to_do_starts_no_ray(labeler, tmp_path):
    assert write_parts(labeler, Pool().images, tmp_path / "parts", RayOptions()) == 0
