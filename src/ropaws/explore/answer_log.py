"""What a person has said of images: an append-only log on disk, and the state that follows from it.

Every answer is one line of JSON, written and flushed to the disk before it counts. The state is what remains
when all lines are applied in order, without those that a later line takes back. So undo survives a restart,
and several tabs cannot overwrite each other: each only adds lines.
"""

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, class_name, is_verdict

try:
    import fcntl
except ImportError:  # Windows: two servers on one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

SKIPPED = -3  # the person could not tell, or did not want to
UNDOABLE = ("label", "confirm", "class", "merge", "delete")
OF_IMAGES = ("label", "confirm")  # they change what is known of their images, and nothing else
LONGEST_NAME = 100  # characters of a class name
MOST_CLASSES = 1000
MOST_ID = 32_767  # of a class
MOST_GAP = 1000  # lost lines in a row

Entry = dict[str, Any]


class RefusedError(ValueError):
    """What was asked for is not possible now; the message says why."""


class Recent(NamedTuple):
    """An answer that no round knows yet."""

    entry: int  # its place in the log
    right: list[bool]  # whether the prediction was, for each image that had one


@dataclass
class Answers:
    """What follows from the log. Images are known by name: their numbers change when files are added."""

    classes: dict[int, str] = field(default_factory=dict)  # name by id, in the order in which they were made
    labels: dict[str, int] = field(default_factory=dict)  # class id, OUT_OF_CLASS or SKIPPED by image
    confirmed: set[str] = field(default_factory=set)  # whose suspected label is right
    audits: list[list[str]] = field(default_factory=list)  # images of each random sample, in their order
    rounds: list[Entry] = field(default_factory=list)  # facts about each refit
    right: dict[str, bool] = field(default_factory=dict)  # was the prediction, when the image was answered
    exports: dict[str, Entry] = field(default_factory=dict)  # facts about what was written, by name
    recent: list["Recent"] = field(default_factory=list)  # answers since the last round was begun

    @property
    def audit(self) -> list[str]:
        """Images of the last random sample."""
        return self.audits[-1] if self.audits else []

    def audit_right(self) -> list[bool]:
        """Of the images of the last random sample that had a prediction: was it right?"""
        return [self.right[image] for image in self.audit if image in self.right and image in self.labels]

    def audited(self) -> set[str]:
        """Images that speak for the pool: of each sample those before the first without an answer.

        Any beginning of a random order is a random sample; what was answered here and there in it is not.
        """
        found: set[str] = set()
        for images in self.audits:
            found.update(itertools.takewhile(lambda image: image in self.labels, images))
        return {image for image in found if self.labels[image] != SKIPPED}

    @property
    def right_since(self) -> list[bool]:
        """Of the images with a prediction that were answered since the last round was begun: was it right?"""
        return [right for answer in self.recent for right in answer.right]

    def replace(self, images: set[str], other: "Answers") -> None:
        """Take what another state says of these images."""
        for mine, theirs in ((self.labels, other.labels), (self.right, other.right)):
            for image in images:
                mine.pop(image, None)
                if image in theirs:
                    mine[image] = theirs[image]  # type: ignore[assignment]
        self.confirmed = self.confirmed - images | other.confirmed & images

    def apply(self, entry: Entry) -> None:
        getattr(self, f"_{entry['do']}")(entry)

    def _label(self, entry: Entry) -> None:
        self._give(entry["images"], entry["label"])
        right: dict[str, bool] = {}
        if entry["label"] >= 0 or entry["label"] == OUT_OF_CLASS:
            said = zip(entry["images"], entry.get("said", ()), strict=False)
            right = {image: guess == entry["label"] for image, guess in said if guess != UNLABELED}
        self.right.update(right)
        if right and entry["tab"]:  # labels that the images came with are nobody's answers
            self.recent.append(Recent(entry["n"], list(right.values())))

    def _give(self, images: Sequence[str], label: int) -> None:
        if label >= 0 and label not in self.classes:
            return  # of a class that is gone
        for image in images:
            self.confirmed.discard(image)
            if label == UNLABELED:
                self.labels.pop(image, None)
            else:
                self.labels[image] = label

    def _confirm(self, entry: Entry) -> None:
        unconfirmed = (UNLABELED, SKIPPED)
        self.confirmed.update(i for i in entry["images"] if self.labels.get(i, UNLABELED) not in unconfirmed)

    def _class(self, entry: Entry) -> None:
        self.classes[entry["id"]] = class_name(entry["name"])
        if entry.get("images"):
            self._label({**entry, "label": entry["id"]})

    def _merge(self, entry: Entry) -> None:
        if entry["id"] not in self.classes or entry["into"] not in self.classes:
            return
        del self.classes[entry["id"]]
        for image, label in self.labels.items():
            if label == entry["id"]:
                self.labels[image] = entry["into"]

    def _delete(self, entry: Entry) -> None:
        """A class is no more; its images have no answer."""
        self.classes.pop(entry["id"], None)
        self._give([image for image, label in self.labels.items() if label == entry["id"]], UNLABELED)

    def _audit(self, entry: Entry) -> None:
        self.audits.append(list(entry["images"]))

    def _round(self, entry: Entry) -> None:
        self.rounds.append(entry["facts"])
        self.recent = [answer for answer in self.recent if answer.entry >= entry["upto"]]

    def _estimate(self, entry: Entry) -> None:
        if self.rounds:
            self.rounds[-1] = {**self.rounds[-1], **entry["facts"]}

    def _export(self, entry: Entry) -> None:
        self.exports[entry["name"]] = entry["facts"]


class AnswerLog:
    """The log of a folder, open for writing by one process.

    Args:
        path: The file; made if it is not there.
        read_only: Nothing is written, not even the file.

    Attributes:
        answers: What follows from the log.
        notices: What was wrong with the file, one line each.

    Raises:
        OSError: The file cannot be opened, or another process has it open.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self.notices: list[str] = []
        self.entries: list[Entry] = []
        self._file = -1 if read_only else self._open()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._read()
            undo.pop_all()
        self._undone = {entry["of"] for entry in self.entries if entry["do"] == "undo"}
        self.answers = self._folded()

    @property
    def revision(self) -> int:
        """Grows with every entry."""
        return len(self.entries)

    def append(self, do: str, tab: str = "", **facts: Any) -> Entry:
        """Add an entry: on disk first, then in the state.

        Raises:
            OSError: It could not be written, for instance because the disk is full; nothing has changed.
        """
        if self.read_only:
            raise RefusedError("this is read-only: started with --read-only")
        entry = {"n": len(self.entries), "time": _now(), "tab": tab, "do": do, **facts}
        self._write(entry)
        self.entries.append(entry)
        if do == "undo":
            self._undone.add(entry["of"])
            self._take_back(self.entries[entry["of"]])
        else:
            self.answers.apply(entry)
        return entry

    def take_over(self, do: str, **facts: Any) -> None:
        """As append, by nobody: kept where answers are kept, shown where nothing is written."""
        if not self.read_only:
            self.append(do, "", **facts)
            return
        entry = {"n": len(self.entries), "time": _now(), "tab": "", "do": do, **facts}
        self.entries.append(entry)
        self.answers.apply(entry)

    def answers_before(self, revision: int) -> int:
        """Images that entries before this one have answered, again or undone later as well: it only grows."""
        given = (entry for entry in self.entries[:revision] if entry["do"] in ("label", "class"))
        return sum(len(entry.get("images") or ()) for entry in given)

    def last_undoable(self, tab: str) -> Entry | None:
        """What undo of a tab takes back: its own last entry. A tab without any takes back the last of all."""
        own = next((entry for entry in self._undoable() if entry["tab"] == tab), None)
        if own is None and not any(entry["tab"] == tab for entry in self.entries):
            return next(self._undoable(), None)
        return own

    def _undoable(self) -> Iterator[Entry]:
        """The last one first."""
        for entry in reversed(self.entries):
            if entry["do"] in UNDOABLE and entry["tab"] and entry["n"] not in self._undone:
                yield entry

    def undo(self, tab: str) -> Entry:
        """Take back what last_undoable says; returns it.

        Raises:
            RefusedError: There is nothing to take back, or later answers need it.
        """
        entry = self.last_undoable(tab)
        if entry is None:
            raise RefusedError("there is nothing to undo in this tab")
        if entry["do"] == "class" and self._is_new(entry) and self._used_after(entry):
            raise RefusedError(
                f"other answers use the class {entry['name']!r}; merge it instead of undoing it"
            )
        if entry["do"] not in OF_IMAGES and self._makes_twins(entry):
            raise RefusedError("undoing this would make two classes of one name; rename one of them first")
        self.append("undo", tab, of=entry["n"])
        return entry

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _is_new(self, entry: Entry) -> bool:
        """Did it make the class, and not rename it?"""
        return not any(e["do"] == "class" and e["id"] == entry["id"] for e in self.entries[: entry["n"]])

    def _makes_twins(self, entry: Entry) -> bool:
        """Would two classes have one name without it?"""
        names = [name.casefold() for name in self._folded(without=entry["n"]).classes.values()]
        return len(names) > len(set(names))

    def _used_after(self, entry: Entry) -> bool:
        number = entry["id"]
        return any(
            number in (e.get("label"), e.get("id"), e.get("into"))
            for e in self.entries[entry["n"] + 1 :]
            if e["do"] in UNDOABLE and e["n"] not in self._undone
        )

    def _folded(self, *, without: int = -1) -> Answers:
        answers = Answers()
        for entry in self.entries:
            if entry["n"] not in self._undone and entry["n"] != without and entry["do"] != "undo":
                answers.apply(entry)
        return answers

    def _take_back(self, entry: Entry) -> None:
        """Make the state that of an undone entry's absence; for a label, from what was said of its images."""
        if entry["do"] not in OF_IMAGES:
            self.answers = self._folded()
            return
        images, found = set(entry["images"]), Answers()
        for other in self.entries:
            is_about_others = other["do"] in OF_IMAGES and images.isdisjoint(other["images"])
            if other["n"] not in self._undone and other["do"] != "undo" and not is_about_others:
                found.apply(other)
        self.answers.replace(images, found)
        self.answers.recent = [answer for answer in self.answers.recent if answer.entry != entry["n"]]

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(self.path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{self.path} is not a regular file; remove it")
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise OSError(
                f"another `ropaws explore` has {self.path.parent} open; use its page, or stop it first"
            ) from None
        except OSError:
            os.close(file)
            raise
        return file

    def _read(self) -> None:
        """All whole entries. A line that was cut at the end is removed: its answer was never confirmed."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self.notices.append(f"{self.path}: the last line was cut, and is left out")
            if not self.read_only:
                os.ftruncate(self._file, whole)
        damaged: list[str] = []
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                entry = _checked(json.loads(line), len(self.entries))
            except (ValueError, RecursionError) as error:
                damaged.append(f"line {number} ({error!s:.100})")
                self._leave_out(len(self.entries) + 1)
                continue
            self._leave_out(entry["n"])  # a line that is gone
            self.entries.append(entry)
        if damaged:
            more = f" and {len(damaged) - 1} others" if len(damaged) > 1 else ""
            self.notices.append(f"{self.path}: damaged and left out: {damaged[0]}{more}")

    def _leave_out(self, upto: int) -> None:
        """Nothing in the place of lost entries: an undo must still find the entry that it means."""
        while len(self.entries) < upto:
            self.entries.append({"n": len(self.entries), "do": "undo", "of": -1, "tab": ""})

    def _write(self, entry: Entry) -> None:
        line = (json.dumps(entry, separators=(",", ":")) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)  # no part of a line stays
            raise OSError(
                error.errno, f"the answer could not be saved in {self.path}: {error.strerror}"
            ) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _checked(entry: object, least: int) -> Entry:
    """An entry of the file, at this place or later; the file may be damaged, or a stranger's."""
    if not isinstance(entry, dict) or type(entry.get("n")) is not int or type(entry.get("tab")) is not str:
        raise ValueError("not an entry")
    if not least <= entry["n"] <= least + MOST_GAP:
        raise ValueError(f"entry {entry['n']} is out of order")
    shapes: Mapping[str, Mapping[str, type]] = {
        "label": {"images": list, "label": int},
        "confirm": {"images": list},
        "class": {"id": int, "name": str},
        "merge": {"id": int, "into": int},
        "delete": {"id": int},
        "undo": {"of": int},
        "audit": {"images": list},
        "round": {"facts": dict, "upto": int},
        "estimate": {"facts": dict},
        "export": {"name": str, "facts": dict},
    }
    do = entry.get("do")
    shape = shapes.get(do) if isinstance(do, str) else None
    if shape is None or any(type(entry.get(name)) is not kind for name, kind in shape.items()):
        raise ValueError("not an entry")
    numbers = [entry[name] for name in ("id", "into", "label") if name in entry]
    if not all(type(number) is int and SKIPPED <= number <= MOST_ID for number in numbers):
        raise ValueError(f"numbers of classes go up to {MOST_ID}")
    images, said = entry.get("images", []), entry.get("said", [])
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError("images must be names")
    for name in (entry.get("name", ""), *images):
        name.encode("utf-8", "surrogateescape")  # raises an error for halves of characters
    if not isinstance(said, list) or not all(type(value) is int for value in said):
        raise ValueError("said must be numbers")
    return entry


def checked_class_name(name: object, taken: Iterator[str] | Sequence[str]) -> str:
    """A name for a class: one line of text, not one that another class has.

    Raises:
        RefusedError: It is not.
    """
    if not isinstance(name, str) or not name.strip():
        raise RefusedError("a class needs a name")
    name = class_name(" ".join(name.split()))
    if len(name) > LONGEST_NAME:
        raise RefusedError(f"a class name has at most {LONGEST_NAME} characters, got {len(name)}")
    if not name.isprintable():
        raise RefusedError("a class name must not have control characters")
    if is_verdict(name) or name.casefold() == "skipped":
        raise RefusedError(f"{name!r} has a meaning of its own; choose another name")
    if name.casefold() in {other.casefold() for other in taken}:
        raise RefusedError(f"there is a class {name!r} already")
    return name
