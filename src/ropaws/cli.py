"""Command line: parse, call, print."""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from ropaws import recipes
from ropaws.config import RunConfig, make_method, method_name, read_config, to_json
from ropaws.data.files import merge
from ropaws.data.listing import list_unlabeled
from ropaws.labeling import load_predictor
from ropaws.labels_file import PredictSettings, check_target, label_files
from ropaws.naming import nearest
from ropaws.own_data import Choice, fit_settings, parse_budget
from ropaws.report.tables import COLUMNS
from ropaws.run import TrainingStopped, evaluate, resume, train
from ropaws.training.loop import TrainingDivergedError

Command = TypeVar("Command")

OVERVIEW = """usage: ropaws COMMAND [options]

Robust semi-supervised learning from a few labels and an uncurated pile of images.

commands:
  demo       compare supervised, PAWS and RoPAWS on embedded images: a table and a page
  train      train a model; every setting is an option
  evaluate   test a trained run
  predict    label pictures with a trained run, and tell which belong to no class
  recipes    list the published runs, or show one

`ropaws COMMAND --help` explains a command."""


@dataclass(frozen=True)
class Train:
    """Train a model into a run folder: on your own pictures, from a recipe or from a config.json.

    ropaws train --labeled photos/labeled --unlabeled photos/pile --out runs/mine

    ropaws train --recipe demo --method paws --train.seed 1 --out runs/mine

    ropaws train runs/mine/config.json --out runs/again

    ropaws train --resume runs/mine
    """

    run: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")]
    config: tyro.conf.Positional[Path | None] = None
    """A config.json to repeat, perhaps with changes; comes first."""
    recipe: str | None = None
    """A published run to start from; `ropaws recipes` lists them."""
    method: str | None = None
    """Another method than the recipe's, with its own defaults: supervised, paws or ropaws."""
    out: Path | None = None
    """The run folder; by default runs/RECIPE-METHOD-seedN."""
    labeled: Path | None = None
    """Your own pictures: a folder with a folder for each class, or a table of path and label."""
    unlabeled: tuple[Path, ...] = ()
    """With --labeled: folders of anything, walked to the bottom, or tables of paths."""
    test: Path | None = None
    """With --labeled: pictures to test on; classes that --labeled does not have are out-of-class."""
    budget: str | None = None
    """Train for about this long: 90s, 20m, 1.5h."""
    resume: Path | None = None
    """Go on with an interrupted run; takes no other option."""


@dataclass(frozen=True)
class Evaluate:
    """Test a run on the test images of its data; also written to RUN/evaluation.json."""

    run: tyro.conf.Positional[Path]
    """A run folder."""
    device: str | None = None
    """Where to compute; by default as the run was trained: auto, cpu, cuda ..."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Predict:
    """Label pictures with a trained run: class, confidence, and whether they belong to any class.

    ropaws predict runs/mine photos/pile --out labels.csv
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Folders, walked to the bottom, pictures, or tables of paths."""
    out: Path
    """The table to write: .csv, .jsonl or .parquet. Facts about it go to OUT.json beside it."""
    threshold: float | None = None
    """In-domain probability below which a picture is out-of-class; by default from the labelled pictures."""
    top: int | None = None
    """Only the most likely classes, instead of a column for each."""
    propagate: bool = False
    """Let the pictures vote for one another, a batch at a time: better labels from a large pile."""
    copy_to: Path | None = None
    """Also copy the pictures there, into a folder for each class and one for out-of-class."""
    move_to: Path | None = None
    """Move them instead."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


@dataclass(frozen=True)
class Recipes:
    """List the published runs, or show all settings of one."""

    name: tyro.conf.Positional[str | None] = None
    """A recipe to show as JSON."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `ropaws`. Bad input: one line and exit code 2. Stopped by the user: 130."""
    # Libraries announce their own plans on stderr; a user of the command line can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError, TrainingDivergedError) as error:
        if os.environ.get("ROPAWS_DEBUG"):
            raise
        _fail(" ".join(str(error).split()), 2)
    except TrainingStopped as stop:
        _fail(str(stop), 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    print(f"ropaws: {message}", file=sys.stderr)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> None:
    commands: dict[str, Callable[[list[str]], None]] = {
        "demo": _demo,
        "train": _train,
        "evaluate": _evaluate,
        "predict": _predict,
        "recipes": _recipes,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW)
        return
    if arguments[0] == "--version":
        from ropaws import __version__

        print(f"ropaws {__version__}")
        return
    name, *rest = arguments
    if name not in commands:
        raise ValueError(
            f"unknown command {name!r}, did you mean {nearest(name, commands)!r}? See `ropaws --help`"
        )
    commands[name](rest)


def _demo(arguments: list[str]) -> None:
    from ropaws.demo import Demo, run_demo  # loads matplotlib, which the other commands do without

    _check_flags(arguments, Demo)
    run_demo(_parse(Demo, "demo", arguments), Console())


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _train(arguments: list[str]) -> None:
    early = _OneLineParser(add_help=False, allow_abbrev=False)
    for name in ("--recipe", "--method", "--resume", "--labeled", "--test", "--train.device"):
        early.add_argument(name)
    early.add_argument("--unlabeled", nargs="+", default=())
    chosen, _ = early.parse_known_args(arguments)
    wants_help = "-h" in arguments or "--help" in arguments
    if chosen.resume is not None and not wants_help:
        _resume(Path(chosen.resume), arguments)
        return
    first = arguments[0] if arguments and not arguments[0].startswith("-") else None
    choices: tuple[str, ...] = ()
    if chosen.labeled is not None and not wants_help:
        if first is not None or chosen.recipe is not None:
            raise ValueError("--labeled chooses settings itself; leave --recipe and config.json out")
        choice = _fit_settings(chosen)
        base, choices = choice.config, choice.reasons
    elif (chosen.unlabeled or chosen.test) and not wants_help:
        raise ValueError("--unlabeled and --test go with --labeled, which is not given")
    else:
        base = _base_config(first, chosen.recipe, wants_help)
    if chosen.method is not None and chosen.method != method_name(base.method):
        base = replace(base, method=make_method(chosen.method))
    _check_flags(arguments, Train, base)
    command = _parse(Train, "train", arguments, default=Train(run=base))
    if command.config is not None and first is None:
        raise ValueError(
            f"stray argument {str(command.config)!r}; a config.json comes first, before the options"
        )
    config = command.run
    name = chosen.recipe or ("own" if chosen.labeled else "run")
    out = command.out or Path("runs") / f"{name}-{method_name(config.method)}-seed{config.train.seed}"
    budget = None if command.budget is None else parse_budget(command.budget)
    for line in choices:
        print(line, file=sys.stderr)
    run = train(config, out, budget=budget, choices=choices)
    print(f"Trained: {run}. Test it with `ropaws evaluate {run}`.")


def _fit_settings(chosen: argparse.Namespace) -> Choice:
    return fit_settings(
        Path(chosen.labeled),
        tuple(Path(source) for source in chosen.unlabeled),
        None if chosen.test is None else Path(chosen.test),
        device=getattr(chosen, "train.device") or "auto",
    )


def _resume(run: Path, arguments: list[str]) -> None:
    if len(arguments) > (1 if any(a.startswith("--resume=") for a in arguments) else 2):
        raise ValueError("--resume goes on with the settings of the run and takes no other option")
    resume(run)
    print(f"Trained: {run}. Test it with `ropaws evaluate {run}`.")


def _base_config(config: str | None, recipe: str | None, wants_help: bool) -> RunConfig:
    if config is not None and recipe is not None:
        raise ValueError(f"start from a config ({config}) or from --recipe {recipe}, not from both")
    if config is not None:
        return read_config(Path(config))
    if recipe is not None:
        return recipes.get(recipe)
    if wants_help:
        return RunConfig()
    raise ValueError(
        "say what to train: --labeled FOLDER for your own pictures, --recipe NAME (see `ropaws recipes`),"
        " or a config.json to start from"
    )


def _evaluate(arguments: list[str]) -> None:
    _check_flags(arguments, Evaluate)
    command = _parse(Evaluate, "evaluate", arguments)
    results = evaluate(command.run, device=command.device)
    if command.json:
        print(json.dumps(results, indent=2))
        return
    table = Table(title=str(command.run))
    table.add_column("measure")
    table.add_column("value", justify="right")
    for key, name in COLUMNS.items():
        if key in results:
            table.add_row(name, f"{results[key]:.1f}" if key == "seconds" else f"{100 * results[key]:.1f} %")
    Console().print(table)


def _predict(arguments: list[str]) -> None:
    _check_flags(arguments, Predict)
    command = _parse(Predict, "predict", arguments)
    if command.top is not None and command.top < 1:
        raise ValueError(f"--top must be at least 1, got {command.top}")
    if command.copy_to is not None and command.move_to is not None:
        raise ValueError("--copy-to and --move-to exclude each other")
    settings = PredictSettings(
        out=command.out,
        top=command.top,
        sort_into=command.copy_to or command.move_to,
        move=command.move_to is not None,
    )
    check_target(command.out)
    paths = merge([list_unlabeled(source) for source in command.sources]).paths
    predictor = load_predictor(
        command.run, threshold=command.threshold, propagate=command.propagate, device=command.device
    )
    summary = label_files(predictor, paths, settings, Console(stderr=True))
    table = Table(title=f"{summary.labelled:,} pictures in {command.out}")
    table.add_column("label")
    table.add_column("pictures", justify="right")
    for label, count in summary.counts.items():
        table.add_row(label, f"{count:,}")
    Console().print(table)
    if summary.unreadable:
        print(
            f"{len(summary.unreadable)} unreadable pictures are listed in {command.out}.json", file=sys.stderr
        )


def _recipes(arguments: list[str]) -> None:
    _check_flags(arguments, Recipes)
    command = _parse(Recipes, "recipes", arguments)
    if command.name is not None:
        print(json.dumps(to_json(recipes.get(command.name)), indent=2))
        return
    table = Table(show_lines=True)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what to expect, and what it costs")
    for name, recipe in recipes.RECIPES.items():
        table.add_row(name, " ".join((recipe.__doc__ or "").split()))
    Console().print(table)
    print("Train one with `ropaws train --recipe NAME`.")


def _parse(
    command: type[Command], name: str, arguments: Sequence[str], default: Command | None = None
) -> Command:
    """Options as a dataclass; what tyro says of a bad one in a box becomes one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if default is None:
                return tyro.cli(command, prog=f"ropaws {name}", args=arguments)
            return tyro.cli(command, prog=f"ropaws {name}", args=arguments, default=default)
    except SystemExit as end:
        if not end.code:
            raise
        inside = [line.strip("│ ") for line in said.getvalue().splitlines() if line.startswith("│")]
        message = list(itertools.takewhile(lambda line: not line.startswith("──"), inside))
        raise ValueError(
            re.sub(r"^Error parsing [A-Z\w.]+: ", "", " ".join(message)) or said.getvalue()
        ) from None


def _check_flags(arguments: Sequence[str], command: type, base: RunConfig | None = None) -> None:
    """One line with the nearest true name for an unknown option, before the parser sees it."""
    known = {"-h", "--help", *_flags(command, "--")}
    for section in () if base is None else dataclasses.fields(base):
        known |= _flags(type(getattr(base, section.name)), f"--{section.name}.")
    for argument in arguments:
        name = argument.split("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            raise ValueError(f"unknown option {name}, did you mean {nearest(name, sorted(known))}?")


def _flags(settings: type, prefix: str) -> set[str]:
    """The options that tyro makes of a dataclass's fields."""
    flags = set()
    for field in dataclasses.fields(settings):
        if "Positional" not in str(field.type):
            name = field.name.replace("_", "-")
            flags |= {f"{prefix}{name}", f"{prefix}no-{name}"} if field.type is bool else {f"{prefix}{name}"}
    return flags
