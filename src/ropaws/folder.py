"""The run folder: its files, and the facts about the data that everything downstream needs."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ropaws.data.augment import Normalization
from ropaws.data.corpus import Corpus, Images
from ropaws.data.splits import Labeled, write_split
from ropaws.data.stacks import PictureStack
from ropaws.training.checkpoint import MODEL, read_json, write_atomically, write_json

CONFIG, DATA, METRICS, EVALUATION, ENVIRONMENT = (
    "config.json", "data.json", "metrics.jsonl", "evaluation.json", "environment.json",
)  # fmt: skip
UNREADABLE, SUPPORT, SPLIT = "unreadable.txt", "support.safetensors", "split.txt"


@dataclass(frozen=True)
class DataFacts:
    """What a run was trained on."""

    class_names: tuple[str, ...]
    split: Labeled
    normalize: Normalization
    digest: str  # of the training images
    labeled_names: tuple[str, ...] = ()  # files of the labelled images, where they are files


def digest_images(images: Images) -> str:
    """A short fingerprint; other images, or the same in another order, give another one."""
    if isinstance(images, PictureStack):
        return images.digest()
    assert isinstance(images, Tensor)
    state = hashlib.blake2b(str(tuple(images.shape)).encode(), digest_size=16)
    state.update(images.contiguous().numpy().data)
    return state.hexdigest()


def check_target(run: Path) -> None:
    """Can a new run be written there? Asked before hours of reading and training."""
    if (run / CONFIG).exists():
        raise FileExistsError(
            f"{run} holds a run already; choose another --out, or go on with `ropaws train --resume {run}`"
        )
    place = run
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"--out: {place} is a file; a run is a folder, choose another name")
    if not os.access(place, os.W_OK):
        raise PermissionError(f"--out: {place} cannot be written to; choose another place")


def write_facts(run: Path, facts: DataFacts) -> None:
    labeled = {"indices": facts.split.indices.tolist(), "labels": facts.split.labels.tolist()}
    normalization = {"mean": list(facts.normalize.mean), "std": list(facts.normalize.std)}
    write_split(run / SPLIT, facts.split)
    write_json(
        run / DATA,
        {
            "class_names": list(facts.class_names),
            "labeled": labeled,
            "normalization": normalization,
            "digest": facts.digest,
            "labeled_names": list(facts.labeled_names),
        },
    )


def read_facts(run: Path) -> DataFacts:
    values = read_json(run / DATA)
    try:
        return DataFacts(
            tuple(values["class_names"]),
            Labeled(torch.tensor(values["labeled"]["indices"]), torch.tensor(values["labeled"]["labels"])),
            Normalization(tuple(values["normalization"]["mean"]), tuple(values["normalization"]["std"])),
            values["digest"],
            tuple(values.get("labeled_names", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run / DATA} is damaged ({error!r}); train again") from None


def write_unreadable(run: Path, unreadable: dict[str, str]) -> None:
    """Names as Python strings: a name may have a line break in it."""
    if unreadable:
        text = "".join(f"{name!r}: {reason}\n" for name, reason in sorted(unreadable.items()))
        write_atomically(run / UNREADABLE, lambda path: path.write_text(text, encoding="utf-8"))


class LabeledEmbeddings(NamedTuple):
    """What the soft nearest-neighbour classifier of a run is made of."""

    embeddings: Tensor  # (l, d) unit rows
    labels: Tensor  # (l,) class


def model_digest(run: Path) -> str:
    """A fingerprint of the trained weights: what was computed with them says so."""
    path = run / MODEL
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no trained model at {path}; finish it with `ropaws train --resume {run}`"
        ) from None


def save_support(run: Path, embeddings: Tensor, split: Labeled) -> None:
    tensors = {"embeddings": embeddings.contiguous(), "labels": split.labels}
    made_by = {"model": model_digest(run)}
    write_atomically(run / SUPPORT, lambda path: save_file(tensors, path, metadata=made_by))


def support_is_current(run: Path) -> bool:
    """Is the support there, whole, and of the run's model?"""
    try:
        with safe_open(run / SUPPORT, framework="pt") as file:
            return (file.metadata() or {}).get("model") == model_digest(run)
    except (FileNotFoundError, SafetensorError):
        return False


def load_support(run: Path) -> LabeledEmbeddings:
    """The labelled images as the trained network sees them, so that a run works without its data."""
    try:
        tensors = load_file(run / SUPPORT)
        return LabeledEmbeddings(tensors["embeddings"], tensors["labels"])
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no {run / SUPPORT}; finish the run with `ropaws train --resume {run}`"
        ) from None
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{run / SUPPORT} is damaged ({error}); train again") from None


def check_same_data(run: Path, facts: DataFacts, corpus: Corpus) -> None:
    """A split is made of positions: with other images it would name the wrong ones."""
    if digest_images(corpus.train_images) != facts.digest:
        raise ValueError(
            f"the training images of {run} have changed since it was trained; restore them or train again"
        )


def training_seconds(run: Path) -> float | None:
    """Seconds of training so far, from the last line of the metrics; None where that cannot be read."""
    try:
        lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
        return float(json.loads(lines[-1])["seconds"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
