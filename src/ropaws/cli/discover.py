"""`ropaws discover`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from ropaws.cli.parsing import parse, run_of
from ropaws.cli.train import train
from ropaws.core.files import refuse_link
from ropaws.core.run_layout import NEW_CLASSES
from ropaws.core.terminal import Terminal, cell, say
from ropaws.run.discover import (
    GROUPS,
    PAGE,
    Discovery,
    accept,
    as_typed,
    write_discovery,
)
from ropaws.run.manifest import check_target
from ropaws.run.results import NewClassFigures
from ropaws.run.run import POOL

NAMED = 3  # typical images of a group in the table


@dataclass(frozen=True)
class Discover:
    """Look for new classes: groups among the images that belong to none of your classes.

    Then name groups, and train with them as classes: the most typical images of each get its label.

    ropaws discover runs/mine

    ropaws discover runs/mine --accept 2=handbag 5=boot --train runs/more
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    sources: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Images to look at: folders, tables, .npz files. By default the unlabeled pool of the run."""
    groups: int | None = None
    """How many groups; by default as many kinds as there seem to be."""
    threshold: float | None = None
    """In-domain probability below which an image is out-of-class; by default the run's."""
    out: Path | None = None
    """Folder for groups.csv, groups.html and labels.csv; by default RUN/new-classes."""
    accept: tuple[str, ...] = ()
    """Make classes of groups: NUMBER=NAME, as groups.csv has them. Writes labels.csv, all that training knows
    and the new labels, which `ropaws train --labeled` takes. Rows of groups.csv may be edited before."""
    per_class: int | None = None
    """With --accept: images per group that get the label; by default as many as the known class with the most
    labels has."""
    train: Path | None = None
    """With --accept: also train on these labels, into this run folder."""
    pool: int = POOL
    """Of the run's own pool: images to look at, at most; 0 for all."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


def discover(arguments: list[str]) -> None:
    command = parse(Discover, "discover", arguments)
    named = _named(command)
    run = run_of(command.run, command.method, pool=command.pool, device=command.device)
    out = _folder(command)
    # Groups are named by what a person has seen of them: the table of an earlier call, which may be edited.
    if not named or command.groups is not None or not (out / GROUPS).exists():
        found = run.discover(command.sources, groups=command.groups, threshold=command.threshold)
        write_discovery(run, found, out, command.sources)
        _show(found, out, command)
    if not named:
        return
    accepted = accept(run, out, named, per_class=command.per_class, sources=command.sources)
    counts = ", ".join(f"{name} {count}" for name, count in accepted.counts.items())
    say(f"Labels: {counts}. Written: {accepted.path}")
    if command.train is None:
        say(f"Train with them: {as_typed([*accepted.command, '--out', f'{command.run}-more'])}")
        return
    train([*accepted.command[1:], "--out", str(command.train)])


def _folder(command: Discover) -> Path:
    if command.out is not None:
        if not command.out.absolute().parent.is_dir():
            raise FileNotFoundError(f"--out: no folder {command.out.parent}; create it first")
        if command.out.exists() and not command.out.is_dir():
            raise NotADirectoryError(f"--out: {command.out} is a file; name a folder")
        return command.out
    if command.sources:
        raise ValueError("--out: name a folder for the groups of images that are not the run's own pool")
    refuse_link(command.run / NEW_CLASSES)
    return command.run / NEW_CLASSES


def _named(command: Discover) -> dict[int, str]:
    """The classes by number of their group."""
    found: dict[int, str] = {}
    for given in command.accept:
        number, separator, name = given.partition("=")
        if not separator or not number.strip().isdecimal() or not name.strip():
            raise ValueError(f"--accept must be NUMBER=NAME, such as 2=handbag, got {given}")
        if int(number) in found:
            raise ValueError(f"--accept names group {int(number)} twice; name it once")
        found[int(number)] = name
    for option, value in (("--train", command.train), ("--per-class", command.per_class)):
        if value is not None and not found:
            raise ValueError(f"{option} goes with --accept, which is not given")
    if command.train is not None:
        check_target(command.train)
    return found


def _show(found: Discovery, out: Path, command: Discover) -> None:
    if not found.groups:
        say(
            f"No group among the {found.out_of_class:,} out-of-class images of {found.images:,} is large and"
            " alike enough to be a class; --groups N makes N groups all the same"
        )
        return
    Terminal().print(groups_table([group.figures() for group in found.groups]))
    kinds = "kind" if len(found.groups) == 1 else "kinds"
    how = "as asked for" if command.groups is not None else "estimated"
    say(
        f"{len(found.groups)} {kinds} ({how}) among {found.out_of_class:,} out-of-class images of"
        f" {found.images:,}"
    )
    say(f"Look at them: {out / PAGE}")
    if not command.accept:
        words = ["discover", str(command.run), *map(str, command.sources)]
        words += [] if command.out is None else ["--out", str(command.out)]
        say(f"Make a class of one: {as_typed([*words, '--accept', '1=NAME'])}")


def groups_table(groups: Sequence[NewClassFigures]) -> Table:
    table = Table(title="Likely new classes")
    table.add_column("group", justify="right")
    table.add_column("images", justify="right")
    table.add_column("looks most like")
    table.add_column("typical images", overflow="fold")
    for group in groups:
        nearest = f"{group['nearest']} ({group['nearest_share']:.0%})"
        names = ", ".join(name.rsplit("/", 1)[-1] for name in group["names"][:NAMED])
        table.add_row(str(group["group"]), f"{group['size']:,}", cell(nearest), cell(names))
    return table
