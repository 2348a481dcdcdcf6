"""Where images come from: a person's own images, named datasets, mixes of them, .npz files."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ropaws.core.files import make_cache_folder
from ropaws.core.labels import nearest
from ropaws.pool.corpus import Corpus, join
from ropaws.pool.datasets.catalog import DATASETS, read_dataset
from ropaws.pool.datasets.feature_file import is_feature_file, read_features
from ropaws.pool.datasets.mixes import MIXES
from ropaws.pool.datasets.npz import read_npz
from ropaws.pool.reading import Decoding, ImageFiles, decode_corpus, join_files, no_watch, own_images
from ropaws.pool.square_cache import SquareCache
from ropaws.pool.whole_images import Crop

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
