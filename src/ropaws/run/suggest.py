"""What to label next, with the reason of each suggestion in words: in a run, or of images alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor

from ropaws.classify.in_class_share import BORDER
from ropaws.classify.pool_prior import in_class_probability
from ropaws.core.features import main_points
from ropaws.core.files import read_json, write_json
from ropaws.core.labels import UNLABELED, class_names_of, label_codes
from ropaws.core.run_layout import EVALUATION
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.embedder import Embedded, Embedder, open_images
from ropaws.insight import suggestions
from ropaws.insight.suggestions import class_probs
from ropaws.pool.listing import Sources
from ropaws.run.discover import Seen, discover, features_of_rows, groups_among, has_images, keep_groups
from ropaws.run.gallery import add_thumbnails
from ropaws.run.manifest import model_digest
from ropaws.run.results import NewClassFigures, Suggestion
from ropaws.run.run import POOL, Run, open_run

SUGGESTIONS = 50
SURE = 0.8  # probability above which a suggestion is not about two classes
KIND = "in-class"


class SuggestionLists(NamedTuple):
    """The two lists."""

    suggestions: list[Suggestion]
    new_classes: list[NewClassFigures]  # groups of images that are likely out-of-class, the largest first


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
    run: Run, n: int = SUGGESTIONS, *, new: bool = True, strategy: str = suggestions.OURS
) -> SuggestionLists:
    """Both lists, which replace those of RUN/evaluation.json.   new: also look for new classes"""
    check_count(n)
    model_digest(run.path)  # raises an error for a run that is not finished
    found = find_suggestions(run, n, new=new, strategy=strategy)
    try:
        results = read_json(run.path / EVALUATION)
    except (OSError, ValueError):
        results = {}
    results = results if isinstance(results, dict) else {}
    write_json(run.path / EVALUATION, {**results, "suggestions": found.suggestions})
    try:
        add_thumbnails(run, [item["image"] for item in found.suggestions])
    except (OSError, ValueError) as error:
        run.say(f"The report will lack thumbnails of new suggestions: {error}")
    if new:
        keep_groups(run, found.new_classes)
    return found


def check_count(n: int) -> None:
    """Raise an error for a number that makes no list."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")


def find_suggestions(
    run: Run, count: int, *, new: bool = True, strategy: str = suggestions.OURS
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
    names, positions = [pool.name(row) for row in range(len(pool.positions))], pool.positions.tolist()
    found = in_words(picks, in_class, probs, run.class_names, names, positions)
    groups = discover(run).groups if new else ()
    return SuggestionLists(found, [group.figures() for group in groups])


def in_words(
    picks: Sequence[suggestions.Suggestion],
    in_class: Tensor,
    probs: Tensor,
    class_names: Sequence[str],
    names: Sequence[str],
    positions: Sequence[int],
) -> list[Suggestion]:
    """Describe suggestions for people.   in_class (n,), probs (n, c), names and positions of the rows."""
    return [
        {
            "rank": rank,
            "image": positions[pick.position],
            "name": names[pick.position],
            "kind": KIND,
            "reason": _reason(pick, probs[pick.position], class_names),
            "in_domain": float(in_class[pick.position]),
            "stands_for": pick.stands_for,
        }
        for rank, pick in enumerate(picks, start=1)
    ]


def _reason(pick: suggestions.Suggestion, probs: Tensor, names: Sequence[str]) -> str:
    others = f"represents {pick.stands_for:,} images" if pick.stands_for > 1 else "represents itself alone"
    if pick.predicted < 0:
        return f"{others} without a label"
    likely, classes = (values.tolist() for values in probs.topk(min(2, len(names))))
    first = f"{names[classes[0]]} ({likely[0]:.0%})"
    if len(names) == 1 or likely[0] >= SURE:
        return f"looks like {first}; {others}"
    return f"{first} or {names[classes[1]]} ({likely[1]:.0%})? {others}"


def _features(run: Run) -> Tensor:
    """What the backbone says of the pool and of the labels; the embedding where the images are gone."""
    if not has_images(run):
        run.say("The images are not available; neighbors are those of the run's embedding.")
        return torch.cat([run.pool.outputs.embedding, run.support.embeddings])
    return features_of_rows(run, torch.cat([run.pool.positions, run.facts.split.indices]))


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
    return find_first(sources, labeled, embedder, n, new=False).suggestions


def find_first(
    sources: Sources,
    labeled: Sources,
    embedder: Embedder,
    n: int = FIRST,
    *,
    new: bool = True,
    strategy: str = suggestions.OURS,
) -> SuggestionLists:
    """Both lists of images that no run has seen."""
    check_count(n)
    if not sources:
        raise ValueError("name the unlabeled images to choose from: folders, images, tables or .npz files")
    return _choose(embedder.embed(open_images(sources, labeled)), n, new, strategy)


def _choose(images: Embedded, n: int, new: bool, strategy: str) -> SuggestionLists:
    names = class_names_of(images.labels)
    labels = torch.tensor(label_codes(images.labels, names), dtype=torch.long)
    features, classes = torch.from_numpy(images.features), max(1, len(names))
    in_class = in_class_probability(features, labels, classes=classes)
    probs = class_probs(main_points(features), labels, classes)
    picks = suggestions.suggest(
        features, labels, classes=classes, count=n, in_class=in_class, probs=probs, strategy=strategy
    )
    positions = cast(list[int], images.kept.tolist())
    found = in_words(picks, in_class, probs, names, images.names, positions)
    seen = Seen(features, labels, in_class, probs, images.names, positions)
    groups = groups_among(seen, names, threshold=BORDER) if new and names else ()
    return SuggestionLists(found, [group.figures() for group in groups])
