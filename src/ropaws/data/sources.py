"""Where images come from: the embedded pile, .npz files, CIFAR-10's official files."""

import importlib.resources
import io
import pickle
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.data.corpus import UNKNOWN, Corpus, join
from ropaws.data.files import Watch, load_files, no_watch
from ropaws.naming import nearest

CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how many labels training may see."""

    source: str = "cifar10"
    """fashion-demo (embedded), cifar10 (official files), or the path of an .npz file."""
    labeled: Path | None = None
    """Instead of a source: a folder with a folder for each class, or a table of path and label."""
    unlabeled: tuple[Path, ...] = ()
    """With labeled: folders of anything, or tables of paths."""
    test: Path | None = None
    """With labeled: pictures to test on, like labeled; classes that are not in it are out-of-class."""
    picture_size: int = 64
    """With labeled: pixels a side to which the central square of each picture is reduced."""
    root: Path = Path("data")
    """Folder with the official files of named datasets."""
    extra: tuple[str, ...] = ()
    """More sources whose images join the unlabelled set, as out-of-class ones."""
    labels_per_class: int | None = 25
    """Labels that training may see, drawn a class at a time from the run's seed; None for all."""

    def __post_init__(self) -> None:
        if self.labels_per_class is not None and self.labels_per_class < 1:
            raise ValueError(f"data.labels_per_class must be at least 1, got {self.labels_per_class}")
        if self.picture_size < 8:
            raise ValueError(f"data.picture_size must be at least 8 pixels, got {self.picture_size}")
        if self.labeled is None and (self.unlabeled or self.test):
            raise ValueError("data.unlabeled and data.test go with data.labeled, which is not given")


def load_corpus(config: DataConfig, *, watch: Watch = no_watch) -> Corpus:
    """Read everything that a run trains and tests on; watch shows the progress of decoding files."""
    if config.labeled is not None:
        corpus = load_files(
            config.labeled, config.unlabeled, config.test, size=config.picture_size, watch=watch
        )
    else:
        corpus = load_source(config.source, config.root)
    for extra in config.extra:
        corpus = join(corpus, load_source(extra, config.root))
    return corpus


def load_source(source: str, root: Path) -> Corpus:
    """Read one source by its name or path."""
    if source in SOURCES:
        return SOURCES[source](root)
    path = Path(source)
    if path.suffix == ".npz":
        return read_npz(path)
    raise ValueError(
        f"unknown data source {source!r}, did you mean {nearest(source, SOURCES)!r}?"
        f" Known: {', '.join(SOURCES)}, or a path ending in .npz"
    )


def read_npz(path: Path) -> Corpus:
    """Arrays train_images (n, h, w[, channels]) uint8 and train_labels (n,), -1 where unknown;
    test_images, test_labels and class_names may be left out.
    """
    arrays = _load_npz(path)
    for name in ("train_images", "train_labels"):
        if name not in arrays:
            raise ValueError(f"{path} has no array {name!r}; it has {', '.join(arrays) or 'nothing'}")
    train_images = _to_images(arrays["train_images"], f"{path}: train_images")
    test_images = train_images[:0]
    if "test_images" in arrays:
        test_images = _to_images(arrays["test_images"], f"{path}: test_images")
    if test_images.shape[1] != train_images.shape[1]:
        channels = f"{train_images.shape[1]} and {test_images.shape[1]}"
        raise ValueError(f"{path}: train_images and test_images must have the same channels, got {channels}")
    train_labels = _to_labels(arrays["train_labels"], len(train_images), f"{path}: train_labels")
    test_labels = _to_labels(
        arrays.get("test_labels", np.zeros(0, np.int64)), len(test_images), f"{path}: test_labels"
    )
    classes = 1 + int(max([UNKNOWN, *train_labels.tolist(), *test_labels.tolist()]))
    names = [str(name) for name in arrays.get("class_names", np.arange(classes))]
    if len(names) < classes:
        raise ValueError(f"{path}: class_names has {len(names)} names, but labels go up to {classes - 1}")
    return Corpus(tuple(names), train_images, train_labels, test_images, test_labels)


def _load_npz(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"no data file at {path}") from None
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a readable .npz file ({error}); make it again") from None


def _to_images(array: NDArray[np.generic], name: str) -> Tensor:
    if (
        array.dtype != np.uint8
        or array.ndim not in (3, 4)
        or (array.ndim == 4 and array.shape[3] not in (1, 3))
    ):
        raise ValueError(
            f"{name} must be uint8 of shape (n, h, w) or (n, h, w, 1 or 3), got {array.dtype} {array.shape}"
        )
    images = torch.from_numpy(array)
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()


def _to_labels(array: NDArray[np.generic], count: int, name: str) -> Tensor:
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be whole numbers, one for each of {count} images, got {array.dtype} {array.shape}"
        )
    labels = torch.from_numpy(array.astype(np.int64))
    if len(labels) and int(labels.min()) < UNKNOWN:
        raise ValueError(f"{name} must be at least {UNKNOWN} (unknown), got {int(labels.min())}")
    return labels


def read_embedded(_root: Path) -> Corpus:
    """Fashion-MNIST pile inside the package: five classes, half of 5,000 images out-of-class."""
    with importlib.resources.as_file(
        importlib.resources.files("ropaws.data") / "embedded/fashion.npz"
    ) as path:
        return read_npz(path)


def read_cifar10(root: Path) -> Corpus:
    """The official CIFAR-10 files, Python or binary version, unpacked below the root."""
    for folder, read in (
        ("cifar-10-batches-py", _read_cifar_pickle),
        ("cifar-10-batches-bin", _read_cifar_binary),
    ):
        if (root / folder).is_dir():
            train = [read(root / folder, f"data_batch_{i}") for i in range(1, 6)]
            test_images, test_labels = read(root / folder, "test_batch")
            train_images = np.concatenate([images for images, _ in train])
            train_labels = np.concatenate([labels for _, labels in train])
            return Corpus(
                CIFAR10_CLASSES,
                torch.from_numpy(train_images),
                torch.from_numpy(train_labels),
                torch.from_numpy(test_images),
                torch.from_numpy(test_labels),
            )
    raise FileNotFoundError(
        f"no CIFAR-10 below {root}: unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz from"
        " https://www.cs.toronto.edu/~kriz/cifar.html there, or name another folder with --data.root"
    )


Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _read_cifar_binary(folder: Path, name: str) -> Batch:
    """Records of one label byte and 3072 pixel bytes."""
    path = folder / f"{name}.bin"
    data = np.frombuffer(_read_bytes(path), np.uint8)
    if len(data) == 0 or len(data) % 3073:
        raise ValueError(
            f"{path} is damaged: {len(data)} bytes are not whole records of 3073; unpack it again"
        )
    records = data.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).copy(), records[:, 0].astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """CIFAR-10's Python version is pickled; nothing but NumPy arrays is let through."""

    def find_class(self, module: str, name: str) -> object:
        allowed = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.startswith("numpy") and name in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an official CIFAR-10 file")


def _read_cifar_pickle(folder: Path, name: str) -> Batch:
    path = folder / name
    try:
        batch = _ArraysOnly(io.BytesIO(_read_bytes(path)), encoding="bytes").load()
        images = batch[b"data"].reshape(-1, 3, 32, 32)
        labels = np.array(batch[b"labels"], np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); unpack it again") from None
    return images, labels


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"CIFAR-10 is incomplete: no {path}; unpack it again") from None


SOURCES: dict[str, Callable[[Path], Corpus]] = {"cifar10": read_cifar10, "fashion-demo": read_embedded}
