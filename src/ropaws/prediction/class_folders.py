"""Names of folders and files for sorted images: one folder per class, whatever the class is called."""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

OUT_OF_CLASS = "out-of-class"
LONGEST = 255  # bytes that most file systems allow for a name
# Separators, control characters, and halves of characters that no file system can store.
_UNFIT = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
_MARKED = re.compile(r"~[0-9a-f]{8}$")


def class_folders(labels: Iterable[str]) -> dict[str, str]:
    """The folder of each label. No two share one, also where upper and lower case are the same.

    A label that can be a folder's name is one. Any other is made fit, and gets a mark of its own: a/b and
    a\\b become a_b~ with different endings.

    Raises:
        ValueError: Two labels have the same mark, which does not happen by chance.
    """
    labels = tuple(dict.fromkeys(labels))
    fit = {label: _fit(label) for label in labels}
    spelled = Counter(alike(label) for label in labels if fit[label] == label)
    spelled[alike(OUT_OF_CLASS)] += 1
    folders: dict[str, str] = {}
    owners: dict[str, str] = {}
    for label in labels:
        is_own = fit[label] == label and spelled[alike(label)] == 1 and not _MARKED.search(label)
        folders[label] = label if is_own else _marked(fit[label], label)
        other = owners.setdefault(alike(folders[label]), label)
        if other != label:
            raise ValueError(f"classes {other!r} and {label!r} need the same folder; rename one of them")
    return folders


def alike(name: str) -> str:
    """Equal for names that some file system takes for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).rstrip(". ")


def _fit(label: str) -> str:
    name = shortened(_UNFIT.sub("_", label).strip())
    return f"_{name}" if name == "" or name.startswith(".") else name  # listings leave out hidden folders


def _marked(name: str, label: str) -> str:
    digest = hashlib.blake2b(label.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return shortened(name, f"~{digest}")


def numbered(name: str, number: int) -> str:
    """The name of a file whose own name is taken; the first one keeps its name."""
    stem, suffix = os.path.splitext(name)
    return shortened(stem, suffix if number == 1 else f" ({number}){suffix}")


def shortened(name: str, ending: str = "") -> str:
    """Name and ending, the name cut so that both fit."""
    room = LONGEST - len(os.fsencode(ending))
    name = name[:LONGEST]
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return name + ending
