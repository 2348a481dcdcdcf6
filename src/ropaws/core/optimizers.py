"""The optimizers and their settings: LARS as in PAWS, SGD as in the FixMatch family, Adam for heads."""

import inspect
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT


class _Untraced(torch.optim.Optimizer):
    """An optimizer that does not load the tracer of torch.compile, which takes a second or more.

    torch's optimizers load it at first use, only to keep it away from these methods; none is traced here.
    """

    def __init__(self, params: ParamsT, *defaults: Any, **options: Any) -> None:
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if method is not None and "torch._dynamo" not in sys.modules:
                method.__dict__.setdefault("__dynamo_disable", method)
        super().__init__(params, *defaults, **options)


class SGD(_Untraced, torch.optim.SGD):
    """torch's own."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Adam(_Untraced, torch.optim.Adam):
    """torch's own."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class LARS(_Untraced):
    """Layer-wise adaptive rates (You et al., 2017).

    update = rate (g + decay w),  rate = trust |w| / (|g| + decay |w| + eps)
    Vectors (biases, norm layers) are excluded by their number of dimensions: plain g, no decay.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        trust: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if weight.ndim > 1:
            gradient = _adapt(weight, gradient, group["weight_decay"], group["trust"], group["eps"])
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        weight.add_(state["momentum"], alpha=-group["lr"])


def _adapt(weight: Tensor, gradient: Tensor, decay: float, trust: float, eps: float) -> Tensor:
    size, slope = weight.norm(), gradient.norm()
    rate = trust * size / (slope + decay * size + eps)
    # A weight or gradient of zero gives no scale to go by: take the gradient as it is.
    return torch.where((size > 0) & (slope > 0), (gradient + decay * weight) * rate, gradient)


def warmup_cosine(step: int, *, peak: float, start: float, end: float, warmup: int, total: int) -> float:
    """Linear from start to peak over the warm-up, then half a cosine down to end at the last step."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2


def fixmatch_cosine(step: int, *, peak: float, total: int) -> float:
    """peak cos(7/16 pi step / total): no warm-up, ends at about a fifth of the peak."""
    return peak * math.cos(7 / 16 * math.pi * step / total)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate."""

    name: Literal["lars", "sgd", "adam"] = "lars"
    """lars, sgd with Nesterov momentum, or adam."""
    schedule: Literal["cosine", "fixmatch"] = "cosine"
    """cosine: linear warm-up, then half a cosine to the end. fixmatch: peak cos(7/16 pi step / steps)."""
    peak: float = 3.2
    """Highest learning rate."""
    start: float = 0.8
    """Learning rate of the first step."""
    end: float = 0.032
    """Learning rate of the last step."""
    warmup: int = 1950
    """Steps from start to peak."""
    momentum: float = 0.9
    """Share of the last update that is kept; adam's first beta."""
    weight_decay: float = 1e-6
    """Pull of the weights towards zero; biases and norm layers have none."""
    trust: float = 0.001
    """lars: size of a step against the size of the weight that it changes."""

    def __post_init__(self) -> None:
        if not 0 < self.peak < math.inf:
            raise ValueError(f"optim.peak must be positive, got {self.peak}")
        for name in ("start", "end", "warmup", "weight_decay", "trust"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"optim.{name} must be at least 0, got {value}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum must be at least 0 and below 1, got {self.momentum}")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of all weights that are trained; biases and norm layers have no weight decay."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if config.name == "lars":
        return LARS(
            weights,
            lr=config.start,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            trust=config.trust,
        )
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.name == "adam":
        return Adam(groups, lr=config.start, betas=(config.momentum, 0.999))
    return SGD(groups, lr=config.start, momentum=config.momentum, nesterov=config.momentum > 0)


def learning_rate(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step."""
    if config.schedule == "fixmatch":
        return lambda step: fixmatch_cosine(step, peak=config.peak, total=steps)
    return lambda step: warmup_cosine(
        step, peak=config.peak, start=config.start, end=config.end, warmup=config.warmup, total=steps
    )
