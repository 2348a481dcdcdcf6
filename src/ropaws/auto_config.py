"""Settings chosen from a person's own data, with the reason of each; training on such data from Python."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

from ropaws.config import RunConfig, TrainConfig
from ropaws.data.augment import AugmentConfig
from ropaws.data.files.decoding import open_image
from ropaws.data.files.listing import Listing
from ropaws.data.files.reading import ImageFiles, own_images
from ropaws.data.files.rows import check_images
from ropaws.data.samplers import SupportConfig
from ropaws.data.sources import DataConfig
from ropaws.methods import RoPAWS
from ropaws.models import ModelConfig, recognize_backbone
from ropaws.runs.atomic import replacing
from ropaws.runs.layout import CONFIG, INPUTS
from ropaws.training.hardware import choose_device
from ropaws.training.optim import OptimConfig
from ropaws.training.train import train_run

SIZES = (28, 32, 48, 64, 96, 128, 224)
SAMPLE = 200  # images whose size is looked at
EPOCHS = 30
# A path of any kind that `ropaws train` takes, images with their labels, images alone, or a dataset.
Source = Path | str | tuple[ArrayLike, ArrayLike] | ArrayLike | Any
SUPPORT_ROWS = 80  # labeled views per step to aim for


@dataclass(frozen=True)
class Choice:
    """A config, with one line for each decision, by the setting that it is about."""

    config: RunConfig
    reasons: dict[str, str]
    files: ImageFiles  # as they were listed, so that training need not list them again

    def reasons_beside(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """The reasons that still hold where a person has set something else on the command line."""
        also = {"train.steps": ("--budget", "--train.batch"), "support": ("--data.split", "--data.label")}
        return tuple(
            reason
            for setting, reason in self.reasons.items()
            if not any(a.startswith((f"--{setting}", *also.get(setting, ()))) for a in arguments)
        )


def fit_settings(
    labeled: Path,
    unlabeled: tuple[Path, ...],
    test: Path | None = None,
    *,
    device: str = "auto",
    backbone: str | None = None,
    init: Path | None = None,
) -> Choice:
    """Look at the images and the machine, and choose size, network, batches and steps."""
    files = own_images(labeled, unlabeled, test)
    train = files.train
    gpu = choose_device(device).type != "cpu"
    size, why_size = _choose_size(train, gpu)
    backbone, why_backbone = _choose_backbone(size, gpu, backbone, init)
    support, why_support = _choose_support(train)
    pool = len(train.images)
    batch = max(2, min(256 if gpu else 128, pool // 4))
    steps = min(20_000, max(300, EPOCHS * pool // batch))
    config = RunConfig(
        method=RoPAWS(prior_temperature="auto", typical_prior=0.4, reweight_entropy=True),
        model=ModelConfig(backbone=backbone, init=init),
        data=DataConfig(
            source="files",
            labeled=labeled,
            unlabeled=unlabeled,
            test=test,
            image_size=round(size * 8 / 7),
            labels_per_class=None,
        ),
        augment=_choose_augmentation(size, gpu),
        support=support,
        optim=OptimConfig(start=0.4, peak=1.6, end=0.016, warmup=steps // 10),
        train=TrainConfig(steps=steps, batch=batch, device=device, checkpoint_every=max(20, steps // 20)),
    )
    reasons = {
        "augment.size": why_size,
        "model.backbone": why_backbone,
        "support": why_support,
        "train.steps": f"{steps} steps of {batch}: {EPOCHS} times through {pool:,} images,"
        " but 300 to 20,000 steps",
    }
    gigabytes = pool * 3 * config.data.image_size**2 / 2**30
    if gigabytes > config.data.memory_gb:
        reasons["data.memory"] = (
            f"images are read while training: decoded, they are {gigabytes:.1f} GB, more than"
            f" --data.memory-gb {config.data.memory_gb:g}; --data.cache DIR keeps them decoded"
        )
    return Choice(config, reasons, files)


def _choose_size(train: Listing, gpu: bool) -> tuple[int, str]:
    sides = []
    for image in train.images[:: max(1, len(train.images) // SAMPLE)]:
        try:
            with open_image(image) as opened:  # reads the header only
                sides.append(min(opened.size))
        except Exception:  # whatever Pillow raises on a damaged file; reported when it is decoded
            continue
    if not sides:
        raise ValueError(f"no readable image among {len(train.images)}, the first is {train.images[0]}")
    typical = statistics.median(sides)
    most = 224 if gpu else 64
    size = max((s for s in SIZES if s <= min(typical, most)), default=SIZES[0])
    limit = "" if typical <= most else f", at most {most} on {'a GPU' if gpu else 'a CPU'}"
    return size, f"views of {size} px: the typical image's shorter side is {typical:.0f} px{limit}"


def _choose_augmentation(size: int, gpu: bool) -> AugmentConfig:
    """The paper's on a GPU; milder and with fewer crops on a CPU.

    Within the few steps that a CPU can take, strong changes keep the network at the plateau where
    all predictions are uniform.
    """
    small = max(8, round(0.6 * size))
    if gpu:
        return AugmentConfig(size=size, small_size=small)
    return AugmentConfig(size=size, small_size=small, small_crops=2, solarize=0.0, equalize=0.0)


def _choose_backbone(size: int, gpu: bool, asked: str | None, init: Path | None) -> tuple[str, str]:
    if asked is not None:
        return asked, f"backbone {asked}: as asked"
    if init is not None:
        name = recognize_backbone(init)
        return name, f"backbone {name}: {init} fits it"
    name = "wrn-28-2" if size <= 48 else "resnet18" if size <= 96 else "resnet50"
    name = name if gpu else "small"
    return name, f"backbone {name}: for views of {size} px on {'a GPU' if gpu else 'a CPU'}"


def _choose_support(train: Listing) -> tuple[SupportConfig, str]:
    counts = list(Counter(label for label in train.labels if label is not None).values())
    classes = min(len(counts), 100)
    images = max(1, min(8, int(statistics.median(counts))))
    views = max(1, min(8, round(SUPPORT_ROWS / (classes * images))))
    chosen = SupportConfig(
        classes=None if classes == len(counts) else classes, images_per_class=images, views=views
    )
    fewest, most = min(counts), max(counts)
    why = (
        f"support of {classes} classes x {images} images x {views} views:"
        f" {len(counts)} classes have {fewest} to {most} labels"
    )
    return chosen, why


def parse_budget(text: str) -> float:
    """'90s', '20m', '1.5h' in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"--budget must be a time such as 90s, 20m or 1.5h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def train_on(
    labeled: Source,
    unlabeled: Source | Sequence[Source] = (),
    *,
    out: Path | str,
    test: Source | None = None,
    budget: str | float | None = None,
    backbone: str | None = None,
    init: Path | str | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Path:
    """Train on your own images: `ropaws train --labeled ...` in Python.

    What is not on disk yet is written to OUT/inputs, so that the run can be resumed and repeated.

    Args:
        labeled: A path; a pair of images (n, h, w) or (n, h, w, 3) of uint8 and labels (numbers, -1 for
            none, or names); or a Hugging Face dataset.
        unlabeled: A path, an array of images or a dataset; or several of them.
        out: The run folder; must not hold a run yet.
        test: Images to test on, like labeled.
        budget: How long to train: "20m", or seconds.
        backbone: The network; by default chosen from the data.
        init: A weight file that the backbone starts from.
        device: Where to compute.
        console: Where progress goes; standard error by default.

    Returns:
        The run folder.
    """
    out = Path(out)
    if (out / CONFIG).exists():
        raise FileExistsError(f"{out} holds a run already; choose another out")
    inputs = out / INPUTS
    single = isinstance(unlabeled, Path | str | np.ndarray) or hasattr(unlabeled, "save_to_disk")
    pools: list[Any] = [unlabeled] if single else list(unlabeled)  # type: ignore[arg-type]
    choice = fit_settings(
        _on_disk(labeled, inputs / "labeled"),
        tuple(_on_disk(source, inputs / f"unlabeled-{i}") for i, source in enumerate(pools)),
        None if test is None else _on_disk(test, inputs / "test"),
        device=device,
        backbone=backbone,
        init=None if init is None else Path(init),
    )
    console = console or Console(stderr=True)
    reasons = choice.reasons_beside(() if budget is None else ("--budget",))
    for line in reasons:
        console.print(line, highlight=False)
    seconds = parse_budget(budget) if isinstance(budget, str) else budget
    trained = train_run(
        choice.config, out, budget=seconds, choices=reasons, console=console, files=choice.files
    )
    return trained.path


def _on_disk(source: Source, place: Path) -> Path:
    if isinstance(source, Path | str):
        return Path(source)
    place.parent.mkdir(parents=True, exist_ok=True)
    if (save := getattr(source, "save_to_disk", None)) is not None:
        save(str(place))
        return place
    images, labels = source if isinstance(source, tuple) else (source, None)
    arrays = {"images": np.asarray(images)}
    check_images(arrays["images"], place.name)
    if labels is not None:
        arrays["labels"] = np.asarray(labels)
    file = place.with_suffix(".npz")
    with replacing(file) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
    return file
