"""Training on a person's own images or features, from Python and for the command line."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console

from ropaws.core.files import replacing
from ropaws.core.run_layout import CONFIG, FROZEN, INPUTS, MODEL
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import check_train_blocks
from ropaws.pool.array_files import check_images
from ropaws.pool.datasets.feature_file import check_feature_array
from ropaws.run.auto_config import Choice, fit_feature_settings, fit_settings, parse_time
from ropaws.run.config import RunConfig, same_settings, with_absolute_paths
from ropaws.run.manifest import read_facts
from ropaws.run.run import read_run_config
from ropaws.run.train import TrainInputs, resume, train, writing

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
