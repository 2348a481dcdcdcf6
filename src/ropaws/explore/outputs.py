"""What a person takes away: sorted folders, a table of predictions, a trained run."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ropaws.core.files import make_folder, replacing
from ropaws.core.labels import OUT_OF_CLASS, OUT_OF_CLASS_NAME, UNLABELED
from ropaws.core.run_layout import CHECKPOINT, CONFIG, METRICS, MODEL, REPORT
from ropaws.explore.answer_log import SKIPPED, RefusedError
from ropaws.explore.images import open_shown
from ropaws.explore.jobs import CancelledError, Job
from ropaws.explore.label_table import write_table
from ropaws.explore.session import TABLE, Session
from ropaws.insight.neighbors import PoolMap, pool_map
from ropaws.pool.content import Encoded, UnreadableError, image_size
from ropaws.run.label_files import columns
from ropaws.run.output_formats import ANSWERED, ENDING, OTHER_TOOLS, FormatName, Output, write_labels
from ropaws.run.predict import Prediction
from ropaws.run.sorting import Sorter

SORTED, ARRAYS = "sorted", "images.npz"
RUNS = {"run": "run", "finetune": "finetuned"}  # folder of each kind of training
TRAIN_LOG = "train.log"
POLL_SECONDS = 0.5


def predictions_name(kind: FormatName) -> str:
    """Of the file that has all predictions: predictions.csv, predictions.coco.json ..."""
    return f"predictions.{kind}{ENDING[kind]}" if kind in OTHER_TOOLS else f"predictions{ENDING[kind]}"


def export(session: Session, kind: str, format: FormatName = "csv") -> str:
    """Start to write something in the folder of the session. Returns a line about it.

    Raises:
        RefusedError: It cannot be written now; the message says why.
    """
    if kind in ("folders", "predictions"):
        return _export_images(session, kind, format)
    with session.lock:
        labels = [label for label in session.answers.labels.values() if label >= 0]
    if len(set(labels)) < 2:
        raise RefusedError("training needs labels of at least two classes; label more images first")
    job = Job("train", "training", fraction=0.0)
    folder = _free(session.folder / RUNS[kind])
    if not session.jobs.start(job, lambda running: _train(session, running, folder, kind == "finetune")):
        raise RefusedError("a training is running; wait for it, or cancel it")
    return f"training into {folder}"


def _export_images(session: Session, kind: str, format: FormatName) -> str:
    named = SORTED if kind == "folders" else predictions_name(format)
    if (kind == "folders" or format in OTHER_TOOLS) and session.pool.files is None:
        how = "sorted into folders" if kind == "folders" else f"named in {named}; write a table"
        raise RefusedError(f"these images are not files of their own, so they cannot be {how}")
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise RefusedError("parquet needs pyarrow; pip install 'ropaws[parquet]', then start again")
    job = Job("export", f"writing {named}", fraction=0.0)

    def work(running: Job) -> None:
        if kind == "folders":
            _sort(session, running)
        else:
            _write_predictions(session, running, format)

    if not session.jobs.start(job, work):
        raise RefusedError("another export is running; wait for it, or cancel it")
    return job.text


class Shown:
    """What the page says of all images at one moment."""

    def __init__(self, session: Session) -> None:
        with session.lock:
            self.images = session.pool.names
            self.fitted, self.codes = session.fitted, session.codes.copy()
            self.predicted, self.plane = session.predicted, session.plane
            self.names = dict(session.answers.classes)
            self.round, self.pending = session.round, session.pending
            self.made_from, self.labels = session.made_from, session.digest()

    def keep(self, session: Session, name: str) -> None:
        """Keep in the log what was written, and the labels and the round that it was made from."""
        made = {"round": self.round, "made_from": self.made_from}
        facts = {**made, "labels": self.labels, "pending": self.pending}
        with session.lock:
            session.log.append("export", "", name=name, facts=facts)

    def predictions(self) -> Iterator[tuple[int, Prediction]]:
        """The answer of the person where there is one, else that of the classifier; by number."""
        places = {number: place for place, number in enumerate(self.fitted.classes) if number in self.names}
        for number, name in enumerate(self.images):
            own = self.codes[number] >= 0 or self.codes[number] == OUT_OF_CLASS
            answer = int(self.codes[number] if own else self.predicted[number])
            probs = dict.fromkeys(self.names, 0.0)
            if own and answer >= 0:
                probs[answer] = 1.0
            else:
                probs |= {key: float(self.fitted.probs[number, place]) for key, place in places.items()}
            best = answer if answer >= 0 else max(probs, key=lambda key: probs[key], default=UNLABELED)
            label = self.names.get(answer, "")
            yield (
                number,
                Prediction(
                    path=name,
                    label=label,
                    nearest_class=self.names.get(best, "") if answer != UNLABELED else "",
                    confidence=probs[answer] if label else None,
                    in_domain=float(answer >= 0) if own else float(self.fitted.in_class[number]),
                    out_of_class=answer == OUT_OF_CLASS,
                    nearest="",
                    similarity=0.0,
                    probabilities=tuple(probs.values()),
                ),
            )


def _write_predictions(session: Session, job: Job, format: FormatName) -> None:
    """All images with class, confidence and in-domain probability; `answered` says who gave the label."""
    shown, name = Shown(session), predictions_name(format)

    def rows() -> Iterator[dict[str, Any]]:
        for number, prediction in shown.predictions():
            job.report(f"writing {name}", number / len(shown.codes))
            row = columns(prediction, tuple(shown.names.values()), None)
            del row["nearest"], row["similarity"]
            yield row | {ANSWERED: "yes" if shown.codes[number] not in (UNLABELED, SKIPPED) else ""}

    def placed() -> PoolMap:
        job.report(f"writing {name}: neighbors", None)
        return pool_map(session.pool.points, shown.plane)

    output = Output(format, tuple(shown.names.values()), placed if format == "parquet" else None)
    write_labels(session.folder / name, rows(), output)
    shown.keep(session, name)


def _sort(session: Session, job: Job) -> None:
    """Copies of all images in a folder for each class; those of no class in out-of-class."""
    target = _free(session.folder / SORTED)  # copies of an earlier call may be in classes of then
    make_folder(target)
    files = session.pool.files or []
    there = {number: path for number, path in enumerate(files) if _is_image(path)}
    shown = Shown(session)
    sorter = Sorter(
        target, tuple(shown.names.values()), tuple(there.values()), move=False, check=_refuse_other
    )
    for number, prediction in shown.predictions():
        job.report("planning", 0.5 * number / len(files))
        if number in there and (prediction.label or prediction.out_of_class):
            sorter.plan(there[number], prediction.label or None)
    job.report("copying", 0.5)
    sorter.carry_out()
    shown.keep(session, target.name)


def _is_image(path: Path) -> bool:
    """Is it still there, and an image?"""
    try:
        image_size(path)
    except (OSError, ValueError, UnreadableError):
        return False
    return True


def _refuse_other(copy: Path) -> None:
    """A link may take the place of an image at any time: the copy of what it leads to must be one."""
    if not _is_image(copy):
        raise ValueError("a file is not an image any more; look at the pool, and sort again")


# Training, in a process of its own: it can be stopped, and resumed by hand


def training_command(session: Session, folder: Path, *, whole: bool) -> list[str]:
    """`ropaws train` on the answers, as a person could type it."""
    options = ["--labeled", str(session.folder / TABLE)]
    if session.pool.files is not None:
        if session.pool.sources:
            options += ["--unlabeled", *map(str, session.pool.sources)]
    else:
        options = ["--labeled", str(session.folder / ARRAYS)]
    options += [*session.pool.init, "--out", str(folder)]
    return ["train", *options, *(["--train-backbone"] if whole else [])]


# Its standard input ends with this server, however that ends; then the training saves a checkpoint, and ends.
WATCHED = """
import os, runpy, signal, threading
def watch():
    os.read(0, 1)  # not through sys.stdin: its lock would be held when the interpreter ends
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a server in the background may ignore it
threading.Thread(target=watch, daemon=True).start()
runpy.run_module("ropaws", run_name="__main__", alter_sys=True)
"""


def start_watched(arguments: Sequence[str], output: IO[str]) -> subprocess.Popen[bytes]:
    """`ropaws` in a process that does not outlive this one."""
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, start_new_session=True
    )


def _train(session: Session, job: Job, folder: Path, whole: bool) -> None:
    job.report("writing the labels", 0.0)
    _write_inputs(session)
    make_folder(folder.parent)
    log = session.folder / TRAIN_LOG
    with (
        replacing(log) as temporary,
        temporary.open("w") as output,
        start_watched(training_command(session, folder, whole=whole), output) as process,
    ):
        try:
            while process.poll() is None:
                job.report(*_progress(folder))
                job.stop.wait(POLL_SECONDS)
        except CancelledError:
            process.send_signal(signal.SIGINT)  # it saves a checkpoint, and can be resumed
            process.wait()
            has_begun = (folder / CHECKPOINT).is_file()
            how = f"`ropaws train --resume {folder}` continues it" if has_begun else "it had not begun"
            session.notice = f"Training was stopped; {how}"
            raise
        finally:
            said = temporary.read_text(errors="replace").strip().splitlines()
    if process.returncode != 0:
        raise ValueError(said[-1] if said else f"`ropaws train` ended with {process.returncode}")
    session.notice = f"Written: {folder}, with its report"


def _write_inputs(session: Session) -> None:
    """labels.csv as it is now; images that are not files, with their labels, as an array."""
    with session.lock:
        session.write_table()
        codes, names = session.codes.copy(), dict(session.answers.classes)
        rows = [
            (name, names.get(label, ""), label == OUT_OF_CLASS)
            for name, label in session.answers.labels.items()
            if label != SKIPPED
        ]
    write_table(session.folder / TABLE, rows)
    if session.pool.files is None:
        pixels = _pixels(session)
        named = names | {OUT_OF_CLASS: OUT_OF_CLASS_NAME}
        labels = np.array([named.get(int(code), "") for code in codes])
        with replacing(session.folder / ARRAYS) as temporary, temporary.open("wb") as file:
            np.savez(file, images=pixels, labels=labels)


def _pixels(session: Session) -> NDArray[np.uint8]:
    """Of images that are not files.   ->  (n, h, w) or (n, h, w, 3)"""
    contents = (image.data if isinstance(image, Encoded) else None for image in session.pool.images)
    opened = [
        data if isinstance(data, np.ndarray) else np.asarray(open_shown(image))
        for data, image in zip(contents, session.pool.images, strict=True)
    ]
    if len({pixels.shape for pixels in opened}) > 1:
        raise ValueError("these images are not files, and not of one size; save them as files to train")
    return np.stack(opened)


def _progress(folder: Path) -> tuple[str, float | None]:
    """From the files of the run: what is written of its steps."""
    try:
        steps = json.loads((folder / CONFIG).read_text())["train"]["steps"]
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().splitlines()
        done = json.loads(lines[-1])["step"] + 1
        return f"training, step {done:,} of {steps:,}", done / steps
    except (OSError, ValueError, KeyError, IndexError, TypeError, ZeroDivisionError):
        return "preparing the training: features of all views", None


def _free(folder: Path) -> Path:
    """The folder, or the same name with a number, if it is taken."""
    number, place = 1, folder
    while place.exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place


def latest_run(session: Session) -> Path | None:
    """The run that was trained last."""
    found = [
        place
        for name in RUNS.values()
        for place in session.folder.glob(f"{name}*")
        if (place / MODEL).is_file() and not place.is_symlink()
    ]
    return max(found, key=lambda place: (place / MODEL).stat().st_mtime, default=None)


def output_facts(session: Session) -> dict[str, Any]:
    """Where things are, for the page."""
    run = latest_run(session)
    return {
        "labels_csv": str(session.folder / TABLE),
        "folder": str(session.folder),
        "run": None if run is None else str(run),
        "report": run is not None and (run / REPORT).is_file(),
        "written": _written(session),
    }


def _written(session: Session) -> list[dict[str, Any]]:
    """Exports that are still there. One is stale once the labels or the classifier are others."""
    with session.lock:
        exports = dict(session.answers.exports)
        now = (session.digest(), session.made_from)
    return [
        {
            "name": name,
            "round": facts.get("round"),
            "pending": facts.get("pending"),
            "stale": (facts.get("labels"), facts.get("made_from")) != now,
        }
        for name, facts in exports.items()
        if Path(name).name == name and (session.folder / name).exists()
    ]


def report_page(session: Session) -> bytes | None:
    """The report of the run that was trained last; None without one."""
    run = latest_run(session)
    page = None if run is None else run / REPORT
    if page is None or page.is_symlink() or not page.is_file():
        return None
    return page.read_bytes()
