"""`ropaws predict` and `export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.table import Table

from ropaws.cli.parsing import parse, run_of
from ropaws.core.files import locked_file
from ropaws.core.run_layout import CARD
from ropaws.core.terminal import Terminal, cell, counted, say
from ropaws.pool.content import remedies
from ropaws.pool.datasets.feature_file import FeatureTable
from ropaws.run.label_files import PredictSettings, label_files
from ropaws.run.output_formats import FormatName
from ropaws.run.predict import Predictor, listed_images
from ropaws.scale import Labeler, RayOptions, check_parts_folder, write_parts


@dataclass(frozen=True)
class Predict(RayOptions):
    """Label images with a trained run: class, confidence, and whether they belong to any known class.

    ropaws predict runs/mine photos/pool --out labels.csv
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Folders, searched recursively, images, tables of paths, .npz files, or saved datasets. For a run on
    features, or on a frozen backbone: one .npz or .npy file of features."""
    out: Path
    """The table to write: .csv, .jsonl or .parquet; .json for another tool, with --format. Facts about it go
    to OUT.json beside it. With --engine ray a folder of parquet files."""
    format: FormatName | None = None
    """By default what --out ends in; label-studio, fiftyone and coco end in .json. They are tasks with
    predictions, labels.json of a FiftyOneImageClassificationDataset, and images, annotations and
    categories."""
    map: bool = True
    """In parquet: place on a map (x, y) and the most similar images (neighbors). `embedding-atlas FILE
    --x x --y y --neighbors neighbors` shows them."""
    threshold: float | None = None
    """In-domain probability below which an image is out-of-class. By default one half where the pool itself
    says how likely an image belongs to any class, as on pretrained features; else what 95 % of the labeled
    images reach."""
    top: int | None = None
    """Only the N most likely classes, not one column per class."""
    propagate: bool = False
    """Let labels spread through all these images."""
    copy_to: Path | None = None
    """Also copy the images there, into one folder per class and one for out-of-class images."""
    move_to: Path | None = None
    """Move them instead."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""
    engine: Literal["local", "ray"] = "local"
    """ray shares the work out over processes or the machines of a cluster."""


def predict(arguments: list[str]) -> None:
    command = parse(Predict, "predict", arguments)
    if command.top is not None and command.top < 1:
        raise ValueError(f"--top must be at least 1, got {command.top}")
    if command.copy_to is not None and command.move_to is not None:
        raise ValueError("--copy-to and --move-to cannot be combined")
    if not command.sources:
        raise ValueError("name the images to label: ropaws predict RUN FOLDER --out labels.csv")
    if command.engine == "ray":
        _predict_with_ray(command)
        return
    settings = PredictSettings(
        out=command.out,
        format=command.format,
        top=command.top,
        with_map=command.map,
        sort_into=command.copy_to or command.move_to,
        move=command.move_to is not None,
    )
    images = listed_images(command.sources, lambda line: say(line, error=True))
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
        unreadable = counted(len(summary.unreadable), "unreadable image")
        need = remedies(item.reason for item in summary.unreadable)
        say(f"Left out: {unreadable}, listed in {command.out}.json{need}", error=True)


def _predict_with_ray(command: Predict) -> None:
    if command.format not in (None, "parquet"):
        raise ValueError(f"--engine ray writes a folder of parquet files, not --format {command.format}")
    chosen = {"--propagate": command.propagate, "--copy-to": command.copy_to, "--move-to": command.move_to}
    if refused := next((name for name, value in chosen.items() if value), None):
        raise ValueError(f"{refused} needs all images in one process; leave --engine ray out")
    check_parts_folder(command.out)
    images = listed_images(command.sources, lambda line: say(line, error=True))
    if isinstance(images, FeatureTable):
        raise ValueError("--engine ray labels images; for a file of features leave it out")
    run_of(command.run, command.method)  # for its errors, before any worker starts
    labeler = Labeler(command.run, threshold=command.threshold, top=command.top, device=command.device)
    made = write_parts(labeler, images, command.out, command)
    say(f"{command.out}: {len(images):,} images; {made:,} parts were computed now")


@dataclass(frozen=True)
class Export:
    """Write a run as one file that labels images without ropaws, and its model card.

    The file holds the network, the labeled images as numbers, class names, threshold and how images are to be
    prepared. What it says is compared with the run before it is written. ONNX needs pip install
    'ropaws[export]'.

    ropaws export runs/mine --format onnx --out shapes.onnx
    ropaws export runs/mine --card
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    format: Literal["onnx", "torch", "auto"] = "auto"
    """onnx, for onnxruntime and others; torch, a .pt2 file for torch.export.load. auto is onnx, or no such
    file with --card."""
    out: Path | None = None
    """The file; by default model.onnx or model.pt2 in the run folder. With --card alone: the card."""
    card: bool = False
    """Write a model card in the format of Hugging Face: README.md beside the file, or in the run folder."""
    int8: bool = False
    """Compute convolutions in whole numbers; refused if that costs more than half a point of accuracy."""
    threshold: float | None = None
    """In-domain probability below which an image is out-of-class; by default from the labeled images."""
    names: bool = True
    """Keep the names of the labeled images in the file, as the run has them."""
    overwrite: bool = False
    """Replace files that are there."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""


def export(arguments: list[str]) -> None:
    from ropaws.run.export_model import check_place  # slow to load, and `ropaws predict` does not need them
    from ropaws.run.model_card import model_card

    command = parse(Export, "export", arguments)
    kind = _kind_of(command)
    card = _card_of(command, kind) if command.card else None
    if card is not None:
        check_place(card, overwrite=command.overwrite)
    run = run_of(command.run, command.method)
    made = None
    if kind is not None:
        made = run.export(
            command.out,
            format=kind,
            int8=command.int8,
            threshold=command.threshold,
            names=command.names,
            overwrite=command.overwrite,
        )
        say(f"Written: {made.path}, {made.bytes / 2**20:,.1f} MB")
    if card is not None:
        model_card(run, card, overwrite=command.overwrite, exported=made)
        say(f"Written: {card}")


def _kind_of(command: Export) -> Literal["onnx", "torch"] | None:
    """The file to write beside the card, if any."""
    if command.format != "auto":
        return command.format
    return None if command.card and not command.int8 else "onnx"


def _card_of(command: Export, kind: str | None) -> Path:
    if command.out is None:
        return command.run / CARD
    return command.out if kind is None else command.out.with_name(CARD)
