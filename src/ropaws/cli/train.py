"""`ropaws train`, `finetune` and `recipes`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

import ropaws
from ropaws.classify.class_prior import checked_class_prior
from ropaws.cli.parsing import HELP_ALL, parse, parse_known, percent, run_of, show_help, wants_help
from ropaws.core.distributed import Rank, joined, planned_place
from ropaws.core.hardware import choose_device
from ropaws.core.terminal import Terminal, cell, say, say_json
from ropaws.methods import import_method, make_method, method_name
from ropaws.methods.pool_calibration import JudgedMethod
from ropaws.report.page import COLUMNS
from ropaws.run.config import RunConfig, read_config, to_json, with_method
from ropaws.run.finetune import EPOCHS, RATES
from ropaws.run.finetune import finetune as finetune_run
from ropaws.run.own_data import Choice, fit_feature_settings, fit_settings, parse_time, train_chosen
from ropaws.run.results import read_evaluation
from ropaws.run.run import Run
from ropaws.run.train import TrainInputs, resume
from ropaws.run.train import train as train_run


@dataclass(frozen=True)
class TrainOptions:
    """What `ropaws train` does; the settings of a run are in RunConfig."""

    recipe: str | None = None
    """A published run; `ropaws recipes` lists them."""
    method: str | None = None
    """The method: ropaws, paws, fixmatch, iomatch ... By default the recipe's; another one brings its own
    defaults. `ropaws bench --list` names all; package.module:Class is a method of your own."""
    out: Path | None = None
    """The run folder; by default runs/RECIPE-METHOD-seedN."""
    labeled: Path | None = None
    """Your images: a folder per class, a table, an .npz ... In a table each row has a path and a label."""
    unlabeled: tuple[Path, ...] = ()
    """Folders of anything, tables of paths, .npz files ... They go with --labeled; folders are searched
    recursively."""
    out_of_class: tuple[Path, ...] = ()
    """Images that you know to belong to no class. They teach which others do not, and so do rows of a table
    of --labeled with True in the column out_of_class."""
    test: Path | None = None
    """Images to test on, like --labeled. Classes that --labeled does not have are out-of-class."""
    backbone: str | None = None
    """The network: auto, dinov2-small, dinov2-small+tiny-vit, efficientnet-lite0, small, timm:NAME ... With
    --labeled, auto is the default: the best pretrained one at hand (`ropaws backbones`). As --model.backbone;
    small, wrn-28-2 and resnet18 train from scratch."""
    init: Path | None = None
    """Its weights: pretrained, or a .pth or .safetensors file. As --model.init; with --labeled they stay as
    they are, unless --train-backbone is given."""
    train_backbone: bool = False
    """Train a head on frozen features, then the whole network. It goes with --labeled; the first run is in
    OUT/frozen."""
    features: Path | None = None
    """Instead of images: features of your own in an .npz file. It has features (n, d) and labels (n,), -1 or
    empty for unlabeled rows; views (n, v, d), names, test_features and test_labels if you have them."""
    budget: str | None = None
    """Train for about this long: 90s, 20m, 1.5h. A head on frozen features takes less, and stops then."""
    class_prior: str | None = None
    """How frequent classes are in the pool: auto, uniform, labels, or numbers 0.7,0.2,0.1. In the order of
    the classes. By default auto on frozen features, else uniform as in the paper."""
    report: bool = True
    """Analyze the run at the end, and write its report.html."""
    resume: Path | None = None
    """Continue an interrupted run. It takes no other option but --method, --timeout and --no-report."""
    timeout: str = "30m"
    """Of several processes: how long one waits for another to join or to answer before it gives up."""


@dataclass(frozen=True)
class Train:
    """Train a model into a run folder: on your own images, from a recipe or from a config.json.

    ropaws train --labeled photos/labeled --unlabeled photos/pool --out runs/mine

    ropaws train --recipe cifar10-25 --out runs/cifar

    ropaws train runs/mine/config.json --out runs/again     (the config.json comes first)

    ropaws train --resume runs/mine
    """

    options: Annotated[TrainOptions, tyro.conf.arg(name="")]
    run: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")]


GROUPS = {
    "data": ("labeled", "unlabeled", "out_of_class", "test", "features"),
    "what to train": ("recipe", "method", "backbone", "init", "train_backbone", "class_prior"),
    "where results go": ("out", "report"),
    "how long": ("budget", "resume"),
}


def train(arguments: list[str]) -> None:
    """Every argument is parsed once: first what to do, then the settings, whose defaults depend on it."""
    if wants_help(arguments):
        show_help(TrainOptions, "train", about=Train.__doc__, groups=GROUPS)
    config_file = None
    if arguments and not arguments[0].startswith("-"):
        config_file, *arguments = arguments
    options, left = parse_known(TrainOptions, "train", arguments)
    wants_all = HELP_ALL in left
    if options.method is not None:
        import_method(options.method)
    if options.resume is not None and not wants_all:
        _resume(options, left, config_file)
        return
    base, choices = _base_config(options, config_file, left, wants_all)
    config = parse(Train, "train", left, default=Train(options, base)).run
    config = _scaled_warmup(base, config, left)
    if options.budget is not None and _given("--train.steps", left):
        raise ValueError("--budget works out the number of steps; leave --train.steps out, or the budget")
    reasons = choices.reasons_beside([*left, *(["--budget"] if options.budget else [])]) if choices else ()
    first = planned_place().rank == 0
    for line in reasons if first else ():
        say(line, error=True)
    budget = None if options.budget is None else parse_time(options.budget)
    out = _out(options, config)
    inputs = TrainInputs()
    with _with_others(options, config.train.device):
        if choices is not None:
            train_chosen(choices, config, out, budget=budget, reasons=reasons, inputs=inputs)
        else:
            train_run(config, out, budget=budget, choices=reasons, inputs=inputs)
    if first:
        _finish(out, inputs, report=options.report)


def _base_config(
    options: TrainOptions, config_file: str | None, left: Sequence[str], wants_all: bool
) -> tuple[RunConfig, Choice | None]:
    """The settings before those of the command line, and the reasons for them."""
    choices = None if wants_all else _chosen(options, config_file, left)
    base = _named_config(options, config_file, left, wants_all) if choices is None else choices.config
    if options.method is not None and options.method != method_name(base.method):
        base = with_method(base, make_method(options.method))
    if options.class_prior is not None:
        base = _with_class_prior(base, options.class_prior)
    if choices is None:
        model = replace(
            base.model,
            backbone=options.backbone or base.model.backbone,
            init=options.init or base.model.init,
        )
        base = replace(base, model=model)
    return base, choices


def _with_class_prior(base: RunConfig, given: str) -> RunConfig:
    if not isinstance(base.method, JudgedMethod):
        raise ValueError(f"--class-prior goes with ropaws and paws; {method_name(base.method)} has none")
    values = given.split(",") if any(character.isdigit() for character in given) else given
    choice: Any = checked_class_prior("--class-prior", values)
    return with_method(base, replace(base.method, class_prior=choice))


def _chosen(options: TrainOptions, config_file: str | None, left: Sequence[str]) -> Choice | None:
    """Settings chosen from a person's own images or features, where such are given."""
    named = config_file is not None or options.recipe is not None
    device = _value("--train.device", left) or "auto"
    if options.features is not None:
        others = options.labeled, options.test, options.backbone, options.init
        several = options.unlabeled or options.out_of_class or options.train_backbone
        if named or several or any(o is not None for o in others):
            raise ValueError(
                "--features brings data and network; leave --labeled, --unlabeled, --out-of-class, --test,"
                " --backbone, --init, --train-backbone, --recipe and config.json out"
            )
        return fit_feature_settings(options.features, device=device)
    if options.labeled is not None:
        if named:
            raise ValueError("--labeled chooses settings itself; leave --recipe and config.json out")
        return fit_settings(
            options.labeled,
            options.unlabeled,
            options.test,
            out_of_class=options.out_of_class,
            device=device,
            backbone=options.backbone,
            init=options.init,
            train_backbone=options.train_backbone,
        )
    if options.unlabeled or options.out_of_class or options.test:
        raise ValueError("--unlabeled, --out-of-class and --test go with --labeled, which is not given")
    if options.train_backbone:
        raise ValueError("--train-backbone goes with --labeled; with a recipe the whole network is trained")
    return None


def _named_config(
    options: TrainOptions, config_file: str | None, left: Sequence[str], wants_all: bool
) -> RunConfig:
    if config_file is not None and options.recipe is not None:
        raise ValueError(
            f"start from a config ({config_file}) or from --recipe {options.recipe}, not from both"
        )
    if config_file is not None:
        return read_config(Path(config_file))
    if options.recipe is not None:
        return ropaws.recipes.get(options.recipe)
    if wants_all:
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
    """The value of an option that other defaults depend on, before the settings are parsed."""
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}=")
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
    return None


def _scaled_warmup(base: RunConfig, config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """Keep the share of warm-up in another number of steps, unless it is set too."""
    if config.train.steps == base.train.steps or _given("--optim.warmup", arguments):
        return config
    warmup = round(base.optim.warmup * config.train.steps / base.train.steps)
    return replace(config, optim=replace(config.optim, warmup=warmup))


def _resume(options: TrainOptions, left: Sequence[str], config_file: str | None) -> None:
    others = replace(options, resume=None, method=None, report=True, timeout=TrainOptions.timeout)
    if left or config_file is not None or others != TrainOptions():
        raise ValueError(
            "--resume continues with the settings of the run and takes no other option"
            " but --method, --timeout and --no-report"
        )
    assert options.resume is not None
    run = run_of(options.resume, options.method)  # raises an error for another method
    inputs = TrainInputs()
    with _with_others(options, run.config.train.device):
        resume(options.resume, inputs=inputs)
    if planned_place().rank == 0:
        _finish(options.resume, inputs, report=options.report)


def _with_others(options: TrainOptions, device: str) -> AbstractContextManager[Rank]:
    """Join the other processes of the run, where a launcher has started several."""
    seconds = parse_time(options.timeout, "--timeout")
    return joined(choose_device(device, planned_place().local_rank), seconds=seconds)


def _finish(run: Path, inputs: TrainInputs, *, report: bool) -> None:
    """The run is complete at this point: a problem with the report must not hide that."""
    say(f"Trained: {run}. Use it with `ropaws predict {run} ...`.", flush=True)
    if not report:
        say(f"See what it learned with `ropaws report {run}`.")
        return
    from ropaws.cli.analyze import write_page  # slow to load

    try:
        write_page(Run(run, corpus=inputs.corpus))
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
        say_json(to_json(ropaws.recipes.get(command.name)))
        return
    table = Table(show_lines=True)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what to expect, and what it costs")
    for name, recipe in ropaws.recipes.RECIPES.items():
        table.add_row(name, " ".join((recipe.__doc__ or "").split()))
    Terminal().print(table)
    print("Train one with `ropaws train --recipe NAME`.")
