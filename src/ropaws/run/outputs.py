"""What a trained method says of the pool and of the test images, computed once and kept in the run folder."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropaws.core.files import TENSOR_FILE, check_regular
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.core.records import Outputs
from ropaws.embedding.weight_files import save_tensors
from ropaws.pool.corpus import Corpus, EmbeddedImages, Images, ImageStack
from ropaws.pool.datasets.catalog import MIXES, embedded_truth
from ropaws.pool.sources import DataConfig
from ropaws.run.manifest import LONGEST, digest_images

# Datasets without an unlabeled image of their own: what has no label there came with data.extra.
FULLY_LABELED = ("cifar10", "cifar100", "svhn", "tiny-imagenet", "fashion-mnist", "imagenet")


def fingerprint(corpus: Corpus) -> Tensor:
    """A fingerprint of all that analyses take from the data beside the training images.   ->  (k,) uint8"""
    state = hashlib.blake2b(digest_images(corpus.test_images).encode(), digest_size=16)
    for labels in (corpus.test_labels, corpus.train_labels):
        state.update(labels.numpy().tobytes())
    return torch.tensor(list(state.digest()), dtype=torch.uint8)


def readable_among(images: Images, index: Tensor) -> Tensor:
    """The positions of images that can be read.   (k,)  ->  (at most k,)"""
    if isinstance(images, EmbeddedImages):
        bad = images.reasons
    elif isinstance(images, ImageStack):
        bad = images.unreadable(index)
    else:
        return index
    return index[torch.tensor([position not in bad for position in index.tolist()], dtype=torch.bool)]


def pool_truth(corpus: Corpus, data: DataConfig) -> Tensor:
    """What every training image is, as far as it is known: class, OUT_OF_CLASS or UNLABELED.   ->  (n,)"""
    truth = corpus.train_labels
    if data.labeled is None and data.source == "fashion-demo" and not data.extra:
        known = embedded_truth().labels  # the classes come first, then what is out-of-class
        return torch.where(known < len(corpus.class_names), known, OUT_OF_CLASS)
    known_parts = data.source in MIXES or (bool(data.extra) and data.source in FULLY_LABELED)
    others = OUT_OF_CLASS if data.labeled is None and known_parts else UNLABELED
    return torch.where(truth == UNLABELED, others, truth)


NAME_BYTES = 1 << 15  # of the name of an image at most, as JSON


class PoolOutputs(NamedTuple):
    """Unlabeled images, or a sample of them."""

    outputs: Outputs  # of n images
    positions: Tensor  # (n,) their positions among the training images
    truth: Tensor  # (n,) class, OUT_OF_CLASS or UNLABELED: for research, never seen by training
    size: int  # how many unlabeled images there are
    unreadable: int  # how many of those chosen could not be read
    names: tuple[str, ...]  # their files; empty where they are not files

    def name(self, row: int) -> str:
        """File of an image, or its number."""
        return self.names[row] if self.names else f"training image {int(self.positions[row])}"


class LabeledOutputs(NamedTuple):
    """All test images."""

    outputs: Outputs  # of t images
    labels: Tensor  # (t,) class, or OUT_OF_CLASS


class KeptOutputs(NamedTuple):
    """The content of embeddings.safetensors."""

    pool: PoolOutputs
    test: LabeledOutputs
    fingerprint: Tensor  # (k,) uint8, of the test images and of all labels


def write_outputs(path: Path, kept: KeptOutputs, made_from: dict[str, str]) -> None:
    """made_from: fingerprints of model, data and settings; a file of others is not used."""
    pool, test = kept.pool, kept.test
    tensors = {
        **{f"pool.{name}": value for name, value in pool.outputs._asdict().items()},
        "pool.positions": pool.positions,
        "pool.truth": pool.truth,
        "pool.size": torch.tensor(pool.size),
        "pool.unreadable": torch.tensor(pool.unreadable),
        # Plain ASCII: names that are not UTF-8 come back as they were.
        "pool.names": torch.tensor(list(json.dumps(pool.names).encode()), dtype=torch.uint8),
        **{f"test.{name}": value for name, value in test.outputs._asdict().items()},
        "test.labels": test.labels,
        "fingerprint": kept.fingerprint,
    }
    save_tensors(path, tensors, made_from)


def read_outputs(path: Path, made_from: dict[str, str], classes: int) -> KeptOutputs | None:
    """None where the file is not there, damaged, or of another model or data: it is then computed again."""
    try:
        check_regular(path, TENSOR_FILE, inside=path.parent)
        with safe_open(path, framework="pt") as file:
            if file.metadata() != made_from:
                return None
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return _checked(found, classes)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError, RecursionError):
        return None


def _checked(found: dict[str, Tensor], classes: int) -> KeptOutputs | None:
    if found["pool.names"].numel() > NAME_BYTES * (1 + len(found["pool.embedding"])):
        raise ValueError("the names are damaged")
    names = json.loads(bytes(found["pool.names"].tolist()))
    pool = PoolOutputs(
        _outputs(found, "pool", classes),
        _whole_numbers(found["pool.positions"], least=0),
        _whole_numbers(found["pool.truth"], least=OUT_OF_CLASS, most=classes - 1),
        int(found["pool.size"]),
        int(found["pool.unreadable"]),
        tuple(map(str, names)),
    )
    test = LabeledOutputs(
        _outputs(found, "test", classes),
        _whole_numbers(found["test.labels"], least=OUT_OF_CLASS, most=classes - 1),
    )
    n = len(pool.outputs.embedding)
    fits = len(pool.positions) == len(pool.truth) == n and len(names) in (0, n)
    fits &= n + pool.unreadable <= pool.size and len(test.labels) == len(test.outputs.embedding)
    fits &= found["fingerprint"].dtype == torch.uint8
    return KeptOutputs(pool, test, found["fingerprint"]) if fits else None


def _outputs(found: dict[str, Tensor], part: str, classes: int) -> Outputs:
    embedding = found[f"{part}.embedding"]
    if embedding.ndim != 2 or embedding.dtype != torch.float32:
        raise ValueError(f"{part}.embedding is damaged")
    if not (embedding.norm(dim=1) <= LONGEST).all():  # not a number is not either
        raise ValueError(f"{part}.embedding is damaged")
    n = len(embedding)
    outputs = Outputs(embedding, *(found[f"{part}.{name}"] for name in Outputs._fields[1:]))
    shapes = [(n, classes), (n,), (n,)]
    for value, shape in zip(outputs[1:], shapes, strict=True):
        if value.shape != shape or value.dtype != torch.float32 or not value.isfinite().all():
            raise ValueError(f"the outputs of the {part} are damaged")
    for value in (outputs.probs, outputs.in_domain):
        if ((value < 0) | (value > LONGEST)).any():
            raise ValueError(f"a probability of the {part} is damaged")
    return outputs


def _whole_numbers(values: Tensor, *, least: int, most: int | None = None) -> Tensor:
    wrong = values.ndim != 1 or values.dtype != torch.int64
    if wrong or (
        len(values) and (int(values.min()) < least or (most is not None and int(values.max()) > most))
    ):
        raise ValueError("whole numbers are damaged")
    return values
