"""What a trained method says of the pool and of the test images, computed once and kept in the run folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropaws.batch import Outputs
from ropaws.data.corpus import UNKNOWN
from ropaws.limits import TENSOR_FILE
from ropaws.models.torch_files import save_tensors
from ropaws.runs.facts import LONGEST
from ropaws.runs.opening import check_regular

NAME_BYTES = 1 << 15  # of the name of an image at most, as JSON
OUT, HIDDEN = UNKNOWN, UNKNOWN - 1  # truth of a pool image: of no class, or not known
# The names that 0.1.0 gave to the same tensors; it kept no probabilities and scores.
FORMER_NAMES = {
    "pool.embedding": "pool", "pool.positions": "pool_index", "pool.truth": "pool_truth",
    "pool.size": "pool_size", "pool.unreadable": "unreadable", "pool.names": "names",
    "test.embedding": "test", "test.labels": "test_labels",
}  # fmt: skip


class PoolOutputs(NamedTuple):
    """Unlabeled images, or a sample of them."""

    outputs: Outputs  # of n images
    positions: Tensor  # (n,) their positions among the training images
    truth: Tensor  # (n,) class, OUT or HIDDEN: for research, never seen by training
    size: int  # how many unlabeled images there are
    unreadable: int  # how many of those chosen could not be read
    names: tuple[str, ...]  # their files; empty where they are not files

    def name(self, row: int) -> str:
        """File of an image, or its number."""
        return self.names[row] if self.names else f"training image {int(self.positions[row])}"


class LabeledOutputs(NamedTuple):
    """All test images."""

    outputs: Outputs  # of t images
    labels: Tensor  # (t,) class, or OUT


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


def read_outputs(
    path: Path, made_from: dict[str, str], classes: int, classify: Callable[[Tensor], Outputs]
) -> KeptOutputs | None:
    """None where the file is not there, damaged, or of another model or data: it is then computed again.

    classify: outputs of embeddings, for a file of 0.1.0, which has these alone.
    """
    try:
        check_regular(path, TENSOR_FILE, inside=path.parent)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        of_0_1_0 = {name: made_from[name] for name in ("model", "data")}
        if metadata != made_from and (metadata != of_0_1_0 or "pool.probs" in found):
            return None
        for name, former in FORMER_NAMES.items():
            if former in found:
                found[name] = found.pop(former)
        return _checked(found, classes, classify)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError, RecursionError):
        return None


def _checked(
    found: dict[str, Tensor], classes: int, classify: Callable[[Tensor], Outputs]
) -> KeptOutputs | None:
    if found["pool.names"].numel() > NAME_BYTES * (1 + len(found["pool.embedding"])):
        raise ValueError("the names are damaged")
    names = json.loads(bytes(found["pool.names"].tolist()))
    pool = PoolOutputs(
        _outputs(found, "pool", classes, classify),
        _whole_numbers(found["pool.positions"], least=0),
        _whole_numbers(found["pool.truth"], least=HIDDEN, most=classes - 1),
        int(found["pool.size"]),
        int(found["pool.unreadable"]),
        tuple(map(str, names)),
    )
    test = LabeledOutputs(
        _outputs(found, "test", classes, classify),
        _whole_numbers(found["test.labels"], least=OUT, most=classes - 1),
    )
    n = len(pool.outputs.embedding)
    fits = len(pool.positions) == len(pool.truth) == n and len(names) in (0, n)
    fits &= n + pool.unreadable <= pool.size and len(test.labels) == len(test.outputs.embedding)
    fits &= found["fingerprint"].dtype == torch.uint8
    return KeptOutputs(pool, test, found["fingerprint"]) if fits else None


def _outputs(
    found: dict[str, Tensor], part: str, classes: int, classify: Callable[[Tensor], Outputs]
) -> Outputs:
    embedding = found[f"{part}.embedding"]
    if embedding.ndim != 2 or embedding.dtype != torch.float32:
        raise ValueError(f"{part}.embedding is damaged")
    if not (embedding.norm(dim=1) <= LONGEST).all():  # not a number is not either
        raise ValueError(f"{part}.embedding is damaged")
    if f"{part}.probs" not in found:
        return classify(embedding)
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
