"""`ropaws export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ropaws.cli.parsing import parse
from ropaws.cli.runs import run_of
from ropaws.prediction.export_model import ExportSettings, check_place, export_run
from ropaws.prediction.model_card import write_card
from ropaws.runs.layout import CARD
from ropaws.terminal import say


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
    command = parse(Export, "export", arguments)
    kind = _kind_of(command)
    card = _card_of(command, kind) if command.card else None
    if card is not None:
        check_place(card, overwrite=command.overwrite)
    run = run_of(command.run, command.method)
    if kind is not None:
        settings = ExportSettings(
            format=kind, int8=command.int8, threshold=command.threshold, names=command.names
        )
        made = export_run(run, command.out, settings, overwrite=command.overwrite)
        say(f"Written: {made.path}, {made.bytes / 2**20:,.1f} MB")
    if card is not None:
        write_card(run, card, overwrite=command.overwrite)
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
