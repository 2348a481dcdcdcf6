"""`ropaws train`, `finetune` and `recipes`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from ropaws import recipes as published
from ropaws.analysis.finetune import EPOCHS, RATES
from ropaws.analysis.finetune import finetune as finetune_run
from ropaws.analysis.results import read_evaluation
from ropaws.auto_config import Choice, fit_feature_settings, fit_settings, parse_budget
from ropaws.cli.analyze import write_page
from ropaws.cli.parsing import parse, parse_known
from ropaws.cli.runs import run_of
from ropaws.cli.tables import percent
from ropaws.config import RunConfig, read_config, to_json, with_method
from ropaws.distributed import planned_place
from ropaws.methods import import_method, make_method, method_name
from ropaws.own_data import train_chosen
from ropaws.report.tables import COLUMNS
from ropaws.runs.run import Run
from ropaws.terminal import Terminal, cell, say, say_json
from ropaws.training.train import TrainedRun, resume_run, train_run


@dataclass(frozen=True)
class TrainOptions:
    """What `ropaws train` does; the settings of a run are in RunConfig."""

    recipe: str | None = None
    """A published run to start from; `ropaws recipes` lists them."""
    method: str | None = None
    """Another method than the recipe's, with its own defaults: ropaws, paws, supervised, fixmatch, iomatch,
    simclr ... (`ropaws bench --list` names all), or package.module:Class for a method of your own."""
    out: Path | None = None
    """The run folder; by default runs/RECIPE-METHOD-seedN."""
    labeled: Path | None = None
    """Your own images: a folder with one folder per class, a table of path and label, an .npz ..."""
    unlabeled: tuple[Path, ...] = ()
    """With --labeled: folders of anything, searched recursively, tables of paths, .npz files ..."""
    test: Path | None = None
    """With --labeled: images to test on; classes that --labeled does not have are out-of-class."""
    backbone: str | None = None
    """The network, as --model.backbone: small, wrn-28-2, resnet18, resnet50, efficientnet-lite0,
    timm:NAME ..."""
    init: Path | None = None
    """Weights of the backbone, as --model.init: a .pth or .safetensors file, or pretrained. With --labeled
    they stay as they are, unless --train-backbone is given."""
    train_backbone: bool = False
    """With --labeled: first train a head on frozen features, in OUT/frozen, then the whole network."""
    features: Path | None = None
    """Instead of --labeled: features of your own in an .npz file: features (n, d) and labels (n,), -1 or
    empty for unlabeled rows; views (n, v, d), names, test_features and test_labels if you have them."""
    budget: str | None = None
    """Train for about this long: 90s, 20m, 1.5h. A head on frozen features takes less, and stops then."""
    report: bool = True
    """At the end, analyze the run and write RUN/report.html."""
    resume: Path | None = None
    """Continue an interrupted run; takes no other option but --method and --no-report."""


@dataclass(frozen=True)
class Train:
    """Train a model into a run folder: on your own images, from a recipe or from a config.json.

    ropaws train --labeled photos/labeled --unlabeled photos/pool --out runs/mine

    ropaws train --recipe demo --method paws --train.seed 1 --out runs/mine

    ropaws train runs/mine/config.json --out runs/again     (the config.json comes first)

    ropaws train --resume runs/mine
    """

    options: Annotated[TrainOptions, tyro.conf.arg(name="")]
    run: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")]


def train(arguments: list[str]) -> None:
    """Every argument is parsed once: first what to do, then the settings, whose defaults depend on it."""
    config_file = None
    if arguments and not arguments[0].startswith("-"):
        config_file, *arguments = arguments
    options, left = parse_known(TrainOptions, "train", arguments)
    wants_help = "-h" in left or "--help" in left
    if options.method is not None:
        import_method(options.method)
    if options.resume is not None and not wants_help:
        _resume(options, left, config_file)
        return
    base, choices = _base_config(options, config_file, left, wants_help)
    config = parse(Train, "train", left, default=Train(options, base)).run
    config = _scaled_warmup(base, config, left)
    if options.budget is not None and _given("--train.steps", left):
        raise ValueError("--budget works out the number of steps; leave --train.steps out, or the budget")
    reasons = choices.reasons_beside([*left, *(["--budget"] if options.budget else [])]) if choices else ()
    first = planned_place().rank == 0
    for line in reasons if first else ():
        say(line, error=True)
    budget = None if options.budget is None else parse_budget(options.budget)
    out = _out(options, config)
    if choices is not None:
        trained = train_chosen(choices, config, out, budget=budget, reasons=reasons)
    else:
        trained = train_run(config, out, budget=budget, choices=reasons)
    if first:
        _finish(trained, report=options.report)


def _base_config(
    options: TrainOptions, config_file: str | None, left: Sequence[str], wants_help: bool
) -> tuple[RunConfig, Choice | None]:
    """The settings before those of the command line, and the reasons for them."""
    choices = None if wants_help else _chosen(options, config_file, left)
    base = _named_config(options, config_file, left, wants_help) if choices is None else choices.config
    if options.method is not None and options.method != method_name(base.method):
        base = with_method(base, make_method(options.method))
    if choices is None:
        model = replace(
            base.model,
            backbone=options.backbone or base.model.backbone,
            init=options.init or base.model.init,
        )
        base = replace(base, model=model)
    return base, choices


def _chosen(options: TrainOptions, config_file: str | None, left: Sequence[str]) -> Choice | None:
    """Settings chosen from a person's own images or features, where such are given."""
    named = config_file is not None or options.recipe is not None
    device = _value("--train.device", left) or "auto"
    if options.features is not None:
        others = options.labeled, options.test, options.backbone, options.init
        if named or options.unlabeled or options.train_backbone or any(o is not None for o in others):
            raise ValueError(
                "--features brings data and network; leave --labeled, --unlabeled, --test, --backbone,"
                " --init, --train-backbone, --recipe and config.json out"
            )
        return fit_feature_settings(options.features, device=device)
    if options.labeled is not None:
        if named:
            raise ValueError("--labeled chooses settings itself; leave --recipe and config.json out")
        return fit_settings(
            options.labeled,
            options.unlabeled,
            options.test,
            device=device,
            backbone=options.backbone,
            init=options.init,
            train_backbone=options.train_backbone,
        )
    if options.unlabeled or options.test:
        raise ValueError("--unlabeled and --test go with --labeled, which is not given")
    if options.train_backbone:
        raise ValueError("--train-backbone goes with --labeled; with a recipe the whole network is trained")
    return None


def _named_config(
    options: TrainOptions, config_file: str | None, left: Sequence[str], wants_help: bool
) -> RunConfig:
    if config_file is not None and options.recipe is not None:
        raise ValueError(
            f"start from a config ({config_file}) or from --recipe {options.recipe}, not from both"
        )
    if config_file is not None:
        return read_config(Path(config_file))
    if options.recipe is not None:
        return published.get(options.recipe)
    if wants_help:
        return RunConfig()
    parse(Train, "train", left, default=Train(options, RunConfig()))  # a mistyped option is the better error
    raise ValueError(
        "say what to train: --labeled FOLDER for your own images, --recipe NAME (see `ropaws recipes`),"
        " or a config.json to start from"
    )


def _out(options: TrainOptions, config: RunConfig) -> Path:
    name = options.recipe or ("own" if options.labeled or options.features else "run")
    method = method_name(config.method).replace(":", ".")
    return options.out or Path("runs") / f"{name}-{method}-seed{config.train.seed}"


def _given(option: str, arguments: Sequence[str]) -> bool:
    return any(a == option or a.startswith(f"{option}=") for a in arguments)


def _value(option: str, arguments: Sequence[str]) -> str | None:
    """Of an option that other defaults depend on, before the settings are parsed."""
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}=")
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
    return None


def _scaled_warmup(base: RunConfig, config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """With another number of steps, warm-up keeps its share of them unless it is set too."""
    if config.train.steps == base.train.steps or _given("--optim.warmup", arguments):
        return config
    warmup = round(base.optim.warmup * config.train.steps / base.train.steps)
    return replace(config, optim=replace(config.optim, warmup=warmup))


def _resume(options: TrainOptions, left: Sequence[str], config_file: str | None) -> None:
    others = replace(options, resume=None, method=None, report=True)
    if left or config_file is not None or others != TrainOptions():
        raise ValueError(
            "--resume continues with the settings of the run and takes no other option"
            " but --method and --no-report"
        )
    assert options.resume is not None
    run_of(options.resume, options.method)  # raises an error for another method
    trained = resume_run(options.resume)
    if planned_place().rank == 0:
        _finish(trained, report=options.report)


def _finish(trained: TrainedRun, *, report: bool) -> None:
    """The run is complete at this point: a problem with the report must not hide that."""
    run = trained.path
    say(f"Trained: {run}. Use it with `ropaws predict {run} ...`.", flush=True)
    if not report:
        say(f"See what it learned with `ropaws report {run}`.")
        return
    try:
        write_page(Run(run, corpus=trained.corpus))
    except Exception as error:
        say(f"No report: {error}. Try `ropaws report {run}`.", error=True)


@dataclass(frozen=True)
class Finetune:
    """Fine-tune a run on its labeled images as in the paper, or train a linear probe; then test it.

    Learning rate and epochs are chosen on a fifth of the labeled images, never on test images. The result is
    a run of its own, RUN/finetuned (RUN/linear), with figures in RUN/finetune.json (RUN/linear.json).

    ropaws finetune runs/mine
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    linear: bool = False
    """Leave the network as it is and train a linear layer on it."""
    rates: tuple[float, ...] = RATES
    """Learning rates to choose from."""
    epochs: tuple[int, ...] = EPOCHS
    """Numbers of epochs to choose from."""
    batch: int = 1024
    """Labeled images per step."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


def finetune(arguments: list[str]) -> None:
    command = parse(Finetune, "finetune", arguments)
    if not command.rates or not command.epochs:
        raise ValueError("--rates and --epochs need at least one value each")
    results = finetune_run(
        run_of(command.run, command.method, device=command.device),
        linear=command.linear,
        rates=command.rates,
        epochs=command.epochs,
        batch=command.batch,
    )
    chosen, name = results["chosen"], "linear probe" if command.linear else "fine-tuned"
    say(f"{name}: learning rate {chosen['rate']:g}, {chosen['epochs']} epochs")
    if "accuracy" not in results:
        print("There are no test images, so its accuracy is not known.")
        return
    ways: dict[str, Any] = {"soft nearest neighbors": read_evaluation(command.run), name: results}
    table = Table(title=cell(command.run))
    table.add_column("measure")
    for way in ways:
        table.add_column(way, justify="right")
    for key in ("accuracy", "confidence_in", "confidence_out", "ece", "auroc"):
        if key in results:
            table.add_row(COLUMNS[key], *(percent(way.get(key)) for way in ways.values()))
    Terminal().print(table)


@dataclass(frozen=True)
class Recipes:
    """List the published runs, or show all settings of one."""

    name: tyro.conf.Positional[str | None] = None
    """A recipe to show as JSON."""


def recipes(arguments: list[str]) -> None:
    command = parse(Recipes, "recipes", arguments)
    if command.name is not None:
        say_json(to_json(published.get(command.name)))
        return
    table = Table(show_lines=True)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what to expect, and what it costs")
    for name, recipe in published.RECIPES.items():
        table.add_row(name, " ".join((recipe.__doc__ or "").split()))
    Terminal().print(table)
    print("Train one with `ropaws train --recipe NAME`.")
