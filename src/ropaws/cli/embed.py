"""`ropaws embed`."""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console

from ropaws.cli.parsing import parse
from ropaws.prediction.embed import PRETRAINED, Embedded, check_features_file
from ropaws.prediction.embed import embed as embed_sources


@dataclass(frozen=True)
class Embed:
    """Compute the features of images with a pretrained network, for `train --features` or other programs.

    ropaws embed photos/pool --labeled photos/labeled --out features.npz
    """

    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Folders, searched recursively, images, tables of paths, .npz files, or saved datasets."""
    out: Path
    """The .npz to write: features, views, labels, names. Facts about it go to OUT.json beside it."""
    labeled: tuple[Path, ...] = ()
    """Sources with labels: folders with one folder per class, tables of path and label ..."""
    test: tuple[Path, ...] = ()
    """Images to test on, like --labeled; their arrays are called test_features and so on."""
    backbone: str | None = None
    """efficientnet-lite0 (the default), timm:NAME, or the network that --init belongs to."""
    init: Path = PRETRAINED
    """Weights: pretrained, or a .pth or .safetensors file."""
    views: int = 4
    """Random views of each image, besides the center view; test images have none."""
    size: int | None = None
    """Pixels per side of a view; by default what the weights expect, but less on a CPU."""
    cache: Path | None = None
    """Folder that keeps features for later; by default ~/.cache/ropaws/features."""
    device: str = "auto"
    """Where to compute."""


def embed(arguments: list[str]) -> None:
    command = parse(Embed, "embed", arguments)
    check_features_file(command.out)
    console = Console(stderr=True)
    found = _embed(command, console)
    tested = None
    if command.test:
        tested = _embed(replace(command, sources=(), labeled=command.test, views=0), console)
    found.save(command.out, test=tested)
    count, dims = len(found), found.rows.shape[1]
    what = f"{count:,} images" if tested is None else f"{count:,} images and {len(tested):,} test images"
    size = (found.size + (0 if tested is None else tested.size)) / 2**20
    print(f"{command.out}: {dims} features of {what} by {found.facts['backbone']}, {size:,.1f} MB")
    unreadable = len(found.unreadable) + (0 if tested is None else len(tested.unreadable))
    if unreadable:
        console.print(
            f"{unreadable} unreadable images were left out, listed in {command.out}.json", highlight=False
        )


def _embed(command: Embed, console: Console) -> Embedded:
    return embed_sources(
        command.sources,
        labeled=command.labeled,
        backbone=command.backbone,
        init=command.init,
        views=command.views,
        size=command.size,
        cache=command.cache,
        device=command.device,
        console=console,
    )
