"""Likely new classes: groups among images that belong to no known class, as files and as labels."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropaws.core.features import Features
from ropaws.core.files import TABLE_FILE, check_regular, read_json, replacing, write_json
from ropaws.core.labels import OUT_OF_CLASS, OUT_OF_CLASS_NAME, UNLABELED, class_name, refuse_verdict
from ropaws.core.run_layout import EVALUATION
from ropaws.core.terminal import watch_files
from ropaws.insight.groups import NewClass, new_classes
from ropaws.methods import method_name
from ropaws.pool.content import ImageRef, Unreadable
from ropaws.pool.corpus import features_of, pixels_of
from ropaws.pool.datasets.feature_file import FeatureTable
from ropaws.pool.listing import OUTSIDE, read_csv, write_csv
from ropaws.report.run_page import write_groups_page
from ropaws.run.gallery import add_thumbnails, file_thumbnails, train_thumbnails
from ropaws.run.manifest import model_digest
from ropaws.run.predict import Predictor, batches, listed_images
from ropaws.run.results import NewClassFigures
from ropaws.run.run import BATCH, Run, open_run

SHOWN = 12  # typical images of a group that are named and shown
GROUPS, LABELS, ARRAYS, PAGE = "groups.csv", "labels.csv", "labels.npz", "groups.html"


class GroupMember(NamedTuple):
    """An image of a group."""

    path: str  # or "training image NUMBER", where images are not files
    typicality: float  # 1 at the center of its group, 0 where another group is as near
    in_domain: float  # probability of belonging to any known class
    image: int  # position among the training images of the run, or in the pool that was given


class ImageGroup(NamedTuple):
    """Images that may be a class of their own."""

    number: int  # from 1, the largest group first
    members: tuple[GroupMember, ...]  # the most typical first
    nearest_class: str  # the known class that most of them look like
    nearest_share: float  # how many of them do

    def figures(self) -> NewClassFigures:
        """As evaluation.json has it."""
        typical = self.members[:SHOWN]
        return {
            "group": self.number,
            "size": len(self.members),
            "nearest": self.nearest_class,
            "nearest_share": self.nearest_share,
            "images": [member.image for member in typical],
            "names": [member.path for member in typical],
        }


@dataclass(frozen=True)
class Discovery:
    """The groups, and what they were looked for among.

    Attributes:
        groups: The largest first.
        images: Number of images that were looked at.
        out_of_class: How many of these belong to no known class.
    """

    groups: tuple[ImageGroup, ...]
    images: int
    out_of_class: int


class Seen(NamedTuple):
    """Rows that groups are looked for among: images of a pool, then the labeled images of the run."""

    features: Tensor  # (n, d)
    labels: Tensor  # (n,) class, UNLABELED or OUT_OF_CLASS
    in_domain: Tensor  # (n,)
    probs: Tensor  # (n, c)
    names: Sequence[str]  # of the first m
    images: Sequence[int]  # of the first m: position among the training images, or in the pool given


def discover(
    run: Path | str | Run,
    sources: Sequence[Path | str] = (),
    *,
    groups: int | None = None,
    threshold: float | None = None,
) -> Discovery:
    """Groups among the images that belong to no known class: likely new classes.

    Args:
        run: A run folder.
        sources: Images to look at: folders, tables, .npz files; by default the unlabeled pool of the run.
        groups: How many; by default as many kinds as there seem to be.
        threshold: In-domain probability below which an image is out-of-class; by default that of the run.

    Returns:
        The groups, each with its images, the most typical first.
    """
    if groups is not None and groups < 1:
        raise ValueError(f"groups must be at least 1, or left out to be estimated, got {groups}")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a probability from 0 to 1, got {threshold}")
    opened = open_run(run)
    seen = _of_sources(opened, sources) if sources else _of_run(opened)
    border = opened.threshold if threshold is None else threshold
    outside = int(((seen.labels < 0) & (seen.in_domain < border)).sum())
    found = groups_among(seen, opened.class_names, threshold=border, groups=groups)
    return Discovery(found, len(seen.names), outside)


def groups_among(
    seen: Seen, class_names: Sequence[str], *, threshold: float, groups: int | None = None
) -> tuple[ImageGroup, ...]:
    """Groups among the rows whose in-domain probability is below the threshold; see discover."""
    found = new_classes(
        seen.features, seen.labels, seen.in_domain, seen.probs, threshold=threshold, groups=groups
    )
    return tuple(_described(number, group, seen, class_names) for number, group in enumerate(found, 1))


def _described(number: int, group: NewClass, seen: Seen, class_names: Sequence[str]) -> ImageGroup:
    likely, count = Counter(seen.probs[group.members].argmax(dim=1).tolist()).most_common(1)[0]
    members = tuple(
        GroupMember(seen.names[row], typicality, float(seen.in_domain[row]), seen.images[row])
        for row, typicality in zip(group.members.tolist(), group.typicality.tolist(), strict=True)
    )
    return ImageGroup(number, members, class_names[likely], count / len(members))


def _of_run(run: Run) -> Seen:
    """The run's own pool, and what a person called out-of-class. Nothing goes through the network again: not
    through a frozen one, whose features are in the cache, and of others the run keeps the embedding.
    """
    pool, positions = run.pool, run.pool.positions
    names = [pool.name(row) for row in range(len(positions))]
    outside = torch.empty(0, dtype=torch.long)
    if run.config.model.frozen and has_images(run):
        outside = run.corpus.outside
        names += [_training_name(run, image) for image in outside.tolist()]
        features = features_of_rows(run, torch.cat([positions, outside, run.facts.split.indices]))
    else:
        features = torch.cat([pool.outputs.embedding, run.support.embeddings])
    none = torch.full((len(outside), run.support.classes), 1 / run.support.classes)
    return _with_labels(
        run,
        features,
        torch.cat([pool.outputs.in_domain, torch.zeros(len(outside))]),
        torch.cat([pool.outputs.probs, none]),
        names,
        [*positions.tolist(), *outside.tolist()],
        outside=len(outside),
    )


def _with_labels(
    run: Run,
    features: Tensor,
    in_domain: Tensor,
    probs: Tensor,
    names: Sequence[str],
    images: Sequence[int],
    *,
    outside: int = 0,
) -> Seen:
    """With what is known of the labeled images, whose features are the last rows."""
    labeled = run.support
    unlabeled = torch.full((len(names) - outside,), UNLABELED)
    return Seen(
        features,
        torch.cat([unlabeled, torch.full((outside,), OUT_OF_CLASS), labeled.labels]),
        torch.cat([in_domain, torch.ones(len(labeled.labels))]),
        torch.cat([probs, labeled.one_hot.to(probs)]),
        names,
        images,
    )


def _training_name(run: Run, image: int) -> str:
    names = run.corpus.train_names
    return names[image] if names else f"training image {image}"


def _of_sources(run: Run, sources: Sequence[Path | str]) -> Seen:
    """Images that the run was not trained on; features that are in the cache are not computed again."""
    files, predictor = listed_images(sources), Predictor(run)
    use_features = run.config.model.frozen and has_images(run)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    names: list[str] = []
    for batch in batches(predictor, files):
        if isinstance(batch, Unreadable):
            run.say(f"left out {batch.path}: {batch.reason}")
            continue
        outputs, own = predictor.look(batch.images), features_of(batch.images)
        row = own[:] if use_features and own is not None else outputs.embedding
        rows.append((row, outputs.in_domain, outputs.probs))
        names += batch.names
    if not rows:
        raise ValueError(f"{sources[0]}: none of its images can be read")
    labeled = features_of_rows(run, run.facts.split.indices) if use_features else run.support.embeddings
    features, in_domain, probs = map(torch.cat, zip(*rows, strict=True))
    place = {name: number for number, name in enumerate(_names_of(files))}
    images = [place[name] for name in names]
    return _with_labels(run, torch.cat([features, labeled]), in_domain, probs, names, images)


def _names_of(files: Sequence[ImageRef] | FeatureTable) -> Iterable[str]:
    return files.names if isinstance(files, FeatureTable) else map(str, files)


def has_images(run: Run) -> bool:
    """Are the images of the run where they were?"""
    try:
        return len(run.corpus.train_images) > 0
    except (OSError, ValueError):
        return False


def features_of_rows(run: Run, rows: Tensor) -> Tensor:
    """What the backbone says of training images.   (k,)  ->  (k, f)"""
    images, parts = run.corpus.train_images, rows.split(BATCH)
    shown: Iterable[Tensor] = parts
    if len(rows) > BATCH:  # a large pool takes minutes
        shown = watch_files(run.console)(parts, f"Features of {len(rows):,} images, batches", len(parts))
    return torch.cat([run.features(images, part) for part in shown])


# As files


def write_discovery(run: Run, found: Discovery, out: Path, sources: Sequence[Path | str] = ()) -> None:
    """groups.csv and groups.html in a folder; of the run's own pool also the groups of its report."""
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / GROUPS) as temporary:
        count = write_csv(temporary, (row for group in found.groups for row in _table_rows(group)))
        if count == 0:
            temporary.write_text("path,group,typicality,in_domain,nearest_class,image\n")
    figures = [group.figures() for group in found.groups]
    shown = [image for group in figures for image in group["images"]]
    thumbnails = _thumbnails(run, shown, sources)
    write_groups_page(out / PAGE, run.path.name, figures, thumbnails, images=found.images)
    if not sources:
        keep_groups(run, figures)


def _table_rows(group: ImageGroup) -> Iterable[dict[str, Any]]:
    for member in group.members:
        yield {
            "path": member.path,
            "group": group.number,
            "typicality": round(member.typicality, 4),
            "in_domain": round(member.in_domain, 6),
            "nearest_class": group.nearest_class,
            "image": member.image,
        }


def _thumbnails(run: Run, images: Sequence[int], sources: Sequence[Path | str]) -> dict[int, str]:
    if not sources:
        return train_thumbnails(run, images) if has_images(run) else {}
    files = listed_images(sources)
    return {} if isinstance(files, FeatureTable) else file_thumbnails(files, images)


def keep_groups(run: Run, figures: Sequence[NewClassFigures]) -> None:
    """Put them into RUN/evaluation.json, and so into its report."""
    model_digest(run.path)  # raises an error for a run that is not finished
    try:
        results = read_json(run.path / EVALUATION)
    except (OSError, ValueError):
        results = {}
    results = results if isinstance(results, dict) else {}
    write_json(run.path / EVALUATION, {**results, "new_classes": list(figures)})
    try:
        add_thumbnails(run, [image for group in figures for image in group["images"]])
    except (OSError, ValueError) as error:
        run.say(f"The report will lack thumbnails of the groups: {error}")


# As labels


class Accepted(NamedTuple):
    """Labels made of groups."""

    path: Path  # a table, or an array where images are not files, that `ropaws train` takes
    counts: dict[str, int]  # images by class name
    command: list[str]  # `ropaws train` with these labels, without --out


def accept(
    run: Run,
    folder: Path,
    named: Mapping[int, str],
    *,
    per_class: int | None = None,
    sources: Sequence[Path | str] = (),
) -> Accepted:
    """Make classes of groups: all that training knows as one table, with labels for their typical images.

    Args:
        run: The run.
        folder: Where write_discovery has written, and the labels will be.
        named: Class by number of a group; several groups may make one class.
        per_class: Images of each group that get the label; by default as many as the known class with the
            most labels has.
        sources: The images, if they are others than the run's own pool.
    """
    if per_class is not None and per_class < 1:
        raise ValueError(f"per-class must be at least 1, got {per_class}")
    checked = {group: _checked_name(name) for group, name in named.items()}
    count = per_class or int(torch.bincount(run.facts.split.labels).max())
    rows = _rows_of_groups(folder / GROUPS, named)
    chosen = {group: _spread(rows[group], count) for group in checked}
    labels = [(row, checked[group]) for group, found in chosen.items() for row in found]
    names = run.corpus.train_names
    if sources and not names:
        raise ValueError(f"{run.path} was trained on arrays, which files of another pool cannot join")
    if names:
        path = _write_table(run, folder / LABELS, labels)
    else:
        path = _write_arrays(run, folder / ARRAYS, labels)
    counts: Counter[str] = Counter()
    for _, name in labels:
        counts[name] += 1
    return Accepted(path, dict(counts), _train_command(run, path, sources))


def _checked_name(name: str) -> str:
    found = class_name(" ".join(name.split()))
    if not found or not found.isprintable():
        raise ValueError(f"--accept: a class needs a name of printable characters, got {name!r}")
    refuse_verdict([found], "--accept")
    return found


def _rows_of_groups(table: Path, named: Mapping[int, str]) -> dict[int, list[dict[str, str | None]]]:
    """Rows of groups.csv, which a person may have edited, by group; the most typical first."""
    check_regular(table, TABLE_FILE)
    found: dict[int, list[dict[str, str | None]]] = {}
    try:
        for row in read_csv(table):
            found.setdefault(int(row["group"] or 0), []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: -float(row["typicality"] or 0))
    except (KeyError, ValueError):
        raise ValueError(f"{table} is no table of groups; remove it, and discover again") from None
    for group in named:
        if group not in found:
            known = f"it has groups {min(found)} to {max(found)}" if found else "it has none"
            raise ValueError(f"--accept: there is no group {group} in {table}; {known}")
    return found


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    """So many of the typical half, evenly; of a small group all that are wanted.   ->  at most count"""
    typical = max(min(count, len(rows)), len(rows) // 2)
    places = np.linspace(0, typical - 1, min(count, len(rows))).round().astype(int)
    return [rows[place] for place in places]


Labeled = Sequence[tuple[Mapping[str, str | None], str]]  # rows of groups.csv, each with its class


def _write_table(run: Run, path: Path, labels: Labeled) -> Path:
    corpus, split = run.corpus, run.facts.split
    label_of = dict.fromkeys(corpus.train_names, "")
    for image, label in zip(split.indices.tolist(), split.labels.tolist(), strict=True):
        label_of[corpus.train_names[image]] = run.class_names[label]
    outside = {corpus.train_names[image] for image in corpus.outside.tolist()}
    for row, name in labels:
        label_of[row["path"] or ""] = name
    outside -= {row["path"] or "" for row, _ in labels}
    table = (
        {"path": name, "label": label, OUTSIDE: str(name in outside)} for name, label in label_of.items()
    )
    with replacing(path) as temporary:
        write_csv(temporary, table)
    return path


def _write_arrays(run: Run, path: Path, labels: Labeled) -> Path:
    """Images or features that are not files, with their labels."""
    corpus, split = run.corpus, run.facts.split
    known = np.full(len(corpus.train_images), "", object)
    known[corpus.outside.numpy()] = OUT_OF_CLASS_NAME
    known[split.indices.numpy()] = [run.class_names[label] for label in split.labels.tolist()]
    for row, name in labels:
        known[int(row["image"] or 0)] = name
    pixels = pixels_of(corpus.train_images)
    if isinstance(pixels, Features):
        arrays = {"features": pixels[:].numpy()}
    else:
        images = pixels[:].permute(0, 2, 3, 1).numpy()
        arrays = {"images": images.squeeze(3) if images.shape[3] == 1 else images}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, labels=known.astype(str), **arrays)  # type: ignore[arg-type]
    return path


def _train_command(run: Run, labels: Path, sources: Sequence[Path | str]) -> list[str]:
    """With the network and the test images of the run, as a person could type it."""
    config, model = run.config, run.config.model
    if run.facts.feature_dims:
        return ["train", "--features", str(labels)]
    options = ["--labeled", str(labels)]
    options += ["--unlabeled", *map(str, sources)] if sources else []
    options += ["--test", str(config.data.test)] if config.data.test is not None else []
    if method_name(config.method) != "ropaws":
        options += ["--method", method_name(config.method)]
    if model.frozen:
        options += ["--backbone", model.backbone, "--init", str(model.init)]
    return ["train", *options]


def as_typed(command: Sequence[str]) -> str:
    """A command of ropaws for a shell."""
    return shlex.join(["ropaws", *command])
