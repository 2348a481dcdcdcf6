"""What is known of an image: the codes of labels, in memory as in files, and the names of classes."""

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

UNLABELED = -1  # nobody has said what it is
OUT_OF_CLASS = -2  # it belongs to none of the classes


OUT_OF_CLASS_NAME = "out-of-class"  # the verdict on an image of no class, in tables, folders and on pages


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar of the known names."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0)[0]


def class_name(name: str) -> str:
    """The name of a class in the one spelling in which names are compared: Unicode has two for an accented
    letter, and file systems differ in which of them they keep.
    """
    return unicodedata.normalize("NFC", name)


def is_verdict(name: str) -> bool:
    """Would a class of this name be taken for the verdict?"""
    return class_name(name).casefold() == OUT_OF_CLASS_NAME


def class_names_of(labels: Iterable[str | None]) -> tuple[str, ...]:
    """The classes of labels in order; neither no label nor the verdict is one."""
    return tuple(sorted({label for label in labels if label and label != OUT_OF_CLASS_NAME}))


def label_codes(labels: Iterable[str | None], names: Sequence[str], *, others: int = UNLABELED) -> list[int]:
    """The class number of each label, OUT_OF_CLASS for the verdict; others: of all that is neither."""
    number = {name: place for place, name in enumerate(names)} | {OUT_OF_CLASS_NAME: OUT_OF_CLASS}
    return [number.get(label or "", others) for label in labels]


def refuse_verdict(names: Iterable[str], place: Path | str) -> None:
    """Raise an error for a class that could not be told from the verdict."""
    for name in names:
        if is_verdict(name):
            raise ValueError(
                f"{place} has a class named {name!r}, which is the verdict on images of no class; rename the"
                " class, or, if its images belong to no class, give them as unlabeled ones"
            )
