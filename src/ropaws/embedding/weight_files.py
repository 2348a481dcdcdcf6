"""Weight files: read without running what is in them, and fitted to a network by names and shapes.

What torch.save has written is looked at before torch reads it: nothing compressed, no endless values.
torch.load with weights_only runs nothing that is in a file. But a file may hold parts that unpack to a
thousand times their size, and a few hundred bytes can say a list of ten lists of ten lists ... that no one
can walk to the end.
"""

import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ropaws.core.files import TENSOR_FILE, check_regular, open_regular, write_atomically

MOST_VALUES = 50_000_000  # that a file may stand for; one of ours has a few for each tensor and label
MOST_PICKLE = 1 << 28  # bytes
LEGACY_PICKLES = 5  # at the start of a file of torch before 1.6: magic number, version, system, content, keys
# Opcodes that add to a value that is on the stack already, so that all who refer to it see it grow.
GROW = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
STORE = ("PUT", "BINPUT", "LONG_BINPUT")
FETCH = ("GET", "BINGET", "LONG_BINGET")


def load_torch_file(path: Path, *, inside: Path | None = None, most: int | None = None) -> Any:
    """The content of a file that torch.save has written, on the CPU; nothing in it is executed.

    Args:
        path: The file.
        inside: The run folder that it is in: no link is followed there.
        most: Bytes that it may have; by default those of limits.TENSOR_FILE.

    Raises:
        OSError: It is not a regular file, or not there.
        ValueError: It is too large, damaged, compressed, or holds more than tensors, numbers and text.
    """
    with open_regular(path, TENSOR_FILE, inside=inside) as file:
        if most is not None:
            TENSOR_FILE.check(path.stat().st_size, path, most=most)
        try:
            _check_content(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # torch raises nearly anything, some of it with advice to run a stranger's code
            raise ValueError("it is cut off, or not a file of tensors, numbers and text alone") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor], made_by: dict[str, str] | None = None) -> None:
    """Write a .safetensors file, whole or not at all.

    Raises:
        OSError: The disk is full, or refuses for another reason.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write_atomically(path, lambda temporary: save_file(contiguous, temporary, metadata=made_by))
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error})") from None


def _check_content(file: IO[bytes]) -> None:
    """Raise any exception if the archive is compressed, or its values are too many."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(LEGACY_PICKLES):
            check_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise ValueError("its parts are compressed, which torch does not do")
            if member.filename.endswith("/data.pkl"):
                if member.file_size > MOST_PICKLE:
                    raise ValueError("its list of tensors is too long")
                with archive.open(member) as stream:
                    check_pickle(stream)


def check_pickle(stream: IO[bytes]) -> None:
    """Raise an error if the values of a pickle, written out without references, would be too many.

    Follows the stack machine of pickle with the number of values in the place of each value.
    """
    stack: list[list[int] | None] = []  # a number in a list, shared by all who refer to it; None is a mark
    memo: dict[int, list[int]] = {}
    for code, argument, _ in pickletools.genops(stream):
        if code.name == "MEMOIZE" or code.name in STORE:
            memo[len(memo) if argument is None else int(argument)] = _top(stack)
        elif code.name in FETCH:
            stack.append(memo[int(argument or 0)])
        elif code.name == "MARK":
            stack.append(None)
        elif code.name in GROW:
            added = _taken(stack, code)
            target = _top(stack)
            target[0] = min(target[0] + added, MOST_VALUES + 1)
            _check_count(target[0])
        else:
            count = 1 + _taken(stack, code)
            _check_count(count)
            stack += [[count] for _ in code.stack_after]


def _taken(stack: list[list[int] | None], code: pickletools.OpcodeInfo) -> int:
    """Take what an opcode takes from the stack, but for a value that grows; how many values that were."""
    wanted = [item.name for item in code.stack_before]
    if code.name in GROW:
        wanted = wanted[1:]
    total = 0
    if "mark" in wanted:
        while (item := stack.pop()) is not None:
            total += item[0]
        wanted = wanted[: wanted.index("mark")]
    for _ in wanted:
        item = stack.pop()
        total += item[0] if item is not None else 0
    return total


def _top(stack: list[list[int] | None]) -> list[int]:
    top = stack[-1]
    if top is None:
        raise ValueError("a value is missing")
    return top


def _check_count(count: int) -> None:
    if count > MOST_VALUES:
        raise ValueError("its values repeat each other endlessly")


# What trainers put before the names of a backbone.
PREFIXES = (
    "",
    "module.",
    "backbone.",
    "module.backbone.",
    "module.encoder_q.",
    "encoder.",
    "model.",
    "module.encoder.",
    "encoder.backbone.",
    "average.module.encoder.backbone.",  # of runs with a moving average: it is what predicts
    "network.encoder.backbone.",
    "backbone.body.",
    "encoder.backbone.body.",
    "average.module.encoder.backbone.body.",
    "network.encoder.backbone.body.",
)
PROJECTIONS = (
    "projection.",
    "encoder.projection.",
    "average.module.encoder.projection.",
    "network.encoder.projection.",
)
WRAPPERS = ("state_dict", "model", "model_state_dict", "encoder")  # dictionaries around the weights
SHOWN = 3


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pth.tar or .pt file; nothing in it is executed."""
    try:
        check_regular(path, TENSOR_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(f"model.init: no weight file at {path}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"model.init: {error}") from None
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = load_torch_file(path)
    except Exception:  # safetensors raises nearly anything
        raise ValueError(
            f"model.init: {path} is damaged or holds more than tensors; a weight file is a .safetensors, or"
            " torch.save of a state_dict (nothing else in it would be executed)"
        ) from None
    for _ in WRAPPERS:  # a bounded number of times: a dictionary may contain itself
        inner = next((k for k in WRAPPERS if k in content), None) if isinstance(content, dict) else None
        content = content if inner is None else content[inner]
    found = content.items() if isinstance(content, dict) else ()
    weights = {name: value for name, value in found if isinstance(name, str) and _is_plain(value)}
    if not weights:
        raise ValueError(f"model.init: {path} has no tensors by name in it")
    return weights


def _is_plain(value: object) -> bool:
    """A tensor with real numbers in memory: neither sparse, nor complex, nor without content."""
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return plain and not (value.is_complex() or value.is_quantized)  # type: ignore[attr-defined]


def fit_weights(backbone: nn.Module, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of the backbone under its own names, and the names that belong to something else.

    Of all prefixes the one with the most fitting names. What is missing or has another shape is an error.
    """
    wanted = {k: v for k, v in backbone.state_dict().items() if not k.endswith("num_batches_tracked")}
    prefix = max(PREFIXES, key=lambda p: sum(f"{p}{name}" in weights for name in wanted))
    missing = [name for name in wanted if f"{prefix}{name}" not in weights]
    shapes = {
        name: (tuple(weights[f"{prefix}{name}"].shape), tuple(value.shape))
        for name, value in wanted.items()
        if name not in missing and weights[f"{prefix}{name}"].shape != value.shape
    }
    left = [name for name in weights if name.removeprefix(prefix) not in wanted]
    if missing or shapes:
        raise ValueError("; ".join(_misfits(missing, shapes, left)))
    fitting = {name: weights[f"{prefix}{name}"] for name in wanted}
    broken = [name for name, value in fitting.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"these have values that are not finite: {', '.join(broken[:SHOWN])}")
    counters = [name for name in left if name.endswith("num_batches_tracked")]
    return fitting, [n for n in left if n not in counters]


def _misfits(
    missing: list[str], shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], left: list[str]
) -> list[str]:
    def some(names: list[str]) -> str:
        return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

    parts = []
    if missing:
        parts.append(f"it lacks {some(missing)}")
    if shapes:
        listed = [f"{name} (has {has}, needs {needs})" for name, (has, needs) in shapes.items()]
        parts.append(f"these have another shape: {some(listed)}")
    if missing and left:
        parts.append(f"it has instead {some(left)}")
    return parts


def looks_like(weights: Mapping[str, Tensor]) -> str:
    """What network weights belong to, in words, by their names and shapes."""
    kernels = {name: value for name, value in weights.items() if value.ndim == 4}
    patches = next((v for name, v in kernels.items() if name.endswith("patch_embed.proj.weight")), None)
    if patches is not None:
        blocks = {match[1] for name in weights if (match := re.search(r"blocks\.(\d+)\.", name))}
        return (
            f"a vision transformer of {len(blocks)} blocks, width {patches.shape[0]} and patches of"
            f" {patches.shape[2]} px"
        )
    if kernels:
        return f"a convolutional network that starts with {next(iter(kernels.values())).shape[0]} channels"
    return "no network for images"


def init_projection(projection: nn.Module, path: Path, left: list[str]) -> list[str]:
    """Load the projection head of another run, if the file has one; the names that are left out then.

    left: names in the file that are not the backbone's
    """
    wanted = projection.state_dict()
    prefix = next((p for p in PROJECTIONS if f"{p}0.weight" in left), None)
    if prefix is None:
        return left
    weights = {k.removeprefix(prefix): v for k, v in read_weights(path).items() if k.startswith(prefix)}
    misfits = [n for n, v in wanted.items() if n not in weights or weights[n].shape != v.shape]
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"model.init: {path} has values that are not finite: {', '.join(broken[:SHOWN])}")
    if misfits:
        raise ValueError(
            f"model.init: the projection head of {path} has another shape ({misfits[0]}); set"
            " --model.projection-hidden and --model.projection-dims as that run has them"
        )
    projection.load_state_dict({name: weights[name] for name in wanted})
    return [name for name in left if not name.startswith(prefix)]
