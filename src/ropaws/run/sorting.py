"""Images sorted into folders: each of them whole, in one place, and none overwritten.

Moving to another device is copying and deleting. A call that is killed, or finds the disk full, in between
must leave neither half an image under its final name nor the image in both places for good. So an image is
copied under a name of its own and renamed when it is whole, and what a call is about to move is written down
first: the next call takes back the one move that was not finished, and moves what is left.
"""

import contextlib
import errno
import filecmp
import hashlib
import itertools
import os
import re
import secrets
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ropaws.core.files import read_json, refuse_link, write_json
from ropaws.core.labels import OUT_OF_CLASS_NAME, class_name

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
    spelled[alike(OUT_OF_CLASS_NAME)] += 1
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
    return class_name(class_name(name).casefold()).rstrip(". ")


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


PLAN = ".ropaws-moves.json"  # in the target folder, while images are moved
PART = ".ropaws-*.part"  # images that are not whole yet
_NUMBER = re.compile(r" \(\d+\)(?=\.[^.]*$|$)")
FAMILY = 50  # characters of a name that no number takes away
LINKS = 40  # steps from link to link, at most


class Move(NamedTuple):
    """An image, and where it goes."""

    source: Path
    place: Path


class Sorter:
    """Puts images into the folder of their class, or of none. A name that is taken gets a number.

    Args:
        target: The folder of the folders.
        class_names: All classes.
        sources: All images that may be sorted.
        move: Instead of copying. What an earlier call has left unfinished is made good.
        check: Called with each copy before it gets its name; an error that it raises ends the call.

    Raises:
        ValueError: Images cannot be moved: a link would lead nowhere, or an image is named twice.
        OSError: Images cannot be taken from their folder.
    """

    def __init__(
        self,
        target: Path,
        class_names: Sequence[str],
        sources: Sequence[Path],
        *,
        move: bool,
        check: Callable[[Path], object] | None = None,
    ) -> None:
        self._target = target
        self._folders = class_folders(class_names)
        self._shelves: dict[str, _Shelf] = {}
        self._moves: list[Move] = []
        self._move, self._check = move, check
        self._open: list[Move] = []  # of earlier calls, on other images: still in both places
        if move:
            check_movable(sources)
            self._take_back({os.path.abspath(source) for source in sources})
        self._sweep()

    def plan(self, source: Path, label: str | None) -> Path:
        """Where an image of this class, or of none, will go; nothing is touched yet."""
        folder = OUT_OF_CLASS_NAME if label is None else self._folders[label]
        if folder not in self._shelves:
            self._shelves[folder] = _Shelf(self._target / folder)
        shelf = self._shelves[folder]
        if shelf.holds(source):
            return source
        twin = None if self._move else shelf.take_twin(source)
        if twin is not None:
            return twin
        place = shelf.free_place(source.name)
        self._moves.append(Move(source, place))
        return place

    def carry_out(self) -> None:
        """Move or copy what was planned.

        Raises:
            OSError: An image cannot be moved, such as when the disk is full. Call again with the rest.
        """
        for folder in {move.place.parent for move in self._moves}:
            folder.mkdir(parents=True, exist_ok=True)
        if not self._move:
            for source, place in self._moves:
                copy_whole(source, place, self._check)
            return
        if self._moves:
            self._write_plan([*self._open, *self._moves])
        for source, place in self._moves:
            move_file(source, place)
        if self._open:
            self._write_plan(self._open)
        else:
            (self._target / PLAN).unlink(missing_ok=True)

    def _write_plan(self, moves: Iterable[Move]) -> None:
        write_json(
            self._target / PLAN, [[os.path.abspath(source), os.path.abspath(p)] for source, p in moves]
        )

    def _take_back(self, sources: set[str]) -> None:
        """Remove the later one of an image that a killed call has left in both places.

        The plan is believed only where it names images of this call and places below the target: it may have
        been put there by someone else.
        """
        for move in read_plan(self._target / PLAN):
            is_ours = str(move.place.parent.parent) == os.path.abspath(self._target)
            if is_ours and os.path.lexists(move.source) and os.path.lexists(move.place):
                if str(move.source) not in sources:
                    self._open.append(move)
                elif _is_same(move.source, move.place):
                    move.place.unlink()

    def _sweep(self) -> None:
        """Remove what a killed call has begun to write."""
        folders = [self._target / name for name in (*self._folders.values(), OUT_OF_CLASS_NAME)]
        parts = itertools.chain.from_iterable(folder.glob(PART) for folder in folders)
        for part in (*parts, *self._target.glob(f".{PLAN}.*.tmp")):
            part.unlink()


class _Shelf:
    """One folder: the names that are taken, and the files by content for those that may be there already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._real = os.path.realpath(folder)
        names = os.listdir(folder) if folder.is_dir() else []
        self._taken = {alike(name) for name in names}
        self._next: dict[str, int] = {}
        # Files by the name that they had before they got a number.
        self._families: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            for family in {_family(name), _family(_NUMBER.sub("", name))}:
                self._families[family].append(name)
        self._twins: dict[tuple[str, int], dict[bytes, dict[str, None]]] = {}
        self._claimed: set[str] = set()

    def holds(self, source: Path) -> bool:
        return source.exists() and os.path.realpath(source.parent) == self._real

    def take_twin(self, source: Path) -> Path | None:
        """A copy of the source from an earlier call; each counts once."""
        family, size = _family(source.name), source.stat().st_size
        if family not in self._families:
            return None
        if (family, size) not in self._twins:
            self._twins[family, size] = self._by_content(family, size)
        if not self._twins[family, size]:
            return None
        names = self._twins[family, size].get(_content(source), {})
        while names:
            name = source.name if source.name in names else next(reversed(names))
            del names[name]
            if name not in self._claimed:
                self._claimed.add(name)
                return self._folder / name
        return None

    def _by_content(self, family: str, size: int) -> dict[bytes, dict[str, None]]:
        found: defaultdict[bytes, dict[str, None]] = defaultdict(dict)
        for name in sorted(self._families[family], reverse=True):
            path = self._folder / name
            if path.is_file() and path.stat().st_size == size:
                found[_content(path)][name] = None
        return dict(found)

    def free_place(self, name: str) -> Path:
        """A place that neither a file nor an earlier plan has taken."""
        number = self._next.get(alike(name), 1)
        while alike(numbered(name, number)) in self._taken:
            number += 1
        self._next[alike(name)] = number + 1
        place = numbered(name, number)
        self._taken.add(alike(place))
        return self._folder / place


def _family(name: str) -> str:
    """Equal for a name and what is left of it when it was too long for a number."""
    return alike(name)[:FAMILY]


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


# Moving and copying one file


def move_file(source: Path, place: Path) -> None:
    """Move a file or a link. At any moment the image is whole, at its source or at its place, or at both."""
    _refuse_taken(place)
    if source.is_symlink():
        _copy_link(source, place)
    else:
        try:
            os.rename(source, place)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:  # another device
                raise
        copy_whole(source, place, to_disk=True)
    try:
        source.unlink()
    except OSError:
        place.unlink()
        raise


def copy_whole(
    source: Path, place: Path, check: Callable[[Path], object] | None = None, *, to_disk: bool = False
) -> None:
    """Copy a file: under its final name it is whole, or not there at all. to_disk: wait for the device."""
    with _appearing(place) as part:
        shutil.copy2(source, part)
        if check is not None:
            check(part)
        if to_disk:
            with part.open("rb") as file:
                os.fsync(file.fileno())


def _copy_link(source: Path, place: Path) -> None:
    """A link that leads to the same file: a relative one is written anew."""
    leads_to = os.readlink(source)
    if not os.path.isabs(leads_to):
        leads_to = os.path.relpath(_identity(source.parent / leads_to), os.path.realpath(place.parent))
    with _appearing(place) as part:
        part.symlink_to(leads_to)


@contextlib.contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """A name to write to; what is there takes its place when the block ends without an error."""
    part = place.with_name(PART.replace("*", secrets.token_hex(8)))
    try:
        yield part
        _refuse_taken(place)
        os.rename(part, place)
    finally:
        part.unlink(missing_ok=True)


def _refuse_taken(place: Path) -> None:
    if os.path.lexists(place):
        raise FileExistsError(f"{place} has been created by someone else meanwhile; call again")


# What can be moved, and what an earlier call was about to move


def check_movable(sources: Iterable[Path]) -> None:
    """Raise an error if moving these images would lose one: see Sorter."""
    real: dict[Path, str] = {}  # folder: without links
    images: dict[str, Path] = {}
    for source in sources:
        if source.parent not in real:
            real[source.parent] = os.path.realpath(source.parent)
            if not os.access(source.parent, os.W_OK | os.X_OK):
                raise PermissionError(
                    f"--move-to: images cannot be taken from {source.parent}; use --copy-to"
                )
        place = os.path.join(real[source.parent], source.name)
        if place in images:
            raise ValueError(
                f"--move-to: {images[place]} and {source} are the same file, by a link between folders; name"
                " one of them"
            )
        images[place] = source
    for place, source in images.items():
        if os.path.islink(place) and any(step in images for step in _steps(place)):
            raise ValueError(
                f"--move-to: {source} is a link to an image that is moved too; remove the link, or use"
                " --copy-to"
            )


def _steps(link: str) -> Iterator[str]:
    """The files that a link leads to, one after the other."""
    for _ in range(LINKS):
        if not os.path.islink(link):
            return
        link = _identity(Path(link).parent / os.readlink(link))
        yield link


def _identity(path: Path) -> str:
    """The path without links between folders; the file itself may be one."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def read_plan(path: Path) -> list[Move]:
    """The moves of a call that was not finished; none if there is no such file.

    Raises:
        ValueError: The file is not such a plan.
    """
    refuse_link(path)
    if not path.is_file():
        return []
    found = read_json(path)
    rows: list[Any] = found if isinstance(found, list) else [None]
    if not all(isinstance(row, list) and list(map(type, row)) == [str, str] for row in rows):
        raise ValueError(f"{path} is not a list of moves; remove it")
    return [Move(Path(os.path.normpath(source)), Path(os.path.normpath(place))) for source, place in rows]


def _is_same(source: Path, place: Path) -> bool:
    """Two files with the same content, or two links to the same file; not one file by two names."""
    if source.is_symlink() or place.is_symlink():
        both = source.is_symlink() and place.is_symlink()
        return both and os.path.realpath(source) == os.path.realpath(place)
    return not os.path.samefile(source, place) and filecmp.cmp(source, place, shallow=False)
