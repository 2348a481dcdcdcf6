"""Where images come from, and which labels training may see."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ropaws.core.files import TABLE_FILE, check_rows, make_cache_folder, read_regular, write_text
from ropaws.core.labels import UNLABELED, nearest
from ropaws.core.randomness import SPLIT, generator
from ropaws.pool.corpus import (
    Corpus,
    Decoding,
    ImageFiles,
    decode_corpus,
    join,
    join_files,
    no_watch,
    own_images,
)
from ropaws.pool.datasets.archives import read_npz
from ropaws.pool.datasets.catalog import DATASETS, MIXES, read_dataset
from ropaws.pool.datasets.feature_file import is_feature_file, read_features
from ropaws.pool.decoding import Crop, SquareCache

MOST_PIXELS = 4096  # per side of a decoded image
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]  # shows progress: watch(items, title, total)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how many labels training may see."""

    source: str = "cifar10"
    """A named dataset or mix (`ropaws datasets` lists them), or the path of an .npz file of images or
    features."""
    labeled: Path | None = None
    """Instead of a source: a folder with a folder for each class, a table, an .npz or a saved dataset."""
    unlabeled: tuple[Path, ...] = ()
    """With labeled: folders of anything, tables of paths, .npz files, saved datasets."""
    out_of_class: tuple[Path, ...] = ()
    """With labeled: as unlabeled, images that are known to belong to no class."""
    test: Path | None = None
    """With labeled: images to test on, like labeled; classes that are not in it are out-of-class."""
    root: Path = Path("data")
    """Folder with the official files of named datasets."""
    download: bool = True
    """Download the official files if they are not there."""
    extra: tuple[str, ...] = ()
    """More sources whose images join the unlabeled set, as out-of-class ones."""
    labels_per_class: int | None = 25
    """Labels per class that training may see, drawn from the run's seed; None for all."""
    label_fraction: float | None = None
    """Instead: this share of the labels of each class, at least one."""
    split: Path | None = None
    """Instead: a file with the index or file name of each labeled image, such as another run's split.txt."""
    image_size: int = 64
    """Pixels per side to which each image file is reduced."""
    crop: Crop = "whole"
    """What random views of image files are cropped from: whole images, or the central square. Evaluation and
    prediction see the central square."""
    memory_gb: float = 4.0
    """Decoded images are held in memory up to this; larger sets are read while training."""
    cache: Path | None = None
    """Folder that keeps decoded images for later epochs and runs; several runs may share it."""
    cache_gb: float = 20.0
    """Size of the cache at most; that of features has the same limit."""
    feature_cache: Path | None = None
    """With model.frozen: folder that keeps features for later runs; by default ~/.cache/ropaws/features."""
    workers: int | None = None
    """Processes that decode images; by default one for each core."""

    def __post_init__(self) -> None:
        if self.labels_per_class is not None and self.labels_per_class < 1:
            raise ValueError(f"data.labels_per_class must be at least 1, got {self.labels_per_class}")
        if self.label_fraction is not None and not 0 < self.label_fraction <= 1:
            raise ValueError(f"data.label_fraction must be above 0 and at most 1, got {self.label_fraction}")
        if self.label_fraction is not None and self.split is not None:
            raise ValueError("data.label_fraction and data.split cannot be combined")
        if not 8 <= self.image_size <= MOST_PIXELS:
            raise ValueError(f"data.image_size must be from 8 to {MOST_PIXELS} pixels, got {self.image_size}")
        if self.memory_gb < 0 or self.cache_gb < 0:
            raise ValueError(
                f"data.memory_gb and cache_gb must be at least 0, got {self.memory_gb}, {self.cache_gb}"
            )
        if self.crop not in get_args(Crop):
            raise ValueError(f"data.crop must be whole or center, got {self.crop}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"data.workers must be at least 1, got {self.workers}")
        if self.labeled is None and (self.unlabeled or self.out_of_class or self.test):
            raise ValueError(
                "data.unlabeled, data.out_of_class and data.test go with data.labeled, which is not given"
            )

    def decoding(self) -> Decoding:
        cache = None
        if self.cache is not None:
            make_cache_folder(self.cache, setting="data.cache", root=self.cache)
            cache = SquareCache(self.cache, int(self.cache_gb * 2**30))
        return Decoding(self.image_size, self.memory_gb * 2**30, cache, self.workers, self.crop)


def load_corpus(config: DataConfig, *, files: ImageFiles | None = None, watch: Watch = no_watch) -> Corpus:
    """Read everything that a run trains and tests on.

    Args:
        config: Where the images come from.
        files: The files of config.labeled, config.unlabeled and config.test, if they are listed already.
        watch: Shows the progress of what takes long.

    Raises:
        FileNotFoundError: A source is not there; the message says what to put where.
        ValueError: A source is damaged, or too many of its images are.
    """
    if config.labeled is not None:
        files = files or own_images(
            config.labeled,
            config.unlabeled,
            config.test,
            out_of_class=config.out_of_class,
            prefix="data.",
        )
        return _with_extra(files, config.extra, config, watch)
    mix = MIXES.get(config.source)
    if mix is None:
        return _with_extra(open_source(config.source, config, watch), config.extra, config, watch)
    found = open_source(mix.source, config, watch)
    if mix.known is not None:
        found = mix.keep_known(_decoded(found, config, watch))
    return mix.thin_out(_with_extra(found, mix.extra + config.extra, config, watch))


def _with_extra(
    found: Corpus | ImageFiles, names: tuple[str, ...], config: DataConfig, watch: Watch
) -> Corpus:
    for name in names:
        found = _join(found, open_source(name, config, watch), config, watch)
    return _decoded(found, config, watch)


def open_source(source: str, config: DataConfig, watch: Watch = no_watch) -> Corpus | ImageFiles:
    """One source by its name or path: arrays, or images that are not decoded yet."""
    if source in DATASETS:
        return read_dataset(source, config.root, download=config.download, watch=watch)
    if source.endswith(".npz"):
        path = Path(source)
        return read_features(path) if is_feature_file(path) else read_npz(path)
    if source in MIXES:
        raise ValueError(f"data.extra: {source!r} is a mix; name its datasets instead")
    known = [*DATASETS, *MIXES]
    raise ValueError(
        f"unknown data source {source!r}, did you mean {nearest(source, known)!r}?"
        f" `ropaws datasets` lists them; a path must end in .npz"
    )


def _join(
    found: Corpus | ImageFiles, extra: Corpus | ImageFiles, config: DataConfig, watch: Watch
) -> Corpus | ImageFiles:
    if isinstance(found, ImageFiles) and isinstance(extra, ImageFiles):
        return join_files(found, extra)
    corpus = _decoded(found, config, watch)
    if isinstance(extra, ImageFiles):  # straight to the squares that they are in the end
        size = min(corpus.train_images.shape[2:])
        extra = decode_corpus(
            extra, Decoding(size, cache=config.decoding().cache, workers=config.workers), watch
        )
    return join(corpus, extra)


def _decoded(found: Corpus | ImageFiles, config: DataConfig, watch: Watch) -> Corpus:
    return found if isinstance(found, Corpus) else decode_corpus(found, config.decoding(), watch)


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
