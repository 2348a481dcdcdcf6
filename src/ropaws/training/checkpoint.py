"""Atomic files: a reader sees the old content or the new one, never a part."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from ropaws.models import Encoder

CHECKPOINT, MODEL = "checkpoint.pt", "model.safetensors"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a neighbour, flush it to disk, then rename it over the target."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
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


def save_checkpoint(
    run: Path, model: Encoder, optimizer: Optimizer, *, next_step: int, seconds: float
) -> None:
    """All that training needs to go on at next_step; randomness is a function of seed and step."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "next_step": next_step,
        "seconds": seconds,
    }
    write_atomically(run / CHECKPOINT, lambda path: torch.save(state, path))


def load_checkpoint(run: Path, model: Encoder, optimizer: Optimizer) -> tuple[int, float]:
    """Restore model and optimiser in place; the next step, and the seconds trained so far."""
    path = run / CHECKPOINT
    device = next(model.parameters()).device
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["next_step"]), float(state["seconds"])
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint at {path}; train from the start without --resume") from None
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be loaded into this run ({reason})") from None


def save_model(run: Path, model: Encoder) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(run / MODEL, lambda path: save_file(state, path))


def load_model(run: Path, model: Encoder) -> None:
    path = run / MODEL
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no trained model at {path}; finish it with `ropaws train --resume {run}`"
        ) from None
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be loaded ({str(error).splitlines()[0]})") from None
