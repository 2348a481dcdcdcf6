"""Images of a Hugging Face dataset that was saved to disk. Nothing outside its folder is opened.

An image column can hold bytes, or a path or an address that the datasets library would open: a file of the
person who reads it, or a server of the person who wrote it. Here only bytes count.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

from ropaws.core.files import read_json
from ropaws.core.labels import class_name
from ropaws.pool.array_files import label_name

STATE = "state.json"


class DatasetRow(NamedTuple):
    """One image of a saved dataset."""

    folder: Path
    column: str
    row: int

    def __str__(self) -> str:
        return f"{self.folder}#{self.row}"

    def encoded(self) -> bytes:
        """The image as it is stored, such as a JPEG."""
        value = _undecoded(self.folder, self.column)[self.row][self.column]
        content = value.get("bytes") if isinstance(value, dict) else None
        if not isinstance(content, bytes):
            place = value.get("path") if isinstance(value, dict) else None
            raise ValueError(
                f"the image is not in the dataset, which names {place!r} instead; save it again, with its"
                " images embedded"
            )
        return content


def is_dataset(folder: Path) -> bool:
    """Was this folder written by save_to_disk of Hugging Face datasets?"""
    return (folder / STATE).is_file() or (folder / "dataset_dict.json").is_file()


@functools.lru_cache(maxsize=8)
def load_dataset(folder: Path) -> Any:
    """The dataset; its columns are decoded when they are asked for, which only _undecoded may do.

    Raises:
        ValueError: It cannot be read, or names files outside its folder.
    """
    if not (folder / STATE).is_file():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"{folder} holds several splits; name one of them: {folder}/... ({splits})")
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{folder}: saved datasets need pip install 'ropaws[huggingface]'") from None
    _check_files(folder)
    try:
        return datasets.load_from_disk(str(folder)).with_format(None)
    except Exception as error:  # the library raises nearly anything on damaged files
        raise ValueError(
            f"{folder} is not a readable saved dataset ({error!s:.200}); save it again"
        ) from None


def _check_files(folder: Path) -> None:
    """Raise an error unless the dataset is made of files in its own folder."""
    if "::" in str(folder):  # the library would take it for a chain of addresses
        raise ValueError(f"{folder}: the path of a saved dataset must not contain '::'; rename the folder")
    state = read_json(folder / STATE)
    parts = state.get("_data_files") if isinstance(state, dict) else None
    listed = parts if isinstance(parts, list) else [None]
    names = [part["filename"] for part in listed if isinstance(part, dict) and "filename" in part]
    if len(names) < len(listed) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder / STATE} does not list the files of a saved dataset; save it again")
    for name in names:
        place = folder / name
        if Path(name).name != name or place.resolve().parent != folder.resolve() or not place.is_file():
            raise ValueError(
                f"{folder / STATE} names {name!r}, which is not a file of that folder; save it again"
            )


@functools.lru_cache(maxsize=8)
def _undecoded(folder: Path, column: str) -> Any:
    """The image column alone, as it is stored."""
    import datasets

    alone = load_dataset(folder).select_columns([column])
    return alone.cast_column(column, datasets.Image(decode=False))


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
    if kinds[label] not in ("ClassLabel", "Value"):
        raise ValueError(f"{folder}: column {label!r} must be class numbers or names, got {kinds[label]}")
    names = list(map(class_name, dataset.features[label].names)) if kinds[label] == "ClassLabel" else None
    return rows, [label_name(value, names, folder) for value in dataset[label]]
