"""Checkpoints and weights of a run, checked when they are read."""

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.core.files import TENSOR_FILE, check_regular, make_folder, replacing
from ropaws.core.run_layout import CHECKPOINT, MODEL, PREVIOUS_CHECKPOINT, SNAPSHOTS
from ropaws.embedding.weight_files import load_torch_file, save_tensors

OPTIMIZER_STATE = ("momentum", "momentum_buffer", "exp_avg", "exp_avg_sq")  # of LARS, of SGD, of Adam
STEP_COUNT = "step"  # of Adam, one number for each weight
MOST_SECONDS = 1e12
COPIES = 5  # of the weights that a file may hold at most: the model, the optimizer's moments, moving averages
BESIDE = 1 << 26  # bytes that a file may have besides


class Checkpoint(NamedTuple):
    """All that training needs to resume. Randomness is a function of seed and step, and needs no state."""

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
    path = run / CHECKPOINT
    try:
        with replacing(path, keep_old=run / PREVIOUS_CHECKPOINT) as temporary:
            torch.save(checkpoint._asdict(), temporary)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        kept = f"the checkpoint before it is kept; `ropaws train --resume {run}` starts from there"
        raise OSError(f"step {checkpoint.next_step} could not be saved to {path} ({error}); {kept}") from None


def load_checkpoint(run: Path, warn: Callable[[str], object], *, weights: int | None = None) -> Checkpoint:
    """The last good checkpoint, on the CPU: the one before it if it is damaged, with a warning.

    weights: bytes that the model has; a file that is much larger is not of this run, and not read.
    """
    paths = [path for path in (run / CHECKPOINT, run / PREVIOUS_CHECKPOINT) if path.exists()]
    if not paths:
        raise FileNotFoundError(f"no checkpoint at {run / CHECKPOINT}; train from the start without --resume")
    reasons = []
    for path in paths:
        try:
            most = None if weights is None else COPIES * weights + BESIDE
            checkpoint = _checked(load_torch_file(path, inside=run, most=most))
        except (ValueError, OSError) as error:
            reasons.append(f"{path} is damaged ({error})")
            continue
        if reasons:
            warn(f"Warning: {reasons[0]}; resuming from {path}, step {checkpoint.next_step}")
        return checkpoint
    raise ValueError("; ".join(reasons))


def _checked(values: Any) -> Checkpoint:
    """What was read, if it is what a checkpoint must be."""
    if not isinstance(values, dict) or set(values) != set(Checkpoint._fields):
        raise ValueError("it does not hold the parts of a checkpoint")
    checkpoint = Checkpoint(**values)
    for name in ("model", "optimizer", "scaler", "made_by"):
        if not isinstance(values[name], dict):
            raise ValueError(f"{name} is not a dictionary")
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in checkpoint.model.items()):
        raise ValueError("model holds something that is not a tensor")
    if type(checkpoint.next_step) is not int or checkpoint.next_step < 0:
        raise ValueError(f"next_step is {reprlib.repr(checkpoint.next_step)}")
    if type(checkpoint.seconds) not in (int, float) or not 0 <= checkpoint.seconds < MOST_SECONDS:
        raise ValueError(f"seconds is {reprlib.repr(checkpoint.seconds)}")
    made_by = checkpoint.made_by
    for name, kind in (("config", dict), ("digest", str), ("split", list)):
        if not isinstance(made_by.get(name), kind):
            raise ValueError(f"made_by.{name} is {reprlib.repr(made_by.get(name))}")
    return checkpoint


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Put the state of a checkpoint into the parts of a run that were built from its settings."""
    settings = [_settings(group) for group in optimizer.param_groups]
    try:
        _load_state(checkpoint.model, model)
        _check_optimizer(checkpoint.optimizer["state"], optimizer)
        optimizer.load_state_dict(checkpoint.optimizer)
        scaler.load_state_dict(checkpoint.scaler)
        if [_settings(group) for group in optimizer.param_groups] != settings:
            raise ValueError("the optimizer has other settings")
        if not weights_are_finite(model):
            raise ValueError("a weight is not finite")
    # Whatever a damaged part leads to.
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the checkpoint does not fit the settings of the run ({_reason(error)})") from None


def _check_optimizer(states: dict[int, dict[str, Any]], optimizer: Optimizer) -> None:
    """Before it is loaded: torch takes any state, and converts its type without a word."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, state in states.items():
        for name, value in state.items():
            fits = isinstance(value, Tensor) and name in (*OPTIMIZER_STATE, STEP_COUNT)
            shape = torch.Size() if name == STEP_COUNT else weights[number].shape
            if not fits or value.shape != shape or value.dtype != weights[number].dtype:
                raise ValueError(f"the optimizer's {name!r:.40} of weight {number!r:.40} is damaged")
            if not value.isfinite().all():
                raise ValueError(f"the optimizer's {name} of weight {number} is not finite")


def _reason(error: Exception) -> str:
    """The first line, and the next one where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a group of weights, but for the learning rate, which changes with the step."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _load_state(state: dict[str, Tensor], model: nn.Module) -> None:
    """Every weight and buffer must be there, and be of the type of the model's own."""
    wanted = model.state_dict()
    for name in state.keys() & wanted.keys():
        if state[name].dtype != wanted[name].dtype:  # torch would convert it without a word
            raise ValueError(f"{name} is {state[name].dtype} and must be {wanted[name].dtype}")
    model.load_state_dict(state)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers."""
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def weights_are_finite(model: nn.Module) -> bool:
    """A finite loss may have had a gradient that was not; such weights must not become a checkpoint."""
    return all(bool(value.isfinite().all()) for value in model.parameters())


def _finite_values(model: nn.Module) -> set[str]:
    """Names of the weights and buffers that are finite; a method may mark what it does not know by others."""
    return {name for name, value in model.state_dict().items() if bool(value.isfinite().all())}


def save_model(run: Path, model: nn.Module) -> None:
    _save_weights(run / MODEL, model)


def _save_weights(file: Path, model: nn.Module) -> None:
    save_tensors(file, model.state_dict())


def save_snapshot(run: Path, model: nn.Module, steps: int) -> None:
    """Keep the weights after this number of steps."""
    make_folder(run / SNAPSHOTS)
    _save_weights(run / SNAPSHOTS / f"step-{steps:07d}.safetensors", model)


def snapshots(run: Path) -> dict[int, Path]:
    """Steps -> file, in order."""
    files = (run / SNAPSHOTS).glob("step-*.safetensors")
    numbered = {file.stem.removeprefix("step-"): file for file in files}
    return dict(sorted((int(number), file) for number, file in numbered.items() if number.isdecimal()))


def load_model(run: Path, model: nn.Module, path: Path | None = None) -> None:
    """The weights of the end, or of a snapshot.

    Raises:
        FileNotFoundError: The run is not finished.
        ValueError: The file is damaged, belongs to another network, or has weights that are not finite.
    """
    path = path or run / MODEL
    finite = _finite_values(model)
    try:
        check_regular(path, TENSOR_FILE, inside=run)
        TENSOR_FILE.check(path.stat().st_size, path, most=COPIES * weight_bytes(model) + BESIDE)
        _load_state(load_file(path), model)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no trained model at {path}; finish it with `ropaws train --resume {run}`"
        ) from None
    except (RuntimeError, SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be loaded ({_reason(error)}); restore it or train again") from None
    if not finite <= _finite_values(model):  # statistics of norms included
        raise ValueError(f"{path} has weights that are not finite; train again")
