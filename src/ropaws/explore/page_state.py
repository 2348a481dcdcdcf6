"""What the page knows of a session: small facts of its state, and packed columns of all images."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore import fitting
from ropaws.explore.answer_log import SKIPPED
from ropaws.explore.session import AUDIT, Session, accuracy_facts
from ropaws.insight.accuracy_estimate import audit_half_width

ENOUGH_LABELS = 4  # per class; fewer are pointed out


def state(session: Session, tab: str) -> dict[str, Any]:
    """All small facts; see docs/explore.md."""
    with session.lock:
        own, guessed = _counted(session.codes), _counted(session.predicted)
        job, entry = session.jobs.shown(), session.log.last_undoable(tab)
        classes = [
            {"id": number, "name": name, "labels": own[number], "predicted": guessed[number]}
            for number, name in session.answers.classes.items()
        ]
        return {
            "session": session.id,
            "pool": session.pool_id,
            "title": session.pool.title,
            "read_only": session.read_only,
            "images": len(session.pool),
            "revision": session.log.revision,
            "round": session.round,
            "model_version": session.model_version,
            "map_version": session.map_version,
            "classes": classes,
            "counts": {
                "labeled": sum(own[number] for number in session.answers.classes),
                "out_of_class": own[OUT_OF_CLASS],
                "outside": len(session.outside()),
                "skipped": own[SKIPPED],
                "unlabeled": own[UNLABELED],
                "suspected": len(session.suspects()),
                "duplicates": int((session.duplicates >= 0).sum()),
                "suggested": len(session.suggested()),
                "audit": len(session.open_audit()),
            },
            "job": job and {
                "kind": job.kind,
                "text": job.text,
                "fraction": job.fraction,
                "cancellable": job.cancellable,
            },
            "error": session.table_error or session.error,
            "failures": session.failures,
            "notice": session.notice,
            "undo": entry and session.describe(entry),
            "auto_refit": session.auto_refit,
            "pending": session.pending,
            "panel": _panel(session, classes),
        }  # fmt: skip


def _panel(session: Session, classes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    estimate = fitting.estimate_facts(session.fitted.accuracy)
    audit, left, right = session.answers.audit, len(session.open_audit()), session.answers.audit_right()
    expected = 0.5 if estimate is None or estimate["accuracy"] is None else estimate["accuracy"]
    waiting = set(session.suggested())
    likely = [s.in_class for s in session.fitted.suggestions if s.position in waiting]
    return {
        "rounds": [
            {"round": number, **accuracy_facts(None), **facts}
            for number, facts in enumerate(session.answers.rounds, start=1)
        ],
        "few": [
            {**{key: each[key] for key in ("id", "name", "labels")}, "wanted": ENOUGH_LABELS}
            for each in classes
            if each["labels"] < ENOUGH_LABELS
        ],
        "estimate": estimate,
        "audit": {
            "answered": len(audit) - left,
            "of": len(audit),
            "within": _points(audit_half_width(len(audit), expected)),
            "right": sum(right),
            "predicted": len(right),
        }
        if audit
        else None,
        "audit_offer": {"images": AUDIT, "within": _points(audit_half_width(AUDIT, expected))},
        "expected_in_class": sum(likely) if session.fitted.classes and likely else None,
        "frequencies": _frequencies(session),
    }


def _frequencies(session: Session) -> list[dict[str, Any]]:
    """Of the classes, estimated, the largest first; none once a class is gone, until the refit."""
    found, names = session.fitted.frequencies, session.answers.classes
    if not found.keys() <= names.keys():
        return []
    ranked = sorted(found.items(), key=lambda pair: -pair[1].estimate)
    return [{"id": number, "name": names[number], **share._asdict()} for number, share in ranked]


def columns(session: Session) -> tuple[bytes, str]:
    """What the map needs of every image, and the version of it."""
    with session.lock:
        suspected = np.zeros(len(session.pool), np.uint8)
        suspected[session.suspects()] = 1
        parts = (
            session.plane[:, 0].astype("<f4"),
            session.plane[:, 1].astype("<f4"),
            session.predicted.astype("<i2"),
            session.codes.astype("<i2"),
            (255 * session.confidence).round().astype(np.uint8),
            (255 * session.fitted.in_class).round().astype(np.uint8),
            suspected,
            (session.duplicates >= 0).astype(np.uint8),
        )
        version = f"{session.id}-{session.log.revision}-{session.model_version}-{session.map_version}"
        return b"".join(part.tobytes() for part in parts), version


def _counted(codes: NDArray[np.int16]) -> Counter[int]:
    numbers, counts = np.unique(codes, return_counts=True)
    return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def _points(share: float) -> int:
    return round(100 * share)
