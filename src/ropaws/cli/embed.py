"""`ropaws embed` and `ropaws backbones`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ropaws.cli.parsing import parse, text_table, wide_console
from ropaws.core.terminal import counted, say
from ropaws.embedding.backbones import (
    PRETRAINED,
    ModelConfig,
    build_encoder,
    download_notice,
    load_init,
    part_names,
)
from ropaws.embedding.embedder import (
    Embedded,
    Embedder,
    check_features_file,
    open_images,
    seconds_per_view,
)
from ropaws.embedding.pretrained import LITE, NETWORKS, Network, best_at_hand, weights_at_hand
from ropaws.embedding.timm_backbone import TIMM
from ropaws.pool.content import remedies
from ropaws.pool.listing import Pool
from ropaws.scale import FeatureMaker, RayOptions, check_parts_folder, write_parts


@dataclass(frozen=True)
class Embed(RayOptions):
    """Compute the features of images with a pretrained network, for `train --features` or other programs.

    ropaws embed photos/pool --labeled photos/labeled --out features.npz
    """

    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Folders, searched recursively, images, tables of paths, .npz files, or saved datasets."""
    out: Path
    """The .npz to write: features, views, labels, names. Facts about it go to OUT.json beside it. With
    --engine ray a folder of parquet files with the center view's features."""
    labeled: tuple[Path, ...] = ()
    """Sources with labels: folders with one folder per class, tables of path and label ..."""
    test: tuple[Path, ...] = ()
    """Images to test on, like --labeled; their arrays are called test_features and so on."""
    backbone: str | None = None
    """The network: auto (the default: the best at hand, or the one that --init fits), a name of `ropaws
    backbones` (several joined by +), or timm:NAME."""
    init: Path = PRETRAINED
    """Weights: pretrained, or a .pth or .safetensors file; of several networks FILE+FILE."""
    views: int = 1
    """Random views of each image, besides the center view; test images have none."""
    size: int | None = None
    """Pixels per side of a view; by default as `ropaws train` chooses it."""
    cache: Path | None = None
    """Folder that keeps features for later; by default ~/.cache/ropaws/features."""
    device: str = "auto"
    """Where to compute."""
    engine: Literal["local", "ray"] = "local"
    """ray shares the work out over processes or the machines of a cluster."""


def embed(arguments: list[str]) -> None:
    command = parse(Embed, "embed", arguments)
    (check_parts_folder if command.engine == "ray" else check_features_file)(command.out)
    embedder = Embedder(
        command.backbone,
        init=command.init,
        views=command.views,
        size=command.size,
        cache=command.cache,
        device=command.device,
    )
    # All that can be wrong with the sources is found before hours of computing.
    pool, tests = open_images(command.sources, command.labeled), Pool.open(test=command.test)
    if command.engine == "ray":
        _embed_with_ray(command, embedder, pool, tests)
        return
    found = embedder.embed(pool)
    tested = embedder.embed(tests, views=0) if len(tests) else None
    found.save(command.out, test=tested)
    _summarize(command.out, found, tested)


def _embed_with_ray(command: Embed, embedder: Embedder, pool: Pool, tests: Pool) -> None:
    if len(tests):
        raise ValueError("--test: with --engine ray, give test images a command and an --out of their own")
    maker = FeatureMaker(embedder.embedding(pool), command.cache)
    made = write_parts(maker, pool.images, command.out, command)
    say(f"{command.out}: features of {len(pool):,} images; {made:,} parts were computed now")


def _summarize(out: Path, found: Embedded, tested: Embedded | None) -> None:
    parts = [found] if tested is None else [found, tested]
    images = " and ".join(
        f"{len(part):,} {name}" for part, name in zip(parts, ("images", "test images"), strict=False)
    )
    size = sum(part.size for part in parts) / 2**20
    dims = found.rows.shape[1]
    say(f"{out}: {dims} features of {images} by {found.facts['backbone']}, {size:,.1f} MB")
    if unreadable := [item.reason for part in parts for item in part.unreadable]:
        how_many = counted(len(unreadable), "unreadable image")
        say(f"Left out: {how_many}, listed in {out}.json{remedies(unreadable)}", error=True)


@dataclass(frozen=True)
class Backbones:
    """List the pretrained networks with what is at hand, or download one.

    ropaws backbones
    ropaws backbones get dinov2-small
    """

    action: tyro.conf.Positional[Literal["list", "get"]] = "list"
    """list or get."""
    name: tyro.conf.Positional[str | None] = None
    """The network to download: one of the list, or timm:NAME."""


def backbones(arguments: list[str]) -> None:
    command = parse(Backbones, "backbones", arguments)
    if command.action == "get":
        _get(command.name)
        return
    head = ["name", "at hand", "MB", "license", "features", "view", "ms per image"]
    rows = [_network_row(name, row) for name, row in NETWORKS.items()]
    wide_console().print(text_table("Pretrained networks", head, rows))
    say("Milliseconds are of one view here, measured once. Any network of timm works as timm:NAME.")
    say(best_at_hand()[1])


def _get(name: str | None) -> None:
    """Download the weights of a network into the cache of the Hugging Face hub, as timm does."""
    if name is None or not all(part in NETWORKS or part.startswith(TIMM) for part in part_names(name)):
        known = ", ".join(NETWORKS)
        raise ValueError(f"name the network to download: {known}, or timm:NAME; got {name}")
    model = ModelConfig(backbone=name, init=PRETRAINED, frozen=True)
    say(f"backbone {name}{download_notice(model) or '; it is at hand already'}", error=True, flush=True)
    load_init(build_encoder(model, channels=3), model, channels=3)
    say(f"{name} is at hand: {weights_at_hand(name) or 'in the cache of timm'}")


def _network_row(name: str, row: Network) -> list[str]:
    at_hand = weights_at_hand(name) is not None
    where = "pip, ropaws[pretrained]" if name == LITE else f"huggingface.co/timm/{row.timm}"
    speed = f"{1000 * seconds_per_view(name):.0f}" if at_hand else "-"
    return [name, "yes" if at_hand else f"no: {where}", str(row.megabytes), row.license, str(row.dims),
            f"{row.cpu_size} px", speed]  # fmt: skip
