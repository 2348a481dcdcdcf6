"""Images that are not files of their own: rows of an array in an .npz, rows of a saved dataset."""

import functools
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

IMAGE_ARRAYS, LABEL_ARRAYS = ("images", "train_images"), ("labels", "train_labels")


class ArrayRow(NamedTuple):
    """One image of an array (n, h, w[, 1 or 3]) of uint8."""

    file: Path
    array: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}#{self.row}"

    def open(self) -> Image.Image:
        image = load_arrays(self.file)[self.array][self.row]
        return Image.fromarray(image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image)


class DatasetRow(NamedTuple):
    """One image of a Hugging Face dataset that was saved to disk."""

    folder: Path
    column: str
    row: int

    def __str__(self) -> str:
        return f"{self.folder}#{self.row}"

    def open(self) -> Image.Image:
        value = load_dataset(self.folder)[self.row][self.column]
        return value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value, np.uint8))


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file; kept while it does not change, as rows are asked for one by one."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"no data file at {path}") from None
    return _load_arrays(path, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=8)
def _load_arrays(path: Path, _changed: int, _length: int) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a readable .npz file ({error}); make it again") from None


def list_arrays(path: Path) -> tuple[list[ArrayRow], list[str | None]]:
    """Rows of an .npz, and the label of each: its class name, or None for -1, an empty one, or no labels."""
    path = path.absolute()
    arrays = load_arrays(path)
    images = next((name for name in IMAGE_ARRAYS if name in arrays), None)
    if images is None:
        raise ValueError(f"{path} has no array 'images'; it has {', '.join(arrays) or 'nothing'}")
    check_images(arrays[images], f"{path}: {images}")
    count = len(arrays[images])
    rows = [ArrayRow(path, images, index) for index in range(count)]
    labels = next((arrays[name] for name in LABEL_ARRAYS if name in arrays), None)
    if labels is None:
        return rows, [None] * count
    if labels.shape != (count,):
        raise ValueError(f"{path}: labels must be one for each of {count} images, got {labels.shape}")
    names = [str(name) for name in arrays["class_names"]] if "class_names" in arrays else None
    return rows, [_label(value, names, path) for value in labels.tolist()]


def check_images(array: NDArray[Any], name: str) -> None:
    if (
        array.dtype != np.uint8
        or array.ndim not in (3, 4)
        or (array.ndim == 4 and array.shape[3] not in (1, 3))
    ):
        raise ValueError(
            f"{name} must be uint8 of shape (n, h, w) or (n, h, w, 1 or 3), got {array.dtype} {array.shape}"
        )


def _label(value: object, names: list[str] | None, place: Path) -> str | None:
    """A class number (with names, if there are any) or a class name; -1, None and '' are no label."""
    if value is None or value == -1 or value == "":
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{place}: a label is a name, a class number from 0, or -1 for none, got {value!r}")
    if names is None:
        return str(value)
    if value >= len(names):
        raise ValueError(f"{place}: label {value}, but there are only {len(names)} class names")
    return names[value]


def is_dataset(folder: Path) -> bool:
    """Was this folder written by save_to_disk of Hugging Face datasets?"""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


@functools.lru_cache(maxsize=8)
def load_dataset(folder: Path) -> Any:
    if not (folder / "state.json").is_file():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"{folder} holds several splits; name one of them: {folder}/... ({splits})")
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{folder}: saved datasets need pip install 'ropaws[huggingface]'") from None
    return datasets.load_from_disk(str(folder))


def list_dataset(folder: Path) -> tuple[list[DatasetRow], list[str | None]]:
    """Rows of a saved dataset; the image column and the label column are found by their types."""
    folder = folder.absolute()
    dataset = load_dataset(folder)
    kinds = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    if image is None:
        raise ValueError(f"{folder} has no column of images; it has {', '.join(kinds) or 'none'}")
    rows = [DatasetRow(folder, image, index) for index in range(len(dataset))]
    label = next(
        (n for n, kind in kinds.items() if kind == "ClassLabel"), "label" if "label" in kinds else None
    )
    if label is None:
        return rows, [None] * len(rows)
    names = list(dataset.features[label].names) if kinds[label] == "ClassLabel" else None
    return rows, [_label(value, names, folder) for value in dataset[label]]
