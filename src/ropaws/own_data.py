"""Settings that fit a person's own pictures: what to choose, and why."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropaws.config import RunConfig, TrainConfig
from ropaws.data.augment import AugmentConfig
from ropaws.data.listing import Listing, list_labeled, list_unlabeled, merge
from ropaws.data.pictures import open_picture
from ropaws.data.samplers import SupportConfig
from ropaws.data.sources import DataConfig
from ropaws.methods import RoPAWS
from ropaws.models import ModelConfig, recognise_backbone
from ropaws.training.hardware import choose_device
from ropaws.training.optim import OptimConfig

SIZES = (28, 32, 48, 64, 96, 128, 224)
SAMPLE = 200  # pictures whose size is looked at
EPOCHS = 30
SUPPORT_ROWS = 80  # labelled views a step to aim for


@dataclass(frozen=True)
class Choice:
    """A config, and a line a decision, by the setting that it is about."""

    config: RunConfig
    reasons: dict[str, str]

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
    """Look at the pictures and the machine, and choose size, network, batches and steps."""
    labels = list_labeled(labeled)
    train = merge([labels, *(list_unlabeled(source) for source in unlabeled)])
    gpu = choose_device(device).type != "cpu"
    size, why_size = _choose_size(train, gpu)
    backbone, why_backbone = _choose_backbone(size, gpu, backbone, init)
    support, why_support = _choose_support(labels)
    pool = len(train.pictures)
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
            picture_size=round(size * 8 / 7),
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
        "train.steps": f"{steps} steps of {batch}: {EPOCHS} times through {pool:,} pictures,"
        " but 300 to 20,000 steps",
    }
    gigabytes = pool * 3 * config.data.picture_size**2 / 2**30
    if gigabytes > config.data.memory_gb:
        reasons["data.memory"] = (
            f"pictures are read while training: decoded, they are {gigabytes:.1f} GB, more than"
            f" --data.memory-gb {config.data.memory_gb:g}; --data.cache DIR keeps them decoded"
        )
    return Choice(config, reasons)


def _choose_size(train: Listing, gpu: bool) -> tuple[int, str]:
    sides = []
    for picture in train.pictures[:: max(1, len(train.pictures) // SAMPLE)]:
        try:
            with open_picture(picture) as opened:  # reads the header only
                sides.append(min(opened.size))
        except Exception:  # whatever Pillow raises on a damaged file; reported when it is decoded
            continue
    if not sides:
        raise ValueError(f"no readable picture among {len(train.pictures)}, the first is {train.pictures[0]}")
    typical = statistics.median(sides)
    most = 224 if gpu else 64
    size = max((s for s in SIZES if s <= min(typical, most)), default=SIZES[0])
    limit = "" if typical <= most else f", at most {most} on {'a GPU' if gpu else 'a CPU'}"
    return size, f"views of {size} px: the typical picture's shorter side is {typical:.0f} px{limit}"


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
        name = recognise_backbone(init)
        return name, f"backbone {name}: {init} fits it"
    name = "wrn-28-2" if size <= 48 else "resnet18" if size <= 96 else "resnet50"
    name = name if gpu else "small"
    return name, f"backbone {name}: for views of {size} px on {'a GPU' if gpu else 'a CPU'}"


def _choose_support(labels: Listing) -> tuple[SupportConfig, str]:
    known = [label for label in labels.labels if label is not None]
    counts = [known.count(name) for name in set(known)]
    classes = min(len(counts), 100)
    images = max(1, min(8, int(statistics.median(counts))))
    views = max(1, min(8, round(SUPPORT_ROWS / (classes * images))))
    chosen = SupportConfig(
        classes=None if classes == len(counts) else classes, images_per_class=images, views=views
    )
    fewest, most = min(counts), max(counts)
    why = (
        f"support of {classes} classes x {images} pictures x {views} views:"
        f" {len(counts)} classes have {fewest} to {most} labels"
    )
    return chosen, why


def parse_budget(text: str) -> float:
    """'90s', '20m', '1.5h' in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"--budget must be a time such as 90s, 20m or 1.5h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
