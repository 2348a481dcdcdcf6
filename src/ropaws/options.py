"""What can be typed after each command: dataclasses, parsed by tyro, with errors of one line."""

import contextlib
import dataclasses
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from ropaws.config import RunConfig
from ropaws.material import POOL
from ropaws.naming import nearest
from ropaws.tuning import EPOCHS, RATES

Command = TypeVar("Command")


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
    """Your own pictures: a folder with a folder for each class, a table of path and label, an .npz ..."""
    unlabeled: tuple[Path, ...] = ()
    """With --labeled: folders of anything, walked to the bottom, tables of paths, .npz files ..."""
    test: Path | None = None
    """With --labeled: pictures to test on; classes that --labeled does not have are out-of-class."""
    backbone: str | None = None
    """The network, as --model.backbone: small, wrn-28-2, resnet18, resnet50, timm:NAME ..."""
    init: Path | None = None
    """Weights that the backbone starts from, as --model.init: a .pth or .safetensors file."""
    budget: str | None = None
    """Train for about this long: 90s, 20m, 1.5h."""
    report: bool = True
    """At the end, analyse the run and write RUN/report.html."""
    resume: Path | None = None
    """Go on with an interrupted run; takes no other option."""


@dataclass(frozen=True)
class Evaluate:
    """Analyse a run: accuracy, calibration, detection, label propagation, baselines, the pile, its labels.

    Written to RUN/evaluation.json and RUN/pictures.json, from which `ropaws report` makes a page. Embeddings
    are kept in RUN/embeddings.safetensors, so that a second call is quick and needs no images.

    ropaws evaluate runs/mine --only soft-nn propagation
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    only: tuple[str, ...] = ()
    """Only these: soft-nn, reliability, confusion, propagation, baselines, pool, labels, suggestions,
    snapshots, pictures; and supervised, which trains the same network on the labels alone to compare with."""
    pool: int = POOL
    """Unlabelled images to look at, at most; 0 for all."""
    device: str | None = None
    """Where to compute; by default as the run was trained: auto, cpu, cuda ..."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Report:
    """Show a run on one self-contained page: what it learned, how sure it is, what to label next.

    Reads the run folder alone. A run that was not evaluated yet is evaluated first, for which its images
    must be there.

    ropaws report runs/mine
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    out: Path | None = None
    """The page; by default RUN/report.html."""
    baseline: Path | None = None
    """A run on the labels alone to compare with; by default RUN/supervised, if it is there."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


@dataclass(frozen=True)
class Compare:
    """Put runs side by side; those that differ in the seed alone become one row with mean and deviation.

    ropaws compare runs/paws-* runs/ropaws-* --out comparison.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders that were evaluated; gains are over the first."""
    out: Path | None = None
    """Also write a page."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Suggest:
    """Which unlabelled images are most worth a label, best first, and why.

    ropaws suggest runs/mine --n 50 --out next.csv
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    n: int = 50
    """How many."""
    out: Path | None = None
    """Also write them to a .csv or .json file."""
    pool: int = POOL
    """Unlabelled images to choose from, at most; 0 for all."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


@dataclass(frozen=True)
class Finetune:
    """Fine-tune a run on its labelled images as in the paper, or train a linear probe; then test it.

    Learning rate and epochs are chosen on a fifth of the labelled images, never on test images. Results
    go to RUN/finetune.json, or RUN/linear.json.

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
    """Labelled images a step."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


@dataclass(frozen=True)
class Predict:
    """Label pictures with a trained run: class, confidence, and whether they belong to any class.

    ropaws predict runs/mine photos/pile --out labels.csv
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Folders, walked to the bottom, pictures, tables of paths, .npz files, or saved datasets."""
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
class Check:
    """Look at your own pictures before training: counts, unreadable files, copies, conflicting labels.

    ropaws check --labeled photos/labeled --unlabeled photos/pile
    """

    labeled: Path
    """A folder with a folder for each class, a table of path and label, an .npz or a saved dataset."""
    unlabeled: tuple[Path, ...] = ()
    """Folders of anything, tables of paths, .npz files or saved datasets."""
    test: Path | None = None
    """Pictures to test on, like --labeled."""
    json: Path | None = None
    """Also write everything that was found to this file."""


@dataclass(frozen=True)
class Datasets:
    """List the named datasets and mixes, or read one and count its images.

    ropaws datasets cifar10+svhn
    """

    name: tyro.conf.Positional[str | None] = None
    """A dataset or mix to read; its official files are got if they are not there."""
    root: Path = Path("data")
    """Folder with the official files."""
    download: bool = True
    """Get what is missing."""


@dataclass(frozen=True)
class Recipes:
    """List the published runs, or show all settings of one."""

    name: tyro.conf.Positional[str | None] = None
    """A recipe to show as JSON."""


def parse(
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


def check_flags(arguments: Sequence[str], command: type, base: RunConfig | None = None) -> None:
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
