"""Which labels training may see."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.core.files import TABLE_FILE, check_rows, read_regular, write_text
from ropaws.core.labels import UNLABELED
from ropaws.core.randomness import SPLIT, generator
from ropaws.pool.corpus import Corpus
from ropaws.pool.sources import DataConfig

DIGITS = 18  # of an index at most


class Labeled(NamedTuple):
    """The granted labels, and no others."""

    indices: Tensor  # (l,) of the training images
    labels: Tensor  # (l,) class


def choose_split(corpus: Corpus, config: DataConfig, *, seed: int) -> Labeled:
    """Choose the labeled images as the settings say: from a file, or drawn from the seed."""
    if config.split is not None:
        return read_split(config.split, corpus)
    return draw_split(
        corpus.train_labels,
        corpus.class_names,
        labels_per_class=config.labels_per_class,
        fraction=config.label_fraction,
        seed=seed,
    )


def draw_split(
    train_labels: Tensor,
    class_names: tuple[str, ...],
    *,
    labels_per_class: int | None,
    fraction: float | None = None,
    seed: int,
) -> Labeled:
    """Draw the same number or share of labels per class, at random from a seed; or all known labels."""
    if not class_names:
        raise ValueError("no training image has a label; label at least one image of every class")
    random = generator(seed, SPLIT)
    chosen = []
    for label, name in enumerate(class_names):
        candidates = (train_labels == label).nonzero().squeeze(1)
        if len(candidates) == 0:
            raise ValueError(f"class {name!r} has no labeled image; label at least one, or drop the class")
        if fraction is None and labels_per_class is None:
            chosen.append(candidates)
            continue
        count = labels_per_class or 0
        if fraction is not None:
            count = max(1, round(fraction * len(candidates)))
        elif len(candidates) < count:
            raise ValueError(
                f"class {name!r} has {len(candidates)} labeled images, fewer than"
                f" data.labels_per_class={labels_per_class}; ask for at most {len(candidates)}"
            )
        chosen.append(candidates[torch.randperm(len(candidates), generator=random)[:count]])
    indices = torch.cat(chosen)
    return Labeled(indices, train_labels[indices])


def read_split(path: Path, corpus: Corpus) -> Labeled:
    """One line per image: its index among the training images, or its file name. # starts a comment."""
    try:
        content = read_regular(path, TABLE_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"data.split: no file at {path}; every run writes one: RUN/split.txt"
        ) from None
    check_rows(content, path)
    lines = content.decode("utf-8", errors="surrogateescape").splitlines()
    entries = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not entries:
        raise ValueError(f"data.split: {path} names no image")
    if all(entry.isdecimal() and len(entry) <= DIGITS for entry in entries):
        indices = [int(entry) for entry in entries]
    else:
        indices = _positions(entries, corpus.train_names, path)
    if max(indices) >= len(corpus.train_labels):
        raise ValueError(
            f"data.split: {path} names image {max(indices)}, but there are {len(corpus.train_labels)}"
        )
    if len(set(indices)) < len(indices):
        raise ValueError(f"data.split: {path} names an image twice")
    labels = corpus.train_labels[torch.tensor(indices)]
    unknown = (labels == UNLABELED).nonzero().squeeze(1).tolist()
    if unknown:
        raise ValueError(f"data.split: {path} names {entries[unknown[0]]}, whose label is not known")
    missing = sorted(set(range(len(corpus.class_names))) - set(labels.tolist()))
    if missing:
        raise ValueError(f"data.split: {path} names no image of class {corpus.class_names[missing[0]]!r}")
    order = labels.argsort(stable=True)  # one class after another, as a drawn split is
    return Labeled(torch.tensor(indices)[order], labels[order])


def _positions(entries: Sequence[str], names: Sequence[str], path: Path) -> list[int]:
    """Whole paths, or file names where these are enough to tell images apart."""
    if not names:
        raise ValueError(f"data.split: {path} names files, but these images are not files; use indices")
    position = {name: index for index, name in enumerate(names)}
    by_file: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        by_file.setdefault(Path(name).name, []).append(index)
    found = []
    for entry in entries:
        candidates = [position[entry]] if entry in position else by_file.get(Path(entry).name, [])
        if len(candidates) > 1:
            candidates = [i for i in candidates if names[i].endswith(f"/{entry}")]
        if len(candidates) != 1:
            if candidates:
                what = f"{len(candidates)} training images have this name; give more of the path"
            else:
                what = "no training image has this name"
            raise ValueError(f"data.split: {entry!r} of {path}: {what}")
        found += candidates
    return found


def write_split(path: Path, split: Labeled) -> None:
    """Write a split that another run takes by --data.split."""
    head = "# indices of the labeled images among the training images\n"
    write_text(path, head + "".join(f"{index}\n" for index in split.indices.tolist()))
