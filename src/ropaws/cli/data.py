"""`ropaws check`, `cache` and `datasets`."""

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from ropaws.cli.parsing import parse
from ropaws.core.files import check_out_folder, write_json
from ropaws.core.terminal import Terminal, cell, say, watch_files
from ropaws.embedding.feature_cache import cache_size, clear_cache, default_folder
from ropaws.pool.check import check_data
from ropaws.pool.datasets.catalog import DATASETS, MIXES, is_there
from ropaws.pool.sources import DataConfig, load_corpus


@dataclass(frozen=True)
class Check:
    """Look for problems in your own images before training: unreadable files, copies, conflicting labels.

    ropaws check --labeled photos/labeled --unlabeled photos/pool
    """

    labeled: Path
    """A folder with one folder per class, a table of path and label, an .npz or a saved dataset."""
    unlabeled: tuple[Path, ...] = ()
    """Folders of anything, tables of paths, .npz files or saved datasets."""
    test: Path | None = None
    """Images to test on, like --labeled."""
    json: Path | None = None
    """Also write everything that was found to this file."""


def check(arguments: list[str]) -> None:
    command = parse(Check, "check", arguments)
    if command.json is not None:
        check_out_folder(command.json.parent, option="--json")
    watch = watch_files(Terminal(stderr=True))
    findings = check_data(command.labeled, command.unlabeled, command.test, watch=watch)
    table = Table(title=f"Images; the typical shorter side is {findings.typical_side:.0f} px")
    table.add_column("class")
    table.add_column("labeled", justify="right")
    table.add_column("test", justify="right")
    for name in sorted(findings.classes | findings.test):
        table.add_row(cell(name), f"{findings.classes.get(name, 0):,}", f"{findings.test.get(name, 0):,}")
    table.add_row("(unlabeled)", f"{findings.unlabeled:,}", "")
    Terminal().print(table)
    for line in findings.warnings() or ["No problem was found."]:
        say(line)
    if command.json is not None:
        write_json(command.json, findings.to_json())


@dataclass(frozen=True)
class Cache:
    """Show what the cache of features holds, or clear it. Every command computes again what it does not find.

    ropaws cache --clear
    """

    folder: Path | None = None
    """The cache; by default $ROPAWS_CACHE, or ropaws/features in your cache folder."""
    clear: bool = False
    """Remove all features. Other files in the folder stay."""


def cache(arguments: list[str]) -> None:
    command = parse(Cache, "cache", arguments)
    folder = command.folder or default_folder()
    found = clear_cache(folder) if command.clear else cache_size(folder)
    what = f"{found.files:,} files of {found.networks:,} networks and views, {found.size / 2**20:,.1f} MB"
    say(f"{folder}: removed {what}" if command.clear else f"{folder}: {what}")
    if not command.clear and found.files:
        say("--data.cache-gb limits its size; `ropaws cache --clear` removes them.")


@dataclass(frozen=True)
class Datasets:
    """List the named datasets and mixes, or read one and count its images.

    ropaws datasets cifar10+svhn
    """

    name: tyro.conf.Positional[str | None] = None
    """A dataset or mix to read; its official files are downloaded if they are not there."""
    root: Path = Path("data")
    """Folder with the official files."""
    download: bool = True
    """Download what is missing."""


def datasets(arguments: list[str]) -> None:
    command = parse(Datasets, "datasets", arguments)
    if command.name is None:
        _list_datasets(command.root)
        return
    config = DataConfig(
        source=command.name, root=command.root, download=command.download, memory_gb=0.0
    )  # counting needs no pixels: images stay on disk
    corpus = load_corpus(config, watch=watch_files(Terminal(stderr=True)))
    known = int((corpus.train_labels >= 0).sum())
    shape = " x ".join(map(str, corpus.train_images.shape[1:]))
    say(f"{command.name}: {len(corpus.class_names)} classes, images of {shape}")
    print(f"training: {len(corpus.train_labels):,} images, {known:,} of them with a label to grant")
    out = int((corpus.test_labels < 0).sum())
    print(f"test: {len(corpus.test_labels):,} images, {out:,} of them out-of-class")


def _list_datasets(root: Path) -> None:
    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    table.add_column(f"below {root}")
    for name, dataset in DATASETS.items():
        table.add_row(name, dataset.about, "yes" if is_there(dataset, root) else "no")
    for name, mix in MIXES.items():
        parts = [DATASETS[part] for part in (mix.source, *mix.extra)]
        table.add_row(name, mix.about, "yes" if all(is_there(part, root) for part in parts) else "no")
    Terminal().print(table)
    print("Use one with `ropaws train --recipe NAME --data.source DATASET`.")
