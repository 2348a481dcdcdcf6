"""Training on a person's own data from Python: paths, arrays, Hugging Face datasets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

from ropaws.data.rows import check_images
from ropaws.own_data import fit_settings, parse_budget
from ropaws.run import train

# A path of any kind that `ropaws train` takes, images with their labels, images alone, or a dataset.
Source = Path | str | tuple[ArrayLike, ArrayLike] | ArrayLike | Any


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
    """`ropaws train --labeled ...` in Python; the run folder.

    labeled, test: a path, a pair of images (n, h, w[, 3]) of uint8 and labels (numbers, -1 for none, or
    names), or a Hugging Face dataset. unlabeled: a path, an array of images or a dataset, or several.
    budget: '20m', or seconds.
    What is not on disk yet is written to OUT/inputs, so that the run can be resumed and repeated.
    """
    out = Path(out)
    if (out / "config.json").exists():
        raise FileExistsError(f"{out} holds a run already; choose another out")
    inputs = out / "inputs"
    alone = isinstance(unlabeled, Path | str | np.ndarray) or hasattr(unlabeled, "save_to_disk")
    piles: list[Any] = [unlabeled] if alone else list(unlabeled)  # type: ignore[arg-type]
    choice = fit_settings(
        _on_disk(labeled, inputs / "labeled"),
        tuple(_on_disk(source, inputs / f"unlabeled-{i}") for i, source in enumerate(piles)),
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
    return train(choice.config, out, budget=seconds, choices=reasons, console=console)


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
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file
