"""Command line: parse, call, print."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ropaws import recipes
from ropaws.analysis_commands import run_compare, run_evaluate, run_report, run_suggest
from ropaws.config import RunConfig, make_method, method_name, read_config, to_json
from ropaws.data.check import check_data
from ropaws.data.listing import list_unlabeled, merge
from ropaws.data.named import DATASETS, is_there
from ropaws.data.sources import DataConfig, load_corpus
from ropaws.data.uncurated import MIXES
from ropaws.folder import EVALUATION
from ropaws.labeling import load_predictor
from ropaws.labels_file import PredictSettings, check_target, label_files
from ropaws.launch import planned_place
from ropaws.models import ModelConfig
from ropaws.naming import nearest
from ropaws.options import Check, Datasets, Finetune, Predict, Recipes, Train, check_flags, parse
from ropaws.own_data import Choice, fit_settings, parse_budget
from ropaws.report.tables import COLUMNS
from ropaws.run import TrainingStopped, resume, train
from ropaws.training.checkpoint import read_json, write_json
from ropaws.training.loop import TrainingDivergedError
from ropaws.training.progress import watch_files
from ropaws.tuning import finetune

OVERVIEW = """usage: ropaws COMMAND [options]

Robust semi-supervised learning from a few labels and an uncurated pile of images.

commands:
  demo       compare supervised, PAWS and RoPAWS on embedded images: a table and a page
  check      look at your own pictures before training
  train      train a model; every setting is an option
  evaluate   analyse a trained run: accuracy, calibration, out-of-class, propagation, baselines
  report     show a run on one page
  compare    put runs side by side
  suggest    say which unlabelled images are most worth a label
  finetune   fine-tune a trained run on its labels, or train a linear probe
  predict    label pictures with a trained run, and tell which belong to no class
  datasets   list the named datasets and mixes, or get and count one
  recipes    list the published runs, or show one

`ropaws COMMAND --help` explains a command."""


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
        "check": _check,
        "train": _train,
        "evaluate": run_evaluate,
        "report": run_report,
        "compare": run_compare,
        "suggest": run_suggest,
        "finetune": _finetune,
        "predict": _predict,
        "datasets": _datasets,
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

    check_flags(arguments, Demo)
    run_demo(parse(Demo, "demo", arguments), Console())


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _train(arguments: list[str]) -> None:
    early = _OneLineParser(add_help=False, allow_abbrev=False)
    for name in (
        "--recipe", "--method", "--resume", "--labeled", "--test", "--train.device", "--backbone", "--init",
    ):  # fmt: skip
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
        base, choices = choice.config, choice.reasons_beside(arguments)
    elif (chosen.unlabeled or chosen.test) and not wants_help:
        raise ValueError("--unlabeled and --test go with --labeled, which is not given")
    else:
        base = _base_config(first, chosen.recipe, wants_help)
    if chosen.method is not None and chosen.method != method_name(base.method):
        base = replace(base, method=make_method(chosen.method))
    base = replace(base, model=_chosen_model(base.model, chosen))
    check_flags(arguments, Train, base)
    command = parse(Train, "train", arguments, default=Train(run=base))
    if command.config is not None and first is None:
        raise ValueError(
            f"stray argument {str(command.config)!r}; a config.json comes first, before the options"
        )
    config = _scaled_warmup(base, command.run, arguments)
    if command.budget is not None and _given("--train.steps", arguments):
        raise ValueError("--budget works out the number of steps; leave --train.steps out, or the budget")
    name = chosen.recipe or ("own" if chosen.labeled else "run")
    out = command.out or Path("runs") / f"{name}-{method_name(config.method)}-seed{config.train.seed}"
    budget = None if command.budget is None else parse_budget(command.budget)
    speaks = planned_place().rank == 0
    for line in choices if speaks else ():
        print(line, file=sys.stderr)
    run = train(config, out, budget=budget, choices=choices)
    if speaks:
        _say_trained(run, report=command.report)


def _given(option: str, arguments: Sequence[str]) -> bool:
    return any(a == option or a.startswith(f"{option}=") for a in arguments)


def _scaled_warmup(base: RunConfig, config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """With another number of steps, warm-up keeps its share of them unless it is set too."""
    if config.train.steps == base.train.steps or _given("--optim.warmup", arguments):
        return config
    warmup = round(base.optim.warmup * config.train.steps / base.train.steps)
    return replace(config, optim=replace(config.optim, warmup=warmup))


def _say_trained(run: Path, *, report: bool) -> None:
    """The run is complete at this point: what goes wrong with the report takes nothing from it."""
    print(f"Trained: {run}. Use it with `ropaws predict {run} ...`.", flush=True)
    if not report:
        print(f"See what it learned with `ropaws report {run}`.")
        return
    try:
        run_report([str(run)])
    except Exception as error:
        print(f"No report: {error}. Try `ropaws report {run}`.", file=sys.stderr)


def _chosen_model(model: ModelConfig, chosen: argparse.Namespace) -> ModelConfig:
    """--backbone and --init, for short."""
    return replace(
        model,
        backbone=chosen.backbone or model.backbone,
        init=model.init if chosen.init is None else Path(chosen.init),
    )


def _fit_settings(chosen: argparse.Namespace) -> Choice:
    return fit_settings(
        Path(chosen.labeled),
        tuple(Path(source) for source in chosen.unlabeled),
        None if chosen.test is None else Path(chosen.test),
        device=getattr(chosen, "train.device") or "auto",
        backbone=chosen.backbone,
        init=None if chosen.init is None else Path(chosen.init),
    )


def _resume(run: Path, arguments: list[str]) -> None:
    if len(arguments) > (1 if any(a.startswith("--resume=") for a in arguments) else 2):
        raise ValueError("--resume goes on with the settings of the run and takes no other option")
    resume(run)
    if planned_place().rank == 0:
        _say_trained(run, report=True)


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


def _finetune(arguments: list[str]) -> None:
    check_flags(arguments, Finetune)
    command = parse(Finetune, "finetune", arguments)
    if not command.rates or not command.epochs:
        raise ValueError("--rates and --epochs need at least one value each")
    results = finetune(
        command.run,
        linear=command.linear,
        rates=command.rates,
        epochs=command.epochs,
        batch=command.batch,
        device=command.device,
    )
    chosen, name = results["chosen"], "linear probe" if command.linear else "fine-tuned"
    print(f"{name}: learning rate {chosen['rate']:g}, {chosen['epochs']} epochs")
    tested = command.run / EVALUATION
    ways = {"soft nearest neighbour": read_json(tested) if tested.exists() else {}, name: results}
    table = Table(title=str(command.run))
    table.add_column("measure")
    for way in ways:
        table.add_column(way, justify="right")
    for key in ("accuracy", "confidence_in", "confidence_out", "ece"):
        if key in results:
            cells = (f"{100 * way[key]:.1f} %" if key in way else "-" for way in ways.values())
            table.add_row(COLUMNS[key], *cells)
    Console().print(table)


def _check(arguments: list[str]) -> None:
    check_flags(arguments, Check)
    command = parse(Check, "check", arguments)
    if command.json is not None and not command.json.parent.is_dir():
        raise FileNotFoundError(f"--json: no folder {command.json.parent}; make it first")
    watch = watch_files(Console(stderr=True))
    findings = check_data(command.labeled, command.unlabeled, command.test, watch=watch)
    table = Table(title=f"Pictures; the typical shorter side is {findings.typical_side:.0f} px")
    table.add_column("class")
    table.add_column("labelled", justify="right")
    table.add_column("test", justify="right")
    for name in sorted(findings.classes | findings.test):
        table.add_row(escape(name), f"{findings.classes.get(name, 0):,}", f"{findings.test.get(name, 0):,}")
    table.add_row("(unlabelled)", f"{findings.unlabeled:,}", "")
    Console().print(table)
    for line in findings.warnings() or ["Nothing to mend was found."]:
        print(line)
    if command.json is not None:
        write_json(command.json, findings.to_json())


def _predict(arguments: list[str]) -> None:
    check_flags(arguments, Predict)
    command = parse(Predict, "predict", arguments)
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
    pictures = merge([list_unlabeled(source) for source in command.sources]).pictures
    predictor = load_predictor(
        command.run, threshold=command.threshold, propagate=command.propagate, device=command.device
    )
    summary = label_files(predictor, pictures, settings, Console(stderr=True))
    table = Table(title=f"{summary.labelled:,} pictures in {command.out}")
    table.add_column("label")
    table.add_column("pictures", justify="right")
    for label, count in summary.counts.items():
        table.add_row(escape(label), f"{count:,}")
    Console().print(table)
    if summary.unreadable:
        print(
            f"{len(summary.unreadable)} unreadable pictures are listed in {command.out}.json", file=sys.stderr
        )


def _datasets(arguments: list[str]) -> None:
    check_flags(arguments, Datasets)
    command = parse(Datasets, "datasets", arguments)
    if command.name is None:
        table = Table()
        table.add_column("name", no_wrap=True)
        table.add_column("what it is")
        table.add_column(f"below {command.root}")
        for name, dataset in DATASETS.items():
            table.add_row(name, dataset.about, "yes" if is_there(dataset, command.root) else "no")
        for name, mix in MIXES.items():
            parts = [DATASETS[part] for part in (mix.source, *mix.extra)]
            ready = all(is_there(part, command.root) for part in parts)
            table.add_row(name, mix.about, "yes" if ready else "no")
        Console().print(table)
        print("Use one with `ropaws train --recipe NAME --data.source DATASET`.")
        return
    config = DataConfig(
        source=command.name, root=command.root, download=command.download, memory_gb=0.0
    )  # counting needs no pixels: pictures stay on disk
    corpus = load_corpus(config, watch=watch_files(Console(stderr=True)))
    known = int((corpus.train_labels >= 0).sum())
    shape = " x ".join(map(str, corpus.train_images.shape[1:]))
    print(f"{command.name}: {len(corpus.class_names)} classes, images of {shape}")
    print(f"training: {len(corpus.train_labels):,} images, {known:,} of them with a label to grant")
    out = int((corpus.test_labels < 0).sum())
    print(f"test: {len(corpus.test_labels):,} images, {out:,} of them out-of-class")


def _recipes(arguments: list[str]) -> None:
    check_flags(arguments, Recipes)
    command = parse(Recipes, "recipes", arguments)
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
