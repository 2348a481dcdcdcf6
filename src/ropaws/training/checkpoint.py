"""Atomic files: a reader sees the old content or the new one, never a part."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.models import Encoder

CHECKPOINT, PREVIOUS, MODEL = "checkpoint.pt", "checkpoint.previous.pt", "model.safetensors"
SNAPSHOTS = "snapshots"


# What torch.load raises on files that are cut off, overwritten or of another kind.
UNREADABLE = (RuntimeError, KeyError, ValueError, TypeError, EOFError, OSError, pickle.UnpicklingError)


def write_atomically(path: Path, write: Callable[[Path], object], *, keep_old: Path | None = None) -> None:
    """Write to a neighbour, flush it to disk, then rename it over the target.

    keep_old: the place where the target goes, instead of being lost.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; some writers make private files
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if keep_old is not None and path.exists():
            path.replace(keep_old)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    # Plain ASCII: file names that are not UTF-8 can be written and come back as they were.
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file at {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it or make it again") from None


class Checkpoint(NamedTuple):
    """All that training needs to go on. Randomness is a function of seed and step, and needs no state."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]  # of the loss, for fp16
    next_step: int
    seconds: float  # of training so far
    made_by: dict[str, Any]  # config, data digest, code version


def save_checkpoint(run: Path, checkpoint: Checkpoint) -> None:
    """Written beside, then put in the place of the last one, which becomes the one before it.

    A failure at any point leaves a whole checkpoint.
    """

    def put(temporary: Path) -> None:
        torch.save(checkpoint._asdict(), temporary)

    path = run / CHECKPOINT
    try:
        write_atomically(path, put, keep_old=run / PREVIOUS)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        kept = f"the checkpoint before it is kept; `ropaws train --resume {run}` goes on from there"
        raise OSError(f"step {checkpoint.next_step} could not be saved to {path} ({error}); {kept}") from None


def load_checkpoint(run: Path, device: torch.device, warn: Callable[[str], object]) -> Checkpoint:
    """The last good checkpoint; a damaged one gives way to the one before it, with a warning."""
    paths = [path for path in (run / CHECKPOINT, run / PREVIOUS) if path.exists()]
    if not paths:
        raise FileNotFoundError(f"no checkpoint at {run / CHECKPOINT}; train from the start without --resume")
    reasons = []
    for path in paths:
        try:
            checkpoint = Checkpoint(**torch.load(path, map_location=device, weights_only=True))
        except UNREADABLE as error:
            reasons.append(f"{path} is damaged ({(str(error) or type(error).__name__).splitlines()[0]})")
            continue
        if reasons:
            warn(f"Warning: {reasons[0]}; going on from {path}, step {checkpoint.next_step}")
        return checkpoint
    raise ValueError("; ".join(reasons))


def restore(checkpoint: Checkpoint, model: Encoder, optimizer: Optimizer, scaler: GradScaler) -> None:
    try:
        model.load_state_dict(checkpoint.model)
        optimizer.load_state_dict(checkpoint.optimizer)
        scaler.load_state_dict(checkpoint.scaler)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"the checkpoint does not fit the settings of the run ({reason})") from None


def save_model(run: Path, model: Encoder) -> None:
    _save_weights(run / MODEL, model)


def _save_weights(file: Path, model: Encoder) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(file, lambda path: save_file(state, path))


def save_snapshot(run: Path, model: Encoder, steps: int) -> None:
    """The weights after so many steps, kept beside those of the end."""
    (run / SNAPSHOTS).mkdir(exist_ok=True)
    _save_weights(run / SNAPSHOTS / f"step-{steps:07d}.safetensors", model)


def snapshots(run: Path) -> dict[int, Path]:
    """Steps -> file, in order."""
    files = (run / SNAPSHOTS).glob("step-*.safetensors")
    return dict(sorted((int(file.stem.removeprefix("step-")), file) for file in files))


def load_model(run: Path, model: Encoder, path: Path | None = None) -> None:
    """The weights of the end, or of a snapshot."""
    path = path or run / MODEL
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no trained model at {path}; finish it with `ropaws train --resume {run}`"
        ) from None
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be loaded ({str(error).splitlines()[0]})") from None
