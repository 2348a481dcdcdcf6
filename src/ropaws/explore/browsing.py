"""The grid of the page: which images, in which order, a page at a time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore.answer_log import SKIPPED, RefusedError
from ropaws.explore.session import Session
from ropaws.insight.label_errors import SuspectedError

NEAREST = 6  # labeled images beside an image
TOP = 5  # probabilities that are shown
LEAST_TYPICAL = 5  # images that make a class of a group
VIEWS = (
    *("all", "suggested", "unlabeled", "labeled", "out-of-class", "label-errors", "duplicates"),
    *("new-class", "audit", "skipped"),
)
SORTS = ("suggested", "confidence", "in_domain", "name", "suspected", "number")


@dataclass(frozen=True)
class Query:
    """What a person wants to see; see docs/explore.md."""

    view: str = "all"
    predicted: int | None = None
    label: int | None = None
    confidence: tuple[float, float] = (0.0, 1.0)
    in_domain: tuple[float, float] = (0.0, 1.0)
    text: str = ""
    ids: Sequence[int] | None = None
    cluster: int | None = None
    like: int | None = None  # an image: the most similar first
    sort: str = ""
    descending: bool = False
    offset: int = 0
    limit: int = 60


def browse(session: Session, query: Query) -> dict[str, Any]:
    """The images of a page, and how many there are in all."""
    with session.lock:
        total, found = _ordered(session, query)
        page = found[query.offset : query.offset + query.limit]
        notes = _Notes(session, query)
        items = [_item(session, int(number), notes) for number in page]
        return {"total": total, "offset": query.offset, "items": items}


def _ordered(session: Session, query: Query) -> tuple[int, NDArray[np.int64]]:
    """How many images there are, and in order the first of them, as far as the page that is asked for."""
    chosen = _listed(session, query)
    kept = chosen[_passes(session, query)[chosen]]
    shown = query.offset + query.limit
    by_like = query.like is not None and query.sort in ("", "suggested")
    if query.sort in ("", "suggested", "suspected") and not by_like:  # views come in their own order
        return len(kept), kept[::-1] if query.descending else kept
    keys: NDArray[Any]
    if by_like:
        assert query.like is not None
        keys = -_similarity(session, query.like)[kept]
    elif query.sort == "name":
        keys = session.pool.rank[kept]
    else:
        values: dict[str, NDArray[Any]] = {
            "confidence": session.confidence,
            "in_domain": session.fitted.in_class,
            "number": np.arange(len(session.pool)),
        }
        keys = values[query.sort][kept]
    return len(kept), kept[_smallest(-keys if query.descending else keys, shown)]


def _smallest(keys: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Positions of the smallest keys in order, equal ones as they come: of a million not all are sorted."""
    if count >= len(keys):
        return np.argsort(keys, kind="stable")
    near = np.flatnonzero(keys <= np.partition(keys, count)[count])
    return near[np.argsort(keys[near], kind="stable")]


def _listed(session: Session, query: Query) -> NDArray[np.int64]:
    """Images of a view, in its order."""
    codes, view = session.codes, query.view
    if view == "suggested":
        numbers: Any = session.suggested()
    elif view == "label-errors":
        numbers = session.suspects()
    elif view == "audit":
        numbers = session.open_audit()
    elif view == "new-class":
        numbers = _cluster(session, query.cluster)
    elif view == "duplicates":
        members = np.flatnonzero(session.duplicates >= 0)
        numbers = members[np.argsort(session.duplicates[members], kind="stable")]
    elif view == "unlabeled":
        numbers = np.flatnonzero(codes == UNLABELED)
    elif view == "labeled":
        numbers = np.flatnonzero(codes >= 0)
    elif view == "skipped":
        numbers = np.flatnonzero(codes == SKIPPED)
    elif view == "out-of-class":  # as answered, or as predicted
        numbers = session.outside()
    else:
        numbers = np.arange(len(session.pool))
    return np.asarray(numbers, np.int64)


def _cluster(session: Session, number: int | None) -> list[int]:
    """Images of a likely new class that have no answer yet; of all of them without a number."""
    clusters = session.fitted.groups
    if number is not None and not 0 <= number < len(clusters):
        raise RefusedError(f"there is no cluster {number} any more")
    chosen = clusters if number is None else [clusters[number]]
    members = [int(row) for cluster in chosen for row in cluster.members]
    return [row for row in members if session.codes[row] == UNLABELED]


def _passes(session: Session, query: Query) -> NDArray[np.bool_]:
    kept = np.ones(len(session.pool), bool)
    for values, (low, high) in (
        (session.confidence, query.confidence),
        (session.fitted.in_class, query.in_domain),
    ):
        if (low, high) != (0.0, 1.0):
            kept &= (values >= low) & (values <= high)
    if query.predicted is not None:
        kept &= session.predicted == query.predicted
    if query.label is not None:
        kept &= session.codes == query.label
    if query.text:
        wanted = query.text.casefold()
        kept &= np.array([wanted in name for name in session.pool.folded], bool)
    if query.ids is not None:
        among = np.zeros(len(kept), bool)
        among[[number for number in query.ids if 0 <= number < len(kept)]] = True
        kept &= among
    return kept


class _Notes:
    """A line beside an image: why it is in the view."""

    def __init__(self, session: Session, query: Query) -> None:
        self.session = session
        self.view = query.view
        self.suggestions = {each.position: each for each in session.fitted.suggestions}
        self.suspects = set(session.suspects())

    def of(self, number: int) -> tuple[str | None, int | None]:
        """The line, and the class that a suspected error should have."""
        fitted = self.session.fitted
        if number in self.suspects:
            return self._suspected(fitted.suspects[number])
        if self.view == "suggested" and (found := self.suggestions.get(number)) is not None:
            count = f"stands for {found.stands_for:,} images" if found.stands_for > 1 else "alone of its kind"
            if not fitted.classes:
                return count, None
            return f"{count}; in-class {found.in_class:.0%}", None
        group = int(self.session.duplicates[number])
        if self.view == "duplicates" and group >= 0 and group != number:
            return f"near duplicate of {_short(self.session.pool.names[group])}", None
        return None, None

    def _suspected(self, error: SuspectedError) -> tuple[str, int]:
        ids = self.session.fitted.classes
        other = OUT_OF_CLASS if error.suspected == OUT_OF_CLASS else ids[error.suspected]
        names = self.session.answers.classes | {OUT_OF_CLASS: "out-of-class"}
        return f"other labels say {names.get(other, 'another class')} ({error.other:.0%})", other


def _item(session: Session, number: int, notes: _Notes) -> dict[str, Any]:
    note, other = notes.of(number)
    group = int(session.duplicates[number])
    return {
        "id": number,
        "name": _printable(session.pool.names[number]),
        "label": int(session.codes[number]),
        "predicted": int(session.predicted[number]),
        "confidence": round(float(session.confidence[number]), 4),
        "in_domain": round(float(session.fitted.in_class[number]), 4),
        "note": note,
        "group": None if group < 0 else group,
        "suggest": other,
    }


def _check_number(session: Session, number: int) -> None:
    if not 0 <= number < len(session.pool):
        raise RefusedError(f"images have numbers from 0 to {len(session.pool) - 1}, got {number}")


def _similarity(session: Session, number: int) -> NDArray[np.float32]:
    """Cosine of the features of all images to those of one.   ->  (n,)"""
    _check_number(session, number)
    points, lengths = session.pool.points, session.pool.lengths
    found: NDArray[np.float32] = (points @ points[number] / (lengths * lengths[number])).numpy()
    return found


def details(session: Session, number: int) -> dict[str, Any]:
    """All that is known of one image."""
    _check_number(session, number)
    with session.lock:
        fitted, names = session.fitted, session.answers.classes
        probs: list[dict[str, Any]] = []
        if fitted.classes:
            row = fitted.probs[number]
            best = np.argsort(-row, kind="stable")[:TOP]
            ids = [fitted.classes[place] for place in best]
            probs = [
                {"id": key, "name": names.get(key, ""), "p": round(float(row[place]), 4)}
                for key, place in zip(ids, best, strict=True)
            ]
        item = _item(session, number, _Notes(session, Query(view="suggested")))
        return item | {"probs": probs, "nearest": _nearest(session, number)}


def _nearest(session: Session, number: int) -> list[dict[str, Any]]:
    """The labeled images that are most like it."""
    labeled = np.flatnonzero(session.codes >= 0)
    labeled = labeled[labeled != number]
    if len(labeled) == 0:
        return []
    similar = torch.from_numpy(_similarity(session, number)[labeled])
    best = similar.topk(min(NEAREST, len(labeled)))
    return [
        {
            "id": int(labeled[place]),
            "name": _printable(session.pool.names[int(labeled[place])]),
            "label": int(session.codes[labeled[place]]),
            "similarity": round(value, 4),
        }
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def new_class_list(session: Session) -> list[dict[str, Any]]:
    """Groups of likely out-of-class images that have no answer yet, the largest first.

    typical: the images that make a class of a group, as many as the class with the most labels has
    """
    with session.lock:
        counts = Counter(session.codes[session.codes >= 0].tolist())
        count = max(LEAST_TYPICAL, *counts.values()) if counts else LEAST_TYPICAL
        found = []
        for number in range(len(session.fitted.groups)):
            members = _cluster(session, number)
            if members:
                found.append({"cluster": number, "size": len(members), "typical": members[:count]})
        return sorted(found, key=lambda each: -each["size"])


def _printable(name: str) -> str:
    """A name that is not UTF-8 can be shown, too."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _short(name: str) -> str:
    return _printable(name).rsplit("/", 1)[-1]
