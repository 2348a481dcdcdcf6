"""`ropaws embed`."""

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from ropaws.cli.parsing import parse
from ropaws.models import PRETRAINED
from ropaws.prediction.embed import (
    Embedded,
    Embedder,
    EmbedSettings,
    check_features_file,
    list_sources,
)
from ropaws.terminal import Terminal, say


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
    """Pixels per side of a view; by default as `ropaws train` chooses it."""
    cache: Path | None = None
    """Folder that keeps features for later; by default ~/.cache/ropaws/features."""
    device: str = "auto"
    """Where to compute."""


def embed(arguments: list[str]) -> None:
    command = parse(Embed, "embed", arguments)
    check_features_file(command.out)
    settings = EmbedSettings(
        backbone=command.backbone,
        init=command.init,
        views=command.views,
        size=command.size,
        cache=command.cache,
        device=command.device,
    )
    # All that can be wrong with the sources is found before hours of computing.
    listing = list_sources(command.sources, command.labeled)
    test_listing = list_sources((), command.test) if command.test else None
    console = Terminal(stderr=True)
    embedder = Embedder(settings, listing, console)
    found = embedder.embed(listing)
    tested = None if test_listing is None else embedder.embed(test_listing, views=0)
    found.save(command.out, test=tested)
    _summarize(command.out, found, tested, console)


def _summarize(out: Path, found: Embedded, tested: Embedded | None, console: Console) -> None:
    parts = [found] if tested is None else [found, tested]
    images = " and ".join(
        f"{len(part):,} {name}" for part, name in zip(parts, ("images", "test images"), strict=False)
    )
    size = sum(part.size for part in parts) / 2**20
    dims = found.rows.shape[1]
    say(f"{out}: {dims} features of {images} by {found.facts['backbone']}, {size:,.1f} MB")
    if unreadable := sum(len(part.unreadable) for part in parts):
        console.print(f"{unreadable} unreadable images were left out, listed in {out}.json", highlight=False)
