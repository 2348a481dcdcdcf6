import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from ropaws.classify import head
from ropaws.cli.main import main
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.embedding.embedder import Embedder
from ropaws.explore import outputs
from ropaws.explore.answer_log import RefusedError
from ropaws.explore.images import open_shown
from ropaws.explore.pool import pool_of_run, pool_of_sources
from ropaws.explore.session import Session
from ropaws.run.run import Run
from ropaws.run.sorting import Sorter
from tests.explore.pools import COUNT, OTHERS, label_some, make_pool, truth
from tests.explore.serving import PATIENCE
from tests.photos import NAMES as PHOTO_NAMES
from tests.photos import fails, make_photos


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "STEPS", 15)
    found = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    found.auto_refit = False
    label_some(found)
    found.label(np.flatnonzero(truth() == OTHERS)[:3].tolist(), OUT_OF_CLASS, why="grid", tab="tab")
    found.refit()
    found.jobs.wait()
    yield found
    found.close()


def finish(session, kind, format="csv"):
    line = outputs.export(session, kind, format)
    session.jobs.wait()
    assert session.error is None
    return line


def written(session):
    found = outputs.output_facts(session)["written"]
    return [(each["name"], each["round"], each["pending"], each["stale"]) for each in found]


def test_sorted_folders_hold_every_image_once(session):
    finish(session, "folders")
    folder = session.folder / "sorted"
    names = sorted(path.name for path in folder.rglob("*.png"))
    assert names == sorted(Path(name).name for name in session.pool.names)
    for number, name in enumerate(session.pool.names):
        answer = session.codes[number] if session.codes[number] != UNLABELED else session.predicted[number]
        place = "out-of-class" if answer == OUT_OF_CLASS else session.answers.classes[int(answer)]
        assert (folder / place / Path(name).name).is_file()
        assert Path(name).is_file()  # copied, not moved
    assert written(session) == [("sorted", 1, 0, False)]
    finish(session, "folders")  # again: no copy of a copy
    assert len(list(folder.rglob("*.png"))) == COUNT


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_link_that_takes_the_place_of_an_image_is_not_copied(session, tmp_path, monkeypatch, when):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")

    def swap():
        path = session.pool.images[5]
        path.unlink()
        path.symlink_to(secret)

    if when == "before":
        swap()
    else:
        plan = Sorter.carry_out
        monkeypatch.setattr(Sorter, "carry_out", lambda sorter: (swap(), plan(sorter)))
    outputs.export(session, "folders")
    session.jobs.wait()
    copies = [path for path in (session.folder / "sorted").rglob("*") if path.is_file()]
    assert "secret" not in [path.read_text(errors="replace") for path in copies]
    if when == "before":
        assert len(copies) == len(session.pool) - 1
    else:
        assert "is not an image any more" in session.error


def test_the_table_of_predictions_tells_answers_from_guesses(session):
    finish(session, "predictions")
    with (session.folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == list(session.pool.names)
    answered = [row["answered"] == "yes" for row in rows]
    assert answered == (session.codes != UNLABELED).tolist()
    assert [row["out_of_class"] == "True" for row in rows] == [
        bool(code == OUT_OF_CLASS or (code == UNLABELED and said == OUT_OF_CLASS))
        for code, said in zip(session.codes, session.predicted, strict=True)
    ]
    assert rows[0]["label"] == "circle"
    assert float(rows[0]["p(circle)"]) == 1
    for row in rows:  # the same meaning as in the table of `ropaws predict`
        if row["out_of_class"] == "True":
            assert row["label"] == row["confidence"] == ""
            assert row["nearest_class"]
        else:
            assert row["confidence"] == row[f"p({row['label']})"]
            assert row["nearest_class"] == row["label"]


def test_predictions_are_written_in_the_formats_of_other_tools(session):
    for name in ("parquet", "label-studio", "coco"):
        finish(session, "predictions", name)
    finish(session, "predictions")
    with (session.folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(session.folder / "predictions.parquet")
    np.testing.assert_array_equal(np.stack([table["x"], table["y"]], axis=1), session.plane)
    assert table["label"].to_pylist() == [row["label"] for row in rows]
    assert len(table["neighbors"][0]["ids"]) == 10
    tasks = json.loads((session.folder / "predictions.label-studio.json").read_text())
    for task, row in zip(tasks, rows, strict=True):  # the labels of the person are annotations
        (said,) = task["annotations" if row["answered"] else "predictions"] or [{"result": []}]
        assert [each["value"]["choices"] for each in said["result"]] == (
            [[row["label"]]] if row["label"] else []
        )
    found = json.loads((session.folder / "predictions.coco.json").read_text())
    assert len(found["annotations"]) == sum(bool(row["label"]) for row in rows)
    assert {name for name, *_ in written(session)} >= {"predictions.csv", "predictions.label-studio.json"}


def test_an_export_names_the_labels_and_the_round_that_it_was_made_from(session):
    fitted_to = session.digest()
    session.label([40, 41], OUT_OF_CLASS, why="grid", tab="tab")
    finish(session, "predictions")
    facts = {"round": 1, "made_from": fitted_to, "labels": session.digest(), "pending": 2}
    assert session.answers.exports == {"predictions.csv": facts}
    session.close()
    again = Session(session.pool, session.folder)
    assert again.answers.exports == {"predictions.csv": facts}
    assert again.digest() == facts["labels"]
    again.rename_class(0, "disk", tab="tab")  # the file has the other name
    assert again.digest() != facts["labels"]
    again.close()


def test_an_export_goes_stale_with_the_labels_their_names_and_the_model(session):
    finish(session, "predictions")
    assert written(session) == [("predictions.csv", 1, 0, False)]
    session.label([40], OUT_OF_CLASS, why="grid", tab="tab")
    assert written(session) == [("predictions.csv", 1, 0, True)]
    finish(session, "predictions")
    assert written(session) == [("predictions.csv", 1, 1, False)]  # said: one answer is newer
    session.refit()
    session.jobs.wait()
    assert written(session) == [("predictions.csv", 1, 1, True)]
    finish(session, "predictions")
    session.rename_class(0, "disk", tab="tab")
    assert written(session) == [("predictions.csv", 2, 0, True)]
    session.undo("tab")
    assert written(session) == [("predictions.csv", 2, 0, False)]
    (session.folder / "predictions.csv").unlink()
    assert written(session) == []


def test_an_export_that_the_log_names_outside_of_the_folder_is_not_looked_for(session):
    session.log.append("export", "", name="../pool", facts={})
    assert written(session) == []


def test_training_needs_two_classes(tmp_path):
    session = Session(make_pool(tmp_path / "pool", 8), tmp_path / "out")
    session.add_class("cat", [0], tab="tab")
    with pytest.raises(RefusedError, match="at least two classes"):
        outputs.export(session, "run")
    session.close()


def test_a_failed_training_says_why(session, monkeypatch):
    monkeypatch.setattr(outputs, "training_command", lambda *_, **__: ["train", "--labeled", "nowhere"])
    outputs.export(session, "run")
    session.jobs.wait()
    assert "train failed" in session.error
    assert "nowhere" in session.error
    assert outputs.output_facts(session)["run"] is None
    assert outputs.report_page(session) is None


KILLED = """
import signal, sys, time
from ropaws.explore.outputs import start_watched
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests in the background may ignore it
start_watched(["train", "--recipe", "demo", "--out", sys.argv[1], "--train.steps", "1000000"], sys.stdout)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGHUP, signal.SIGKILL])
def test_a_training_ends_with_the_server_that_started_it(tmp_path, signal_number):
    """Both write to one pipe, which ends when neither is there any more."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "started\n"
        server.send_signal(signal_number)
        rest, _ = server.communicate(timeout=PATIENCE)
    assert "interrupted" in rest or "Interrupt" in rest


def test_from_a_folder_without_labels_to_a_run(tmp_path, capsys):
    """The way a person takes, without the browser: images, answers, a run that other commands understand."""
    photos = make_photos(tmp_path)
    pool = pool_of_sources([photos / "pool"], [], Embedder(size=96, console=_quiet()))
    assert len(pool) == 36
    session = Session(pool, tmp_path / "out")
    session.auto_refit = False
    ids = {name: session.add_class(name, [], tab="tab") for name in PHOTO_NAMES}
    for number, name in enumerate(pool.names):
        kind = Path(name).name.split("-")[0]
        if kind in ids and int(Path(name).stem.split("-")[1]) < 4:
            session.label([number], ids[kind], why="grid", tab="tab")
    assert outputs.training_command(session, tmp_path / "out/run", whole=True)[-1] == "--train-backbone"
    finish(session, "run")
    run = tmp_path / "out/run"
    assert session.notice == f"Written: {run}, with its report"
    assert outputs.output_facts(session)["run"] == str(run)
    assert b"<html" in outputs.report_page(session)[:200]
    session.close()
    assert Run(run).class_names == tuple(sorted(PHOTO_NAMES))
    main(["predict", str(run), str(photos / "pool"), "--out", str(tmp_path / "labels.csv")])
    assert len((tmp_path / "labels.csv").read_text().splitlines()) == 37
    capsys.readouterr()


def _quiet():
    from rich.console import Console

    return Console(quiet=True)


def test_a_run_is_explored_with_its_own_predictions(trained, tmp_path):
    run, photos = trained
    pool = pool_of_run(Run(run, pool=0))
    assert len(pool) == 45
    assert pool.class_names == tuple(sorted(PHOTO_NAMES))
    session = Session(pool, tmp_path / "out")
    labeled = np.flatnonzero(session.codes >= 0)
    assert len(labeled) == 9
    names = [session.answers.classes[int(code)] for code in session.codes[labeled]]
    assert [Path(pool.names[number]).parent.name for number in labeled] == names
    said = np.sort(Run(run, pool=0).pool.outputs.in_domain.numpy())[:5]
    assert session.fitted.probs.shape == (45, 3)
    assert np.allclose(np.sort(session.fitted.in_class)[:5], said, atol=1e-3)
    command = outputs.training_command(session, tmp_path / "again", whole=False)
    assert command[command.index("--unlabeled") + 1] == str(photos / "pool")
    session.close()


def test_a_run_on_arrays_is_explored_and_trained_again(tiny_run, tmp_path):
    pool = pool_of_run(Run(tiny_run, pool=0))
    session = Session(pool, tmp_path / "out")
    assert open_shown(pool.images[0]).mode == "RGB"
    assert pool.files is None
    assert session.thumbnails.get(0).media_type == "image/png"
    with pytest.raises(RefusedError, match="not files"):
        outputs.export(session, "folders")
    outputs._write_inputs(session)
    with np.load(tmp_path / "out/images.npz") as kept:
        assert kept["images"].shape[0] == len(pool)
        assert (kept["labels"] != "").sum() == (session.codes >= 0).sum()
        assert np.array_equal(kept["images"][0], np.asarray(open_shown(pool.images[0]).convert("L")))
    assert str(tmp_path / "out/images.npz") in outputs.training_command(
        session, tmp_path / "run", whole=False
    )
    session.close()


# The command


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "name a run folder, or images with --unlabeled"),
        (["runs/none"], "not a run folder"),
        (["runs/mine", "--unlabeled", "x"], "not both"),
        (["--unlabeled", "nowhere"], "nowhere"),
        (["--unlabeled", "{empty}"], "has no image"),
        (["--unlabeled", "{empty}", "--port", "99999"], "--port must be from 0 to 65535, got 99999"),
    ],
)
def test_wrong_arguments(arguments, line, tmp_path, capsys):
    given = [argument.replace("{empty}", str(tmp_path)) for argument in arguments]
    assert line in fails(
        capsys, "explore", *given, "--no-browser", *([] if "--port" in given else ["--port", "0"])
    )


def test_without_fastapi_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'ropaws[explore]'" in fails(capsys, "explore", "--unlabeled", "x")


def test_the_folder_is_named_after_the_source():
    from ropaws.cli.explore import Explore, _folder

    assert _folder(Explore(unlabeled=(Path("/a/photos"),))) == Path("explore/photos")
    assert _folder(Explore(run=Path("runs/mine"))) == Path("runs/mine/explore")
    assert _folder(Explore(run=Path("runs/mine"), out=Path("x"))) == Path("x")


def test_a_huge_image_in_the_pool_is_refused_when_it_is_shown(tmp_path):
    from ropaws.pool.decoding import UnreadableError

    pool = make_pool(tmp_path / "pool", 4)
    Image.new("1", (20_000, 20_000)).save(tmp_path / "pool/image-001.png")
    with pytest.raises(UnreadableError, match="pixels"):
        open_shown(pool.images[1])


def test_progress_of_training_is_read_from_its_files(tmp_path):
    assert outputs._progress(tmp_path)[1] is None
    (tmp_path / "config.json").write_text(json.dumps({"train": {"steps": 10}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 4}\n')
    assert outputs._progress(tmp_path) == ("training, step 5 of 10", 0.5)
