"""Start a backbone from a weight file: torchvision's, SwAV's, MoCo's, timm's, or another run's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ropaws.limits import TENSOR_FILE
from ropaws.models.torch_files import load_torch_file
from ropaws.runs.opening import check_regular

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
        content: Any = load_torch_file(path, "cpu")
    except Exception:  # safetensors raises nearly anything
        raise ValueError(
            f"model.init: {path} is damaged or holds more than tensors; a weight file is a .safetensors, or"
            " torch.save of a state_dict (nothing else in it would be executed)"
        ) from None
    for _ in WRAPPERS:  # not without end: a dictionary may contain itself
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


def init_backbone(backbone: nn.Module, path: Path, name: str) -> list[str]:
    """Load a weight file into a backbone; the names in it that were left out, such as a classifier's."""
    weights = read_weights(path)
    try:
        fitting, left = fit_weights(backbone, weights)
    except ValueError as error:
        raise ValueError(f"model.init: {path} does not fit backbone {name}: {error}") from None
    backbone.load_state_dict(fitting, strict=False)
    return left


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
