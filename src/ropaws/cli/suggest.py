"""`ropaws suggest` and `discover`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from ropaws.cli.parsing import parse, percent, refuse_images, run_of
from ropaws.cli.train import train
from ropaws.core.files import check_out_folder, refuse_link, replacing, write_json
from ropaws.core.run_layout import NEW_CLASSES
from ropaws.core.terminal import Terminal, cell, say, shown_path
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.embedder import Embedder
from ropaws.insight.suggestions import OURS, STRATEGIES
from ropaws.pool.listing import write_csv
from ropaws.run.discover import (
    GROUPS,
    PAGE,
    Discovery,
    accept,
    as_typed,
    write_discovery,
)
from ropaws.run.manifest import check_target
from ropaws.run.results import NewClassFigures, Suggestion
from ropaws.run.run import POOL
from ropaws.run.suggest import FIRST, SUGGESTIONS, SuggestionLists, find_first, suggest_and_keep


@dataclass(frozen=True)
class Suggest:
    """Which unlabeled images are most worth a label, best first, and why.

    Of a run, or, before anything is trained, of a folder of images with a few labels or none.

    ropaws suggest runs/mine --n 50 --out next.csv
    ropaws suggest --unlabeled photos/pool --n 20
    """

    run: tyro.conf.Positional[Path | None] = None
    """A run folder."""
    unlabeled: tuple[Path, ...] = ()
    """Instead of a run: folders, searched recursively, images, tables of paths, .npz files, datasets."""
    labeled: tuple[Path, ...] = ()
    """With --unlabeled, if some are labeled already: folders with one folder per class, tables ..."""
    n: int | None = None
    """How many; by default 50 of a run, 20 of a folder."""
    new_classes: int = 5
    """Likely new classes to list besides, at most; `ropaws discover` has all of them."""
    out: Path | None = None
    """Also write the suggestions to a .csv or .json file."""
    strategy: str = OURS
    """coverage; or another way, to compare: random, gated-random, k-means, typiclust, probcover, margin,
    coreset."""
    pool: int = POOL
    """Of a run: unlabeled images to choose from, at most; 0 for all."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    backbone: str | None = None
    """With --unlabeled: auto (the default: the best at hand), a name of `ropaws backbones` (several
    joined by +), or timm:NAME."""
    init: Path = PRETRAINED
    """With --unlabeled: its weights: pretrained, or a .pth or .safetensors file."""
    cache: Path | None = None
    """With --unlabeled: folder that keeps features for later; by default ~/.cache/ropaws/features."""
    device: str | None = None
    """Where to compute; by default as the run was trained, or the fastest there is."""


def suggest(arguments: list[str]) -> None:
    command = parse(Suggest, "suggest", arguments)
    _check(command)
    found = _of_run(command, command.run) if command.run is not None else _of_images(command)
    if not found.suggestions:
        say("There is no unlabeled image to suggest.")
        return
    if command.out is not None:
        _write(command.out, found.suggestions, command.run is not None or bool(command.labeled))
    console = Terminal()
    where = command.run or " ".join(map(str, command.unlabeled))
    any_label = command.run is not None or bool(command.labeled)
    console.print(_table(f"Most worth a label in {where}", found.suggestions, any_label))
    if any_label:
        expected = sum(item["in_domain"] for item in found.suggestions)
        say(f"Expected to belong to a class: {expected:.1f} of {len(found.suggestions)}")
    else:
        say("Without a label, nothing tells yet which images belong to a class.")
    if found.new_classes:
        console.print(groups_table(found.new_classes[: command.new_classes]))
    if command.out is not None:
        say(f"Written: {command.out}")


def _check(command: Suggest) -> None:
    """Raise an error for what does not fit together, before anything is computed."""
    if (command.run is None) == (not command.unlabeled):
        raise ValueError(
            "name a run folder, or images with --unlabeled, not both:"
            " ropaws suggest runs/mine, ropaws suggest --unlabeled photos/pool"
        )
    if command.run is not None:
        refuse_images(command.run)
    if command.run is not None and command.labeled:
        raise ValueError("--labeled goes with --unlabeled; a run knows its labels")
    if command.new_classes < 0:
        raise ValueError(f"--new-classes must be at least 0 (none), got {command.new_classes}")
    if command.strategy not in (OURS, *STRATEGIES):
        raise ValueError(
            f"--strategy must be one of {', '.join((OURS, *STRATEGIES))}, got {command.strategy}"
        )
    if command.out is not None and command.out.suffix not in (".csv", ".json"):
        raise ValueError(f"--out must end in .csv or .json, got {command.out}")
    if command.out is not None:
        check_out_folder(command.out.parent)


def _of_run(command: Suggest, path: Path) -> SuggestionLists:
    run = run_of(path, command.method, pool=command.pool, device=command.device)
    count = SUGGESTIONS if command.n is None else command.n
    return suggest_and_keep(run, count, new=command.new_classes > 0, strategy=command.strategy)


def _of_images(command: Suggest) -> SuggestionLists:
    embedder = Embedder(
        command.backbone, init=command.init, cache=command.cache, device=command.device or "auto"
    )
    return find_first(
        command.unlabeled,
        command.labeled,
        embedder,
        FIRST if command.n is None else command.n,
        new=command.new_classes > 0,
        strategy=command.strategy,
    )


def _table(title: str, found: Sequence[Suggestion], any_label: bool) -> Table:
    table = Table(title=cell(title))
    table.add_column("", justify="right")
    table.add_column("image", overflow="fold")
    table.add_column("P(in-class)", justify="right")
    table.add_column("stands for", justify="right")
    table.add_column("why")
    for item in found:
        figures = percent(item["in_domain"] if any_label else None), f"{item['stands_for']:,}"
        cells = (str(item["rank"]), shown_path(item["name"]), *figures, item["reason"])
        table.add_row(*map(cell, cells))
    return table


def _write(out: Path, suggestions: Sequence[Suggestion], any_label: bool) -> None:
    """Write the suggestions; without a label nothing is known of classes, and nothing is written of them."""
    unknown = () if any_label else ("kind", "in_domain")
    found = [{k: v for k, v in item.items() if k not in unknown} for item in suggestions]
    if out.suffix == ".json":
        write_json(out, found)
        return
    with replacing(out) as temporary:
        write_csv(temporary, found)


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
