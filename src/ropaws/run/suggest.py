"""What to label next, with the reason of each suggestion in words: in a run, or of images alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor

from ropaws.classify.pool_prior import in_class_probability
from ropaws.core.features import main_points
from ropaws.core.files import read_json, write_json
from ropaws.core.labels import UNLABELED, class_names_of, label_codes
from ropaws.core.run_layout import EVALUATION
from ropaws.core.terminal import watch_files
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.embedder import Embedded, Embedder, open_images
from ropaws.insight import suggestions
from ropaws.insight.label_choice import class_probs
from ropaws.pool.listing import Sources
from ropaws.run.gallery import add_thumbnails
from ropaws.run.manifest import model_digest
from ropaws.run.results import Suggestion
from ropaws.run.run import BATCH, POOL, Run, open_run

SUGGESTIONS = 50
NEW_CLASSES = 5
SURE = 0.8  # probability above which a suggestion is not about two classes
KIND, NEW_KIND = "in-class", "new class"


class SuggestionLists(NamedTuple):
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
    opened = open_run(run, pool=pool, device=device, console=console)
    return suggest_and_keep(opened, n).suggestions


def suggest_and_keep(
    run: Run, n: int = SUGGESTIONS, *, new: int = NEW_CLASSES, strategy: str = suggestions.OURS
) -> SuggestionLists:
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
        run.say(f"The report will lack thumbnails of new suggestions: {error}")
    return found


def check_counts(n: int, new: int) -> None:
    """Raise an error for numbers that make no list."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if new < 0:
        raise ValueError(f"new-classes must be at least 0 (none), got {new}")


def find_suggestions(
    run: Run, count: int, *, new: int = NEW_CLASSES, strategy: str = suggestions.OURS
) -> SuggestionLists:
    """The unlabeled images most worth a label, and likely new classes, with the reason of each."""
    pool, labeled = run.pool, run.support
    if len(pool.positions) == 0:
        return SuggestionLists([], [])
    features = _features(run)  # of the pool, then of the labels
    labels = torch.cat([torch.full((len(pool.positions),), UNLABELED), labeled.labels])
    probs = torch.cat([pool.outputs.probs, labeled.one_hot.to(pool.outputs.probs)])
    in_class = in_class_probability(features, labels, classes=labeled.classes)
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
) -> SuggestionLists:
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
    return SuggestionLists(found, new)


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
        run.say(f"The images are not available ({error}); neighbors are those of the run's embedding.")
        return torch.cat([pool.outputs.embedding, labeled.embeddings])
    rows = torch.cat([pool.positions, run.facts.split.indices])
    parts: Iterable[Tensor] = rows.split(BATCH)
    if len(rows) > BATCH:  # a large pool takes minutes
        title = f"Features of {len(rows):,} images, batches"
        parts = watch_files(run.console)(parts, title, len(rows.split(BATCH)))
    return torch.cat([run.features(images, part) for part in parts])


FIRST = 20


def first_suggestions(
    sources: Sources,
    *,
    labeled: Sources = (),
    n: int = FIRST,
    backbone: str | None = None,
    init: Path | str = PRETRAINED,
    cache: Path | str | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> list[Suggestion]:
    """The images of a folder most worth a label, best first, before anything is trained.

    Args:
        sources: Unlabeled images: folders, searched recursively, images, tables, .npz files, saved datasets.
        labeled: Sources with labels, if there are some already: folders with a folder for each class ...
        n: How many.
        backbone: The network, as for Embedder.
        init: Its weights: "pretrained", or a file.
        cache: Folder that keeps features; by default ~/.cache/ropaws/features.
        device: Where to compute.
        console: Where progress goes; standard error by default.

    Returns:
        Suggestions with rank, name and reason; image is the position among all images, labeled ones first.

    Raises:
        FileNotFoundError: A source is not there.
        ValueError: A source has no images, or n is below 1.
    """
    embedder = Embedder(backbone, init=init, cache=cache, device=device, console=console)
    return find_first(sources, labeled, embedder, n, new=0).suggestions


def find_first(
    sources: Sources,
    labeled: Sources,
    embedder: Embedder,
    n: int = FIRST,
    *,
    new: int = NEW_CLASSES,
    strategy: str = suggestions.OURS,
) -> SuggestionLists:
    """Both lists of images that no run has seen."""
    check_counts(n, new)
    if not sources:
        raise ValueError("name the unlabeled images to choose from: folders, images, tables or .npz files")
    return _choose(embedder.embed(open_images(sources, labeled)), n, new, strategy)


def _choose(images: Embedded, n: int, new: int, strategy: str) -> SuggestionLists:
    names = class_names_of(images.labels)
    labels = torch.tensor(label_codes(images.labels, names), dtype=torch.long)
    features, classes = torch.from_numpy(images.features), max(1, len(names))
    in_class = in_class_probability(features, labels, classes=classes)
    probs = class_probs(main_points(features), labels, classes)
    picks = suggestions.suggest(
        features, labels, classes=classes, count=n, in_class=in_class, probs=probs, strategy=strategy
    )
    clusters = suggestions.new_classes(features, labels, in_class, most=new)
    positions = cast(list[int], images.kept.tolist())
    return in_words(picks, clusters, in_class, probs, names, images.names, positions)
