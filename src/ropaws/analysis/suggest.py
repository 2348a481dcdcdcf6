"""What to label next in a run, with the reason of each suggestion in words."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from rich.console import Console
from torch import Tensor

from ropaws.analysis.gallery import add_thumbnails
from ropaws.evaluation import suggestions
from ropaws.evaluation.answers import UNLABELED
from ropaws.runs.atomic import read_json, write_json
from ropaws.runs.facts import model_digest
from ropaws.runs.layout import EVALUATION
from ropaws.runs.run import BATCH, POOL, Run, open_run
from ropaws.training.progress import watch_files

SUGGESTIONS = 50
NEW_CLASSES = 5
SURE = 0.8  # probability above which a suggestion is not about two classes
KIND, NEW_KIND = "in-class", "new class"


class Suggestion(TypedDict):
    """An unlabeled image that is worth a label."""

    rank: int  # from 1
    image: int  # position among the training images
    name: str  # file, or number
    kind: str  # "in-class" or "new class"; "doubtful" instead of the former in files of 0.1.0
    reason: str
    in_domain: float  # probability of belonging to any class
    stands_for: int  # images of the pool that it represents


class Found(NamedTuple):
    """The two lists."""

    suggestions: list[Suggestion]
    new_classes: list[Suggestion]  # centers of clusters of likely out-of-class images


def suggest(
    run: Path | str | Run,
    *,
    n: int = SUGGESTIONS,
    pool: int = POOL,
    device: str | None = None,
    console: Console | None = None,
) -> list[Suggestion]:
    """The unlabeled images most worth a label, best first.

    They replace the suggestions of RUN/evaluation.json, and so those of the report.

    Args:
        run: A run folder.
        n: How many.
        pool: Number of unlabeled images to choose from, at most; 0 for all.
        device: Where to compute; by default as the run was trained.
        console: Where progress goes; standard error by default.

    Returns:
        Suggestions with rank, image, name, kind and reason.
    """
    return suggest_images(open_run(run, pool=pool, device=device, console=console), n)


def suggest_images(run: Run, n: int = SUGGESTIONS) -> list[Suggestion]:
    """As suggest."""
    return suggest_and_keep(run, n).suggestions


def suggest_and_keep(
    run: Run, n: int = SUGGESTIONS, *, new: int = NEW_CLASSES, strategy: str = suggestions.OURS
) -> Found:
    """Both lists, which replace those of RUN/evaluation.json.   new: likely new classes, at most"""
    check_counts(n, new)
    model_digest(run.path)  # raises an error for a run that is not finished
    found = find_suggestions(run, n, new=new, strategy=strategy)
    try:
        results = read_json(run.path / EVALUATION)
    except (OSError, ValueError):
        results = {}
    results = results if isinstance(results, dict) else {}
    write_json(run.path / EVALUATION, {**results, **found._asdict()})
    try:
        add_thumbnails(run, [item["image"] for item in (*found.suggestions, *found.new_classes)])
    except (OSError, ValueError) as error:
        _say(run, f"The report will lack thumbnails of new suggestions: {error}")
    return found


def check_counts(n: int, new: int) -> None:
    """Raise an error for numbers that make no list."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if new < 0:
        raise ValueError(f"new-classes must be at least 0 (none), got {new}")


def find_suggestions(
    run: Run, count: int, *, new: int = NEW_CLASSES, strategy: str = suggestions.OURS
) -> Found:
    """The unlabeled images most worth a label, and likely new classes, with the reason of each."""
    pool, labeled = run.pool, run.support
    if len(pool.positions) == 0:
        return Found([], [])
    features = _features(run)  # of the pool, then of the labels
    labels = torch.cat([torch.full((len(pool.positions),), UNLABELED), labeled.labels])
    probs = torch.cat([pool.outputs.probs, labeled.one_hot.to(pool.outputs.probs)])
    in_class = suggestions.in_class_probability(features, labels, classes=labeled.classes)
    picks = suggestions.suggest(
        features,
        labels,
        classes=labeled.classes,
        count=count,
        in_class=in_class,
        strategy=strategy,
    )
    clusters = suggestions.new_classes(features, labels, in_class, most=new)
    names, positions = [pool.name(row) for row in range(len(pool.positions))], pool.positions.tolist()
    return in_words(picks, clusters, in_class, probs, run.class_names, names, positions)


def in_words(
    picks: Sequence[suggestions.Suggestion],
    clusters: Sequence[suggestions.NewClass],
    in_class: Tensor,
    probs: Tensor,
    class_names: Sequence[str],
    names: Sequence[str],
    positions: Sequence[int],
) -> Found:
    """Both lists for people. in_class (n,), probs (n, c), names and positions of the rows."""

    def item(rank: int, row: int, kind: str, reason: str, stands_for: int) -> Suggestion:
        return {
            "rank": rank,
            "image": positions[row],
            "name": names[row],
            "kind": kind,
            "reason": reason,
            "in_domain": float(in_class[row]),
            "stands_for": stands_for,
        }

    found = [
        item(rank, pick.position, KIND, _reason(pick, probs[pick.position], class_names), pick.stands_for)
        for rank, pick in enumerate(picks, start=1)
    ]
    center = "a likely new class: the center of {:,} similar out-of-class images"
    new = [
        item(rank, cluster.position, NEW_KIND, center.format(cluster.stands_for), cluster.stands_for)
        for rank, cluster in enumerate(clusters, start=1)
    ]
    return Found(found, new)


def _reason(pick: suggestions.Suggestion, probs: Tensor, names: Sequence[str]) -> str:
    others = f"represents {pick.stands_for:,} images" if pick.stands_for > 1 else "represents itself alone"
    if pick.predicted < 0:
        return f"{others} without a label"
    likely, classes = (values.tolist() for values in probs.topk(min(2, len(names))))
    first = f"{names[classes[0]]} ({likely[0]:.0%})"
    if len(names) == 1 or likely[0] >= SURE:
        return f"looks like {first}; {others}"
    return f"{first} or {names[classes[1]]} ({likely[1]:.0%})? {others}"


def has_images(run: Run) -> bool:
    """Are the images of the run where they were?"""
    try:
        return len(run.corpus.train_images) > 0
    except (OSError, ValueError):
        return False


def _features(run: Run) -> Tensor:
    """What the backbone says of the pool and of the labels; the embedding where the images are gone."""
    pool, labeled = run.pool, run.support
    try:
        images = run.corpus.train_images
    except (OSError, ValueError) as error:
        _say(run, f"The images are not available ({error}); neighbors are those of the run's embedding.")
        return torch.cat([pool.outputs.embedding, labeled.embeddings])
    rows = torch.cat([pool.positions, run.facts.split.indices])
    parts: Iterable[Tensor] = rows.split(BATCH)
    if len(rows) > BATCH:  # a large pool takes minutes
        title = f"Features of {len(rows):,} images, batches"
        parts = watch_files(run.console)(parts, title, len(rows.split(BATCH)))
    return torch.cat([run.features(images, part) for part in parts])


def _say(run: Run, line: str) -> None:
    run.console.print(line, highlight=False, markup=False, soft_wrap=True)
