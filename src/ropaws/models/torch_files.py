"""What torch.save has written, looked at before torch reads it: nothing compressed, no values without end.

torch.load with weights_only runs nothing that is in a file. But a file may hold parts that unpack to a
thousand times their size, and a few hundred bytes can say a list of ten lists of ten lists ... that no one
can walk to the end.
"""

import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ropaws.limits import TENSOR_FILE
from ropaws.runs.atomic import write_atomically
from ropaws.runs.opening import open_regular

MOST_VALUES = 50_000_000  # that a file may stand for; one of ours has a few for each tensor and label
MOST_PICKLE = 1 << 28  # bytes
LEGACY_PICKLES = 5  # at the start of a file of torch before 1.6: magic number, version, system, content, keys
# Opcodes that add to a value that is on the stack already, so that all who refer to it see it grow.
GROW = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
STORE = ("PUT", "BINPUT", "LONG_BINPUT")
FETCH = ("GET", "BINGET", "LONG_BINGET")


def load_torch_file(
    path: Path, device: torch.device | str, *, inside: Path | None = None, most: int | None = None
) -> Any:
    """The content of a file that torch.save has written; nothing in it is executed.

    Args:
        path: The file.
        device: Where its tensors go.
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
            return torch.load(file, map_location=device, weights_only=True)
        except Exception:  # torch raises nearly anything, some of it with advice to run a stranger's code
            raise ValueError("it is cut off, or not a file of tensors, numbers and text alone") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor], made_by: dict[str, str] | None = None) -> None:
    """Write a .safetensors file, whole or not at all.

    Raises:
        OSError: The disk is full, or refuses for another reason.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
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
        raise ValueError("its values repeat each other without end")
