"""`ropaws predict`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from ropaws.cli.parsing import parse
from ropaws.cli.runs import run_of
from ropaws.data.datasets.feature_file import FeatureTable
from ropaws.data.files.decoding import ImageRef
from ropaws.data.files.listing import list_unlabeled, merge
from ropaws.prediction.export import PredictSettings, label_files
from ropaws.prediction.label_tables import check_target
from ropaws.prediction.predict import Predictor, feature_table
from ropaws.runs.lock import locked_file
from ropaws.terminal import Terminal, cell, say


@dataclass(frozen=True)
class Predict:
    """Label images with a trained run: class, confidence, and whether they belong to any known class.

    ropaws predict runs/mine photos/pool --out labels.csv
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Folders, searched recursively, images, tables of paths, .npz files, or saved datasets. For a run on
    features, or on a frozen backbone: one .npz or .npy file of features."""
    out: Path
    """The table to write: .csv, .jsonl or .parquet. Facts about it go to OUT.json beside it."""
    threshold: float | None = None
    """In-domain probability below which an image is out-of-class; by default from the labeled images."""
    top: int | None = None
    """Only the most likely classes, instead of one column per class."""
    propagate: bool = False
    """Let labels spread through all these images: better labels from a large pool."""
    copy_to: Path | None = None
    """Also copy the images there, into one folder per class and one for out-of-class images."""
    move_to: Path | None = None
    """Move them instead."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


def _listed(sources: Sequence[Path]) -> Sequence[ImageRef] | FeatureTable:
    tables = [feature_table(source) for source in sources]
    if any(table is not None for table in tables):
        if len(tables) > 1:
            raise ValueError("one file of features at a time: give each its own --out")
        assert tables[0] is not None
        return tables[0]
    return merge([list_unlabeled(source) for source in sources]).images


def predict(arguments: list[str]) -> None:
    command = parse(Predict, "predict", arguments)
    if command.top is not None and command.top < 1:
        raise ValueError(f"--top must be at least 1, got {command.top}")
    if command.copy_to is not None and command.move_to is not None:
        raise ValueError("--copy-to and --move-to cannot be combined")
    if not command.sources:
        raise ValueError("name the images to label: ropaws predict RUN FOLDER --out labels.csv")
    settings = PredictSettings(
        out=command.out,
        top=command.top,
        sort_into=command.copy_to or command.move_to,
        move=command.move_to is not None,
    )
    check_target(command.out)
    images = _listed(command.sources)
    run = run_of(command.run, command.method, device=command.device)
    predictor = Predictor(run, threshold=command.threshold, propagate=command.propagate)
    with locked_file(command.out):  # two writers would mix the table of one with the facts of the other
        summary = label_files(predictor, images, settings, Terminal(stderr=True))
    table = Table(title=cell(f"{summary.labeled:,} images in {command.out}"))
    table.add_column("label")
    table.add_column("images", justify="right")
    for label, count in summary.counts.items():
        table.add_row(cell(label), f"{count:,}")
    Terminal().print(table)
    if summary.unreadable:
        say(f"{len(summary.unreadable)} unreadable images are listed in {command.out}.json", error=True)
