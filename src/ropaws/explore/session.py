"""A person at work on a pool: answers, the classifier of the last round, and what follows from both."""

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.core.files import make_folder
from ropaws.core.labels import OUT_OF_CLASS, OUT_OF_CLASS_NAME, UNLABELED
from ropaws.explore import fitting, layout
from ropaws.explore.answer_log import (
    MOST_CLASSES,
    MOST_ID,
    SKIPPED,
    AnswerLog,
    Answers,
    Entry,
    RefusedError,
    checked_class_name,
)
from ropaws.explore.fitting import Answered, Fitted
from ropaws.explore.images import Thumbnails
from ropaws.explore.jobs import Job, Jobs
from ropaws.explore.label_table import LabelTable
from ropaws.explore.pool import ExploredPool
from ropaws.insight.accuracy_estimate import PoolAccuracy, audit_half_width, draw_audit
from ropaws.insight.neighbors import full_map, near_duplicates, quick_map

LOG, TABLE, THUMBNAILS, MAP = "answers.jsonl", "labels.csv", "thumbnails", "map.npz"
HALF_WRITTEN = re.compile(
    r"\.(labels\.csv|predictions\.[a-z.-]+|map\.npz|images\.npz|train\.log)\.[0-9a-f]{16}\.tmp"
)
ANSWERS_PER_ROUND = 10  # after which the classifier is refitted by itself
FORGOTTEN = -32768  # in the place of an answer whose class was taken out of the classifier
AUDIT = 30  # images of a random sample that is offered


class Session:
    """One pool, one folder, any number of tabs.

    All that changes is guarded by one lock; jobs compute on copies and put their result in place at the end.

    Args:
        pool: What is looked at.
        folder: Where answers are kept.
        read_only: Nothing is changed.
    """

    def __init__(self, pool: ExploredPool, folder: Path, *, read_only: bool = False) -> None:
        self.pool = pool
        self.folder = folder
        self.read_only = read_only
        self.id = secrets.token_hex(8)
        self.lock = threading.RLock()
        if not read_only:
            make_folder(folder)
        self.log = AnswerLog(folder / LOG, read_only=read_only)
        if not read_only:
            _sweep(folder)
        named = "\0".join(pool.names).encode("utf-8", "surrogateescape")
        self.pool_id = hashlib.blake2b(named, digest_size=8).hexdigest()  # numbers of images mean the same
        self.number_of = {name: number for number, name in enumerate(pool.names)}
        self.thumbnails = Thumbnails(pool.images, None if read_only else folder / THUMBNAILS)
        self.table = None if read_only else LabelTable(folder / TABLE, self._set_table_error)
        self.jobs = Jobs(self._failed)
        self.auto_refit = not read_only and not pool.foreign
        self.error: str | None = None
        self.failures = 0  # the page says an error that comes again
        self.table_error: str | None = None
        self.notice: str | None = " ".join(self.log.notices or pool.notes) or None
        if pool.foreign:
            shown = f"Predictions are those of {pool.foreign} until you refit"
            self.notice = ". ".join(filter(None, (self.notice, shown)))
        self.round = 0  # of the classifier that is shown
        self.made_from = ""  # digest of the labels that it was fitted to
        self.model_version = 0
        self.duplicates = np.full(len(pool), -1, np.int32)
        self.plane, self.map_version = quick_map(pool.points), 1
        self.codes = np.full(len(pool), UNLABELED, np.int16)  # class id, OUT_OF_CLASS, SKIPPED or UNLABELED
        self._check_same_images()
        self._take_over()
        self._renumber()
        self.fitted, self._learned = self._first_fit()
        self.predicted, self.confidence = self.fitted.predicted, self.fitted.confidence
        self.write_table()

    # What the person has said

    @property
    def answers(self) -> Answers:
        return self.log.answers

    def _take_over(self) -> None:
        """The labels that images come with become entries of the log, unless it knows these images."""
        answered = {image for entry in self.log.entries for image in entry.get("images") or ()}
        came: dict[str, list[str]] = {}  # images by the label that they came with
        for image, label in zip(self.pool.names, self.pool.labels, strict=True):
            if label is not None and image not in answered:
                came.setdefault(label, []).append(image)
        for name in self.pool.class_names:
            images = came.get(name, [])
            known = {other: number for number, other in self.answers.classes.items()}
            if images or (name not in known and (not self.log.entries or self.pool.foreign)):
                number = known.get(name, self._next_class())
                self.log.take_over("class", id=number, name=name, images=images)
        if outside := came.get(OUT_OF_CLASS_NAME):
            self.log.take_over("label", images=outside, label=OUT_OF_CLASS)

    def _check_same_images(self) -> None:
        """Raise an error if the folder has answers, and all of them are about other images."""
        named = [image for entry in self.log.entries for image in entry.get("images") or ()]
        if named and not any(image in self.number_of for image in named):
            self.close()
            raise ValueError(f"{self.folder} holds answers to other images; choose another folder with --out")

    def _next_class(self) -> int:
        known = (entry["id"] for entry in self.log.entries if entry["do"] == "class")
        number = 1 + max(known, default=-1)
        if number > MOST_ID or len(self.answers.classes) >= MOST_CLASSES:
            raise RefusedError(f"there can be {MOST_CLASSES} classes at most")
        return number

    def _renumber(self) -> None:
        """The state of the log as numbers; images that are not shown any more keep their entries."""
        self.codes = self._numbered(self.answers.labels)

    def _numbered(self, labels: Mapping[str, int]) -> NDArray[np.int16]:
        codes = np.full(len(self.pool), UNLABELED, np.int16)
        for name, label in labels.items():
            number = self.number_of.get(name)
            if number is not None:
                codes[number] = label
        return codes

    @property
    def pending(self) -> int:
        """Images whose answer is not the one that the classifier was fitted to; 0 unless it is stale."""
        return int(np.count_nonzero(self.codes != self._learned))

    def digest(self) -> str:
        """Names the labels as they are: what a round was fitted to, and what was exported."""
        found = hashlib.blake2b(json.dumps([self.pool_id, self.answers.classes]).encode(), digest_size=8)
        found.update(self.codes.tobytes())
        return found.hexdigest()

    def label(self, numbers: Sequence[int], label: int, *, why: str, tab: str) -> int:
        """Give images a label. Returns the revision.

        Raises:
            RefusedError: There is no such image or class.
            OSError: The answer could not be saved.
        """
        with self.lock:
            if label >= 0 and label not in self.answers.classes:
                raise RefusedError(f"there is no class {label} any more; choose another")
            if label < SKIPPED:
                raise RefusedError(f"label must be a class or -1, -2, -3, got {label}")
            names = self._named(numbers)
            chosen = list(dict.fromkeys(numbers))
            # A prediction counts only for images that the classifier has not learned from.
            said = np.where(self.codes[chosen] == UNLABELED, self.predicted[chosen], UNLABELED).tolist()
            self.log.append("label", tab, images=names, label=label, why=why, said=said)
            self._after_answer(numbers, label)
            return self.log.revision

    def confirm(self, numbers: Sequence[int], *, tab: str) -> int:
        """Say that suspected labels are right. As label."""
        with self.lock:
            self.log.append("confirm", tab, images=self._named(numbers))
            return self.log.revision

    def add_class(self, name: object, numbers: Sequence[int], *, tab: str) -> int:
        """A new class, and the images that belong to it. Returns its id; as label."""
        with self.lock:
            checked = checked_class_name(name, list(self.answers.classes.values()))
            number = self._next_class()
            images = self._named(numbers) if numbers else []
            self.log.append("class", tab, id=number, name=checked, images=images)
            self._after_answer(numbers, number)
            return number

    def rename_class(self, number: int, name: object, *, tab: str) -> None:
        """As label."""
        with self.lock:
            self._check_class(number)
            others = [other for key, other in self.answers.classes.items() if key != number]
            self.log.append("class", tab, id=number, name=checked_class_name(name, others))
            self.write_table()

    def merge_class(self, number: int, into: int, *, tab: str) -> None:
        """All images of a class get another one; the first is no more. As label."""
        with self.lock:
            self._check_class(number)
            self._check_class(into)
            if number == into:
                raise RefusedError("a class cannot be merged into itself")
            self.log.append("merge", tab, id=number, into=into)
            self._renumber()
            self._merge_predictions(number, into)
            self.write_table()
            self._refit_if_due(least=1)

    def delete_class(self, number: int, *, tab: str) -> None:
        """A class is no more, and its images have no answer. As label."""
        with self.lock:
            self._check_class(number)
            self.log.append("delete", tab, id=number, name=self.answers.classes[number])
            self._renumber()
            self._drop_gone_classes()
            self.write_table()
            self._refit_if_due(least=1)

    def undo(self, tab: str) -> tuple[str, list[int]]:
        """Take back the last answer of a tab. Returns what it was, and its images."""
        with self.lock:
            entry = self.log.undo(tab)
            self._renumber()
            self._drop_gone_classes()
            self.write_table()
            if entry["do"] in ("merge", "class", "delete") and self.fitted.classes and self.pending:
                self.refit()  # the classifier knows classes as they were
            self._refit_if_due()
            known = (self.number_of.get(name) for name in entry.get("images", ()))
            return self.describe(entry), [number for number in known if number is not None]

    def describe(self, entry: Entry) -> str:
        """In words."""
        images = entry.get("images") or []
        count = f"{len(images):,} image{'' if len(images) == 1 else 's'}"
        classes = self.answers.classes
        if entry["do"] == "class":
            return f"class {entry['name']}" + (f" with {count}" if images else "")
        if entry["do"] == "merge":
            return f"merge into {classes.get(entry['into'], 'a class')}"
        if entry["do"] == "delete":
            return f"delete class {entry.get('name', entry['id'])}"
        if entry["do"] == "confirm":
            return f"confirm {count}"
        special = {UNLABELED: "clear", OUT_OF_CLASS: "out-of-class", SKIPPED: "skip"}
        return f"{special.get(entry['label'], classes.get(entry['label'], 'a class'))}: {count}"

    def start_audit(self, count: int, *, tab: str) -> dict[str, int]:
        """Draw a uniform random sample of the images that have no answer yet. As label."""
        with self.lock:
            if not 1 <= count <= 10_000:
                raise RefusedError(f"n must be from 1 to 10,000 images, got {count}")
            candidates = torch.from_numpy(np.flatnonzero(self.codes == UNLABELED))
            if len(candidates) == 0:
                raise RefusedError("every image has an answer already")
            drawn = draw_audit(candidates, count, secrets.randbits(31)).tolist()
            self.log.append("audit", tab, images=self._named(drawn))
            return {"answered": 0, "of": len(drawn)}

    def _named(self, numbers: Sequence[int]) -> list[str]:
        if not numbers:
            raise RefusedError("no image was chosen")
        count = len(self.pool)
        wrong = next((number for number in numbers if not 0 <= number < count), None)
        if wrong is not None:
            raise RefusedError(f"images have numbers from 0 to {count - 1}, got {wrong}")
        return [self.pool.names[number] for number in dict.fromkeys(numbers)]

    def _check_class(self, number: int) -> None:
        if number not in self.answers.classes:
            raise RefusedError(f"there is no class {number} any more; choose another")

    def _after_answer(self, numbers: Sequence[int], label: int) -> None:
        self.codes[list(numbers)] = label
        self.write_table()
        self._refit_if_due()

    def write_table(self) -> None:
        if self.table is not None:
            named = {UNLABELED: "", OUT_OF_CLASS: ""} | self.answers.classes
            self.table.write([
                (name, named[label], label == OUT_OF_CLASS)
                for name, label in self.answers.labels.items()
                if label in named
            ])  # fmt: skip

    # What the classifier says

    def answered(self) -> Answered:
        """The answers for a fit."""
        codes = self.codes
        present = tuple(number for number in self.answers.classes if (codes == number).any())
        labels = torch.full((len(codes),), UNLABELED)
        labels[torch.from_numpy(codes == OUT_OF_CLASS)] = OUT_OF_CLASS
        for place, number in enumerate(present):
            labels[torch.from_numpy(codes == number)] = place
        audited = torch.zeros(len(codes), dtype=torch.bool)
        known = (self.number_of.get(name) for name in self.answers.audited())
        audited[torch.tensor([number for number in known if number is not None], dtype=torch.long)] = True
        return Answered(labels, present, audited, torch.from_numpy(codes == SKIPPED))

    def _first_fit(self) -> tuple[Fitted, NDArray[np.int16]]:
        """What a run has said of its classes; without a label, the first suggestions, which need no fit.

        Returns:
            The fit, and the answers that it was made from.
        """
        outputs, answered = self.pool.outputs, self.answered()
        named = {name: number for number, name in self.answers.classes.items()}
        if outputs is not None and all(name in named for name in self.pool.class_names):
            ids = tuple(named[name] for name in self.pool.class_names)
            numbers = named | {None: UNLABELED, OUT_OF_CLASS_NAME: OUT_OF_CLASS}
            learned = np.array([numbers[label] for label in self.pool.labels], np.int16)
            fitted = Fitted(ids, outputs.probs, outputs.in_domain, threshold=outputs.threshold)
            if self.pool.foreign:  # there is no run that has suggestions of its own
                fitted = fitting.with_suggestions(fitted, self.pool.points, answered)
            return fitted, learned
        if answered.classes:
            return fitting.nothing_known(len(self.pool)), np.full_like(self.codes, UNLABELED)
        return fitting.cold_start(self.pool.points, answered), self.codes.copy()

    def start_background(self) -> None:
        """The map, near duplicates, and a fit if there are labels already."""
        audit_half_width(AUDIT)  # loads what the first look at the page needs
        self.jobs.start(Job("map", "drawing the map", cancellable=False), self._draw)
        if self.answered().classes and not self.pool.foreign:
            self.refit()

    def refit(self) -> bool:
        """Fit to all answers in the background. False if that is under way already."""
        job = Job("refit", "refitting", fraction=0.0)
        return self.jobs.start(job, self._refit, then=lambda: self._refit_if_due(least=1))

    def _refit_if_due(self, least: int = ANSWERS_PER_ROUND) -> None:
        """Refit if that many answers are not the ones that the classifier was fitted to.

        Whatever was said, undone or merged while a refit was running is due when it ends.
        """
        with self.lock:
            if self.auto_refit and self.pending >= least:
                self.refit()

    def _refit(self, job: Job) -> None:
        with self.lock:
            answered, learned, made_from = self.answered(), self.codes.copy(), self.digest()
            revision, right = self.log.revision, list(self.answers.right_since)
        fitted = fitting.fit_round(self.pool.points, answered, job.report)
        with self.lock:
            self._learned, self.made_from = learned, made_from
            self._publish(fitted)
            for entry in self.log.entries[revision:]:  # what happened meanwhile
                if entry["do"] == "merge" and entry["id"] not in self.answers.classes:
                    self._merge_predictions(entry["id"], entry["into"])
            self._drop_gone_classes()
            given = self.log.answers_before(revision)
            self._begin_round(self._round_facts(fitted, answered, right, given), revision)
        accuracy = fitting.estimate(self.pool.points, answered, fitted, job.report)
        with self.lock:
            self.fitted = replace(self.fitted, accuracy=accuracy)
            if not self.read_only and "accuracy" not in self.answers.rounds[-1]:
                self.log.append("estimate", "", facts=accuracy_facts(accuracy))

    def _begin_round(self, facts: dict[str, Any], revision: int) -> None:
        """Labels that the last round was fitted to, as after a restart, are no new round."""
        rounds = self.answers.rounds
        is_new = not rounds or rounds[-1].get("made_from") != self.made_from
        self.round = len(rounds) + is_new
        if is_new and not self.read_only:
            # Answers that were given meanwhile count for the next round.
            self.log.append("round", "", facts=facts, upto=revision)

    def _publish(self, fitted: Fitted) -> None:
        with self.lock:
            self.fitted = fitted
            self.predicted, self.confidence = fitted.predicted, fitted.confidence
            self.model_version += 1
            self.error = None

    def _drop_gone_classes(self) -> None:
        """Until the next round, the probability of a class that is no more goes to the others."""
        fitted, known = self.fitted, self.answers.classes
        if all(number in known for number in fitted.classes):
            return
        kept = [place for place, number in enumerate(fitted.classes) if number in known]
        probs = fitted.probs[:, kept]
        probs = probs / np.maximum(probs.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        classes = tuple(fitted.classes[place] for place in kept)
        self._learned[np.isin(self._learned, list(set(fitted.classes) - set(classes)))] = FORGOTTEN
        self._publish(replace(fitted, classes=classes, probs=probs, suspects={}))

    def _merge_predictions(self, number: int, into: int) -> None:
        """Until the next round, the probability of a merged class belongs to the other."""
        fitted = self.fitted
        if number not in fitted.classes:
            return
        if into not in fitted.classes:
            classes = tuple(into if each == number else each for each in fitted.classes)
            fitted = replace(fitted, classes=classes)
        else:
            gone, kept = fitted.classes.index(number), fitted.classes.index(into)
            probs = fitted.probs.copy()
            probs[:, kept] += probs[:, gone]
            classes = tuple(each for each in fitted.classes if each != number)
            fitted = replace(fitted, classes=classes, probs=np.delete(probs, gone, axis=1), suspects={})
        self._learned[self._learned == number] = FORGOTTEN
        self._publish(fitted)

    def _round_facts(
        self, fitted: Fitted, answered: Answered, right: Sequence[bool], answers: int
    ) -> dict[str, Any]:
        share = fitted.share
        return {
            "made_from": self.made_from,
            "answers": answers,
            "labels": int((answered.labels >= 0).sum()),
            "in_class": None if share is None else share.estimate,
            "in_class_low": None if share is None else share.low,
            "in_class_high": None if share is None else share.high,
            "right": sum(right),
            "answered": len(right),
            "seconds": round(fitted.seconds, 1),
        }

    def _draw(self, job: Job) -> None:
        plane = layout.read_map(self.folder / MAP, self.pool.points)
        if plane is None:
            plane = full_map(self.pool.points)
            if not self.read_only:
                layout.write_map(self.folder / MAP, plane, self.pool.points)
        with self.lock:
            self.plane, self.map_version = plane, self.map_version + 1
        job.text = "looking for near duplicates"
        duplicates = near_duplicates(self.pool.points)
        with self.lock:
            self.duplicates, self.map_version = duplicates, self.map_version + 1

    def _failed(self, line: str) -> None:
        with self.lock:
            self.error = line
            self.failures += 1

    def _set_table_error(self, line: str | None) -> None:
        self.table_error = line

    def close(self) -> None:
        """End the jobs, and write what is not written yet."""
        self.jobs.close()
        if self.table is not None:
            self.table.close()
        self.log.close()

    # Lists for the page

    def suggested(self) -> list[int]:
        """Suggestions that have no answer yet, best first."""
        found = (suggestion.position for suggestion in self.fitted.suggestions)
        return [number for number in found if self.codes[number] == UNLABELED]

    def outside(self) -> NDArray[np.int64]:
        """Images that are out-of-class: answered so, or predicted so and without a class.   ->  (k,)"""
        open_ = (self.codes == UNLABELED) | (self.codes == SKIPPED)
        return np.flatnonzero((self.codes == OUT_OF_CLASS) | (open_ & (self.predicted == OUT_OF_CLASS)))

    def suspects(self) -> list[int]:
        """Suspected label errors that nobody has confirmed or corrected, the most suspect first."""
        ids = dict(enumerate(self.fitted.classes)) | {OUT_OF_CLASS: OUT_OF_CLASS}
        confirmed = self.answers.confirmed
        return [
            number
            for number, error in self.fitted.suspects.items()
            if self.codes[number] == ids.get(error.label) and self.pool.names[number] not in confirmed
        ]

    def open_audit(self) -> list[int]:
        """Images of the last random sample that have no answer yet."""
        numbers = (self.number_of.get(name) for name in self.answers.audit)
        return [number for number in numbers if number is not None and self.codes[number] == UNLABELED]


def accuracy_facts(accuracy: PoolAccuracy | None) -> dict[str, Any]:
    """What the log keeps of the estimate of a round."""
    found = fitting.estimate_facts(accuracy) or {}
    return {name: found.get(name) for name in ("accuracy", "low", "high", "kind")}


def _sweep(folder: Path) -> None:
    """Remove files that a killed server was writing. The log is ours, so nobody is writing them now."""
    for path in folder.glob(".*.tmp"):
        if HALF_WRITTEN.fullmatch(path.name):
            path.unlink(missing_ok=True)
