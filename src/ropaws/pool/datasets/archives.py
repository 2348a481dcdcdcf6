"""Readers of dataset files that hold arrays: CIFAR, SVHN, STL-10, Fashion-MNIST, and a corpus in one .npz."""

import gzip
import hashlib
import io
import pickle
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.files import DATASET_FILE, check_regular, open_regular, read_regular, replacing
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, refuse_verdict
from ropaws.pool.array_files import MOST_CLASSES, check_images, check_row_count, class_names, load_arrays
from ropaws.pool.corpus import Corpus

PIECE = 1 << 20
TIMEOUT = 20.0  # seconds without an answer


class Remote(NamedTuple):
    """A file on its official host."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


# Passes pieces through, showing progress: watch(pieces, title, number of pieces).
Watch = Callable[[Iterable[bytes], str, int], Iterable[bytes]]


def fetch(remote: Remote, folder: Path, watch: Watch) -> Path:
    """The file in the folder, downloaded if it is not there; a wrong checksum is an error."""
    path = folder / remote.name
    if path.is_file():
        _check(path, remote, origin=path, remedy="remove it")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        with urllib.request.urlopen(remote.url, timeout=TIMEOUT) as answer, temporary.open("wb") as file:
            pieces = -(-int(answer.headers.get("Content-Length", 0)) // PIECE)
            for piece in watch(_pieces(answer.read), f"Downloading {remote.name} (MB)", pieces):
                file.write(piece)
        _check(temporary, remote, origin=remote.url, remedy="try again later")
    return path


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while piece := read(PIECE):
        yield piece


def _check(path: Path, remote: Remote, *, origin: Path | str, remedy: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != remote.md5:
        raise ValueError(
            f"{origin} is not the official {remote.name}: its MD5 is {found}, not {remote.md5}; {remedy}"
        )


def is_archive(name: str) -> bool:
    return name.endswith((".tar.gz", ".zip"))


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive beside and move it in whole: a folder that is there is complete.

    Nothing is written outside the folder: tarfile's data filter and zipfile drop .. and absolute paths.
    """
    if not is_archive(path.name):
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as beside:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(beside)
        else:
            with tarfile.open(path) as bundle:
                bundle.extractall(beside, filter="data")
        for entry in Path(beside).iterdir():
            entry.replace(folder / entry.name)


CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip

MOST_IDX = 1 << 28  # bytes of an unpacked file; MNIST's and Fashion-MNIST's have a fifth of that
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (n, channels, h, w), labels (n,)


def read_cifar10(root: Path) -> Corpus:
    """The Python version, or the binary one."""
    train_files, test_file = [f"data_batch_{i}" for i in range(1, 6)], "test_batch"
    if (root / "cifar-10-batches-py").is_dir():
        folder = root / "cifar-10-batches-py"
        train = [_cifar_batch(folder / name, "labels") for name in train_files]
        test = _cifar_batch(folder / test_file, "labels")
    else:
        folder = root / "cifar-10-batches-bin"
        train = [_cifar_binary(folder / f"{name}.bin", label_bytes=1) for name in train_files]
        test = _cifar_binary(folder / f"{test_file}.bin", label_bytes=1)
    return _corpus(CIFAR10_CLASSES, train, test)


def read_cifar100(root: Path) -> Corpus:
    """Fine labels; the Python version, or the binary one."""
    if (root / "cifar-100-python").is_dir():
        folder = root / "cifar-100-python"
        names = [_text(name) for name in _read_pickle(folder / "meta").get("fine_label_names", ())]
        train, test = (_cifar_batch(folder / name, "fine_labels") for name in ("train", "test"))
    else:
        folder = root / "cifar-100-binary"
        names = _read_bytes(folder / "fine_label_names.txt").decode().split()
        train, test = (_cifar_binary(folder / f"{name}.bin", label_bytes=2) for name in ("train", "test"))
    return _corpus(tuple(names), [train], test)


def read_svhn(root: Path) -> Corpus:
    """Cropped digits, the MATLAB files of format 2."""
    train, test = (_svhn(root / f"{name}_32x32.mat") for name in ("train", "test"))
    return _corpus(tuple("0123456789"), [train], test)


def read_stl10(root: Path) -> Corpus:
    """5,000 labeled images, and 100,000 unlabeled ones among which are other animals and vehicles."""
    folder = root / "stl10_binary"
    names = _read_bytes(folder / "class_names.txt").decode().split()
    pool = _stl_images(folder / "unlabeled_X.bin")
    unlabeled = (pool, np.full(len(pool), UNLABELED, np.int64))
    train, test = ((_stl_images(folder / f"{part}_X.bin"), _stl_labels(folder / f"{part}_y.bin"))
                   for part in ("train", "test"))  # fmt: skip
    return _corpus(tuple(names), [train, unlabeled], test)


def read_fashion_mnist(root: Path) -> Corpus:
    """Four gzipped files in the format of MNIST."""
    train, test = (
        (
            _read_idx(root / f"{part}-images-idx3-ubyte.gz", 3)[:, None],
            _read_idx(root / f"{part}-labels-idx1-ubyte.gz", 1).astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return _corpus(FASHION_CLASSES, [train], test)


def _corpus(names: tuple[str, ...], train: list[Batch], test: Batch) -> Corpus:
    for images, labels in [*train, test]:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, but {len(labels)} labels; unpack the files again")
    return Corpus(
        names,
        torch.from_numpy(np.concatenate([images for images, _ in train])),
        torch.from_numpy(np.concatenate([labels for _, labels in train])),
        torch.from_numpy(np.ascontiguousarray(test[0])),
        torch.from_numpy(test[1]),
    )


def _cifar_binary(path: Path, *, label_bytes: int) -> Batch:
    """Records of the label bytes (the last is the fine one) and 3072 pixel bytes."""
    data, length = np.frombuffer(_read_bytes(path), np.uint8), 3072 + label_bytes
    if len(data) == 0 or len(data) % length:
        raise ValueError(
            f"{path} is damaged: {len(data)} bytes are not whole records of {length}; unpack it again"
        )
    records = data.reshape(-1, length)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).copy()
    return images, records[:, label_bytes - 1].astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """CIFAR's Python version is pickled; nothing but NumPy arrays is let through."""

    def find_class(self, module: str, name: str) -> object:
        allowed = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.startswith("numpy") and name in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an official CIFAR file")


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        content = _ArraysOnly(io.BytesIO(_read_bytes(path)), encoding="bytes").load()
        return {_text(key): value for key, value in content.items()}
    except FileNotFoundError:
        raise
    except Exception as error:  # pickle raises nearly anything on damaged files
        raise ValueError(f"{path} is damaged ({error!s:.200}); unpack it again") from None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cifar_batch(path: Path, labels: str) -> Batch:
    batch = _read_pickle(path)
    try:
        return batch["data"].reshape(-1, 3, 32, 32), np.array(batch[labels], np.int64)
    except (KeyError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); unpack it again") from None


def _svhn(path: Path) -> Batch:
    import scipy.io  # slow to load, and only SVHN needs it

    if not path.exists():
        raise FileNotFoundError(f"no {path}; download it again")
    check_regular(path, DATASET_FILE)
    try:
        content = scipy.io.loadmat(path, variable_names=["X", "y"])
        images = content["X"].transpose(3, 2, 0, 1)  # (32, 32, 3, n)
        labels = content["y"].astype(np.int64).reshape(-1) % 10  # the files say 10 for the digit 0
    except Exception as error:  # scipy raises nearly anything on damaged files
        raise ValueError(f"{path} is damaged ({error}); download it again") from None
    return np.ascontiguousarray(images, np.uint8), labels


def _stl_images(path: Path) -> NDArray[np.uint8]:
    """Images of 96 x 96, column by column."""
    data = np.frombuffer(_read_bytes(path), np.uint8)
    if len(data) % (3 * 96 * 96):
        raise ValueError(
            f"{path} is damaged: {len(data)} bytes are not whole images of 27648; unpack it again"
        )
    return np.ascontiguousarray(data.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2))


def _stl_labels(path: Path) -> NDArray[np.int64]:
    return np.frombuffer(_read_bytes(path), np.uint8).astype(np.int64) - 1


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """MNIST's format: magic number 0, 0, 8, dimensions; then their lengths; then bytes."""
    try:
        with open_regular(path, DATASET_FILE) as packed, gzip.open(packed) as file:
            content = file.read(MOST_IDX + 1)
        if len(content) > MOST_IDX:
            raise ValueError(f"it unpacks to more than {MOST_IDX:,} bytes")
        head = 4 + 4 * dimensions
        if content[:4] != bytes((0, 0, 8, dimensions)):
            raise ValueError("wrong magic number")
        lengths = np.frombuffer(content[4:head], ">u4").astype(int)
        return np.frombuffer(content[head:], np.uint8).reshape(lengths).copy()
    except FileNotFoundError:
        raise FileNotFoundError(f"incomplete: no {path}; unpack it again") from None
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path, DATASET_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(f"incomplete: no {path}; unpack it again") from None


def read_npz(path: Path) -> Corpus:
    """Arrays train_images (n, h, w[, channels]) uint8 and train_labels (n,), -1 where unknown;
    test_images, test_labels (-1: out-of-class) and class_names may be left out.
    """
    arrays = load_arrays(path)
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
    check_row_count(len(train_images) + len(test_images), path)
    train_labels = _to_labels(arrays["train_labels"], len(train_images), f"{path}: train_labels")
    test_labels = _to_labels(
        arrays.get("test_labels", np.zeros(0, np.int64)), len(test_images), f"{path}: test_labels"
    )
    classes = 1 + max(int(part.max()) if len(part) else UNLABELED for part in (train_labels, test_labels))
    if classes > MOST_CLASSES:
        raise ValueError(f"{path}: labels must be below {MOST_CLASSES:,}, got {classes - 1:,}")
    names = class_names(arrays, path)
    if names is None:
        names = [str(number) for number in range(classes)]
    if len(names) < classes:
        raise ValueError(f"{path}: class_names has {len(names)} names, but labels go up to {classes - 1}")
    refuse_verdict(names, path)
    truth = torch.where(test_labels == UNLABELED, OUT_OF_CLASS, test_labels)
    return Corpus(tuple(names), train_images, train_labels, test_images, truth)


def _to_images(array: NDArray[Any], name: str) -> Tensor:
    check_images(array, name)
    images = torch.from_numpy(array)
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()


def _to_labels(array: NDArray[Any], count: int, name: str) -> Tensor:
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be whole numbers, one for each of {count} images, got {array.dtype} {array.shape}"
        )
    labels = torch.from_numpy(array.astype(np.int64))
    if len(labels) and int(labels.min()) < UNLABELED:
        raise ValueError(f"{name} must be at least {UNLABELED} (unknown), got {int(labels.min())}")
    return labels
