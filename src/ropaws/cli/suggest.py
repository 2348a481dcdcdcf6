"""`ropaws suggest`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from ropaws.cli.discover import groups_table
from ropaws.cli.parsing import parse, percent, refuse_images, run_of
from ropaws.core.files import check_out_folder, replacing, write_json
from ropaws.core.terminal import Terminal, cell, say, shown_path
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.embedder import Embedder
from ropaws.insight.label_choice import STRATEGIES
from ropaws.insight.suggestions import OURS
from ropaws.pool.listing import write_csv
from ropaws.run.results import Suggestion
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
