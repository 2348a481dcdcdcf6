"""What to label first: images alone, before there is a run, by the features of a pretrained network."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from ropaws.analysis.suggest import NEW_CLASSES, Found, Suggestion, check_counts, in_words
from ropaws.evaluation import suggestions
from ropaws.evaluation.answers import UNLABELED
from ropaws.evaluation.clusters import main_points
from ropaws.evaluation.label_choice import class_probs
from ropaws.models import PRETRAINED
from ropaws.prediction.embed import Embedded, Embedder, EmbedSettings, list_sources
from ropaws.terminal import Terminal

FIRST = 20


def first_suggestions(
    sources: Path | str | Sequence[Path | str],
    *,
    labeled: Path | str | Sequence[Path | str] = (),
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
        backbone: The network: efficientnet-lite0 (by default), timm:NAME, or one that fits init.
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
    settings = EmbedSettings(
        backbone=backbone,
        init=Path(init),
        views=0,
        cache=None if cache is None else Path(cache),
        device=device,
    )
    found = find_first(_paths(sources), _paths(labeled), settings, n, new=0, console=console)
    return found.suggestions


def find_first(
    sources: Sequence[Path],
    labeled: Sequence[Path],
    settings: EmbedSettings,
    n: int = FIRST,
    *,
    new: int = NEW_CLASSES,
    strategy: str = suggestions.OURS,
    console: Console | None = None,
) -> Found:
    """Both lists of images that no run has seen."""
    check_counts(n, new)
    if not sources:
        raise ValueError("name the unlabeled images to choose from: folders, images, tables or .npz files")
    listing = list_sources(sources, labeled)
    return _choose(
        Embedder(settings, listing, console or Terminal(stderr=True)).embed(listing), n, new, strategy
    )


def _choose(images: Embedded, n: int, new: int, strategy: str) -> Found:
    names = sorted(set(images.labels) - {""})
    numbers = {name: number for number, name in enumerate(names)}
    labels = torch.tensor([numbers.get(label, UNLABELED) for label in images.labels], dtype=torch.long)
    features, classes = torch.from_numpy(images.features), max(1, len(names))
    in_class = suggestions.in_class_probability(features, labels, classes=classes)
    probs = class_probs(main_points(features), labels, classes)
    picks = suggestions.suggest(
        features, labels, classes=classes, count=n, in_class=in_class, probs=probs, strategy=strategy
    )
    clusters = suggestions.new_classes(features, labels, in_class, most=new)
    positions = cast(list[int], images.kept.tolist())
    return in_words(picks, clusters, in_class, probs, names, images.names, positions)


def _paths(sources: Path | str | Sequence[Path | str]) -> list[Path]:
    return [Path(source) for source in ([sources] if isinstance(sources, Path | str) else sources)]
