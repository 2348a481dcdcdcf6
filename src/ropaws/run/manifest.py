"""What a run was trained on: classes, label split, normalization, and its labeled images, embedded."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.features import Features
from ropaws.core.files import (
    JSON_FILE,
    TENSOR_FILE,
    check_out_folder,
    check_regular,
    open_regular,
    read_json,
    read_regular,
    write_json,
    write_text,
)
from ropaws.core.run_layout import CONFIG, DATA, METRICS, MODEL, SPLIT, SUPPORT, UNREADABLE
from ropaws.embedding.weight_files import save_tensors
from ropaws.pool.augment import Normalization
from ropaws.pool.corpus import Corpus, Images, ImageStack, WholeImages, pixels_of
from ropaws.pool.remote import address_of
from ropaws.pool.sources import DataConfig, Labeled, write_split

MOST_CLASSES, MOST_IMAGES, MOST_FEATURES = 100_000, 1 << 40, 1 << 20
LONGEST = 1.01  # embedding, but for rounding; one of no features at all has length 0


@dataclass(frozen=True)
class DataFacts:
    """What a run was trained on.

    Attributes:
        class_names: The known classes.
        split: Indices of the labeled images among the training images, and their classes.
        normalize: Mean and standard deviation per channel.
        digest: Fingerprint of the training images.
        labeled_names: Files of the labeled images, where they are files.
        images: Number of training images.
        feature_dims: Width of the features, where the data are features; 0 for images.
        test_digest: Fingerprint of the test images.
    """

    class_names: tuple[str, ...]
    split: Labeled
    normalize: Normalization
    digest: str  # of the training images
    labeled_names: tuple[str, ...]  # files of the labeled images, where they are files
    images: int  # number of training images
    feature_dims: int  # where the data are features
    test_digest: str

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit one another."""
        classes, labeled = len(self.class_names), len(self.split.indices)
        if not 0 < classes <= MOST_CLASSES or len(set(self.class_names)) < classes:
            raise ValueError(f"class_names must be 1 to {MOST_CLASSES:,} different names, got {classes}")
        if labeled == 0 or len(self.split.labels) != labeled:
            raise ValueError(f"{len(self.split.labels)} labels for {labeled} labeled images")
        if int(self.split.labels.min()) < 0 or int(self.split.labels.max()) >= classes:
            raise ValueError(f"a label is not a class number from 0 to {classes - 1}")
        first, last = int(self.split.indices.min()), int(self.split.indices.max())
        if first < 0:
            raise ValueError("the index of a labeled image is negative")
        if not last < self.images <= MOST_IMAGES:
            raise ValueError(f"a label is not of one of the {str(self.images)[:20]} images")
        if self.labeled_names and len(self.labeled_names) != labeled:
            raise ValueError(f"{len(self.labeled_names)} names for {labeled} labeled images")
        if not 0 <= self.feature_dims <= MOST_FEATURES:
            raise ValueError(f"features have 1 to {MOST_FEATURES:,} dimensions, got {self.feature_dims}")
        mean, std = self.normalize.mean, self.normalize.std
        if len(mean) not in (1, 3) or len(std) != len(mean) or not all(map(math.isfinite, (*mean, *std))):
            raise ValueError("normalization must be a mean and a deviation for 1 or 3 channels")
        if min(std) <= 0:
            raise ValueError("a deviation of the normalization is not positive")

    @property
    def channels(self) -> int:
        """What the network takes: channels of an image, or dimensions of a row of features."""
        return self.feature_dims or len(self.normalize.mean)


def digest_images(images: Images) -> str:
    """A short fingerprint; other images, or the same in another order, give another one."""
    images = pixels_of(images)
    if isinstance(images, ImageStack | Features):
        return images.digest()
    if isinstance(images, WholeImages):
        images = images.squares  # the same however views are cropped, and on every machine
    assert isinstance(images, Tensor)
    state = hashlib.blake2b(str(tuple(images.shape)).encode(), digest_size=16)
    state.update(images.contiguous().numpy().data)
    return state.hexdigest()


def check_target(run: Path) -> None:
    """Check that a new run can be written there, before hours of reading and training."""
    if (run / CONFIG).exists():
        raise FileExistsError(
            f"{run} holds a run already; choose another --out, or resume: `ropaws train --resume {run}`"
        )
    check_parents(run)


def check_parents(run: Path) -> None:
    """Check that a folder is there, or can be created."""
    place = run
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"--out: {place} is a file; a run is a folder, choose another name")
    check_out_folder(place)


def write_facts(run: Path, facts: DataFacts) -> None:
    labeled = {"indices": facts.split.indices.tolist(), "labels": facts.split.labels.tolist()}
    normalization = {"mean": list(facts.normalize.mean), "std": list(facts.normalize.std)}
    write_split(run / SPLIT, facts.split)
    write_json(
        run / DATA,
        {
            "class_names": list(facts.class_names),
            "images": facts.images,
            "labeled": labeled,
            "normalization": normalization,
            "digest": facts.digest,
            "test_digest": facts.test_digest,
            "labeled_names": list(facts.labeled_names),
            "feature_dims": facts.feature_dims,
        },
    )


def read_facts(run: Path) -> DataFacts:
    """data.json of a run folder.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged; the message says what is wrong.
    """
    values = read_json(run / DATA, inside=run)
    try:
        labeled, normalization = values["labeled"], values["normalization"]
        return DataFacts(
            _listed(values["class_names"], str),
            Labeled(_numbers(labeled["indices"]), _numbers(labeled["labels"])),
            Normalization(_listed(normalization["mean"], float), _listed(normalization["std"], float)),
            _of(values["digest"], str),
            _listed(values["labeled_names"], str),
            _of(values["images"], int),
            _of(values["feature_dims"], int),
            _of(values["test_digest"], str),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{run / DATA} is damaged ({reason}); restore it or train again") from None


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} should be of type {kind.__name__}")
    return value


def _listed(values: Any, kind: type) -> tuple[Any, ...]:
    return tuple(_of(value, kind) for value in _of(values, list))


def _numbers(values: Any) -> Tensor:
    return torch.tensor(_listed(values, int), dtype=torch.long)


def write_unreadable(run: Path, unreadable: dict[str, str]) -> None:
    """Names as Python strings: a name may have a line break in it."""
    if unreadable:
        text = "".join(f"{name!r}: {reason}\n" for name, reason in sorted(unreadable.items()))
        write_text(run / UNREADABLE, text)


def model_digest(run: Path) -> str:
    """A fingerprint of the trained weights: what was computed with them says so."""
    path = run / MODEL
    try:
        with open_regular(path, TENSOR_FILE, inside=run) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no trained model at {path}; finish it with `ropaws train --resume {run}`"
        ) from None


def save_support(run: Path, embeddings: Tensor, split: Labeled) -> None:
    """The labeled images as the trained network sees them, so that a run works without its data."""
    tensors = {"embeddings": embeddings, "labels": split.labels}
    save_tensors(run / SUPPORT, tensors, {"model": model_digest(run)})


def load_support(run: Path, facts: DataFacts) -> LabeledEmbeddings | None:
    """support.safetensors; None where there is none, or one of another model.

    Raises:
        ValueError: The file is damaged, or does not fit data.json.
    """
    path = run / SUPPORT
    count = len(facts.split.labels)
    try:
        check_regular(path, TENSOR_FILE, inside=run)
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("model") != model_digest(run):
                return None
            shapes = [file.get_slice(name).get_shape() for name in ("embeddings", "labels")]
            if shapes[1] != [count] or len(shapes[0]) != 2 or shapes[0][0] != count:  # before they are read
                raise ValueError(f"shapes {shapes} for {count} labeled images")
            embeddings, labels = file.get_tensor("embeddings"), file.get_tensor("labels")
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and it is computed again") from None
    if (
        embeddings.dtype != torch.float32
        or 0 in embeddings.shape
        or labels.dtype != torch.int64
        or not torch.equal(labels, facts.split.labels)
        or not (embeddings.norm(dim=1) <= LONGEST).all()  # not a number is not either
    ):
        raise ValueError(
            f"{path} is damaged (it is not a unit embedding of each labeled image of {DATA});"
            " remove it, and it is computed again"
        )
    return LabeledEmbeddings(embeddings, labels, len(facts.class_names))


def check_sources(run: Path, data: DataConfig) -> None:
    """Raise an error if what a run has recorded of its data is not there any more."""
    source = Path(data.source) if data.labeled is None and data.source.endswith(".npz") else None
    sources = [("source", source), ("labeled", data.labeled), ("test", data.test)]
    sources += [("unlabeled", path) for path in data.unlabeled]
    sources += [("out_of_class", path) for path in data.out_of_class]
    sources += [("extra", Path(name)) for name in data.extra if name.endswith(".npz")]
    for name, path in sources:
        if path is not None and not (address_of(path) or path.exists()):
            raise FileNotFoundError(
                f"{run} was trained on {path}, which is not there; put it back, or change data.{name} in"
                f" {run / CONFIG} to where it is now"
            )


def check_same_data(run: Path, facts: DataFacts, corpus: Corpus) -> None:
    """A split is made of positions: with other images it would name the wrong ones."""
    if facts.digest != digest_images(corpus.train_images):
        raise ValueError(
            f"the training images of {run} have changed since it was trained; restore them or train again"
        )
    if int(facts.split.indices.max()) >= len(corpus.train_images):
        raise ValueError(f"{run / DATA} is damaged (it names an image that is not there); train again")


def check_same_tests(run: Path, facts: DataFacts, data: DataConfig, corpus: Corpus) -> None:
    """Test images have a place of their own, which a stranger's run may set to anything on this disk. Those
    that the run was trained with are no secret to whoever made it; others need the word of the person.
    """
    if data.test is not None and facts.test_digest != digest_images(corpus.test_images):
        raise PermissionError(
            f"{run} names test images at {data.test} which are not those it was trained with; if you want"
            f" to use them, say so: --test {data.test}"
        )


def training_seconds(run: Path) -> float | None:
    """Seconds of training so far, from the last line of the metrics; None where that cannot be read."""
    try:
        lines = read_regular(run / METRICS, JSON_FILE, inside=run).decode("utf-8").splitlines()
        seconds = float(json.loads(lines[-1])["seconds"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
    return seconds if math.isfinite(seconds) else None
