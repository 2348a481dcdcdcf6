"""Batch norm whose statistics are those of the global batch, on any backend."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ropaws.distributed import all_sum, place, stack_constants


class SyncedBatchNorm(_BatchNorm):
    """As BatchNorm1d and BatchNorm2d, with the mean and variance over all processes.

    torch's own SyncBatchNorm refuses CPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected (n, channels, ...), got {input.ndim} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or place().size == 1:
            return super().forward(input)
        out, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        self._remember(mean, variance * (count / (count - 1)))
        result: Tensor = out
        return result

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 0.1 if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _Normalize(torch.autograd.Function):
    """One exchange each way: moments forward, two sums backward.

    Sums come from torch's own kernels for batch norm: a general reduction over the images and pixels of a
    channels-last batch takes over ten times as long. The backward pass may be differentiated by its incoming
    gradient (ds3l), not by the images or weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        own_count = weight.new_tensor([x.numel() / x.shape[1]])
        parts = stack_constants(torch.cat([own_count, *_moments(x, weight)]))  # (processes, 1 + 2 channels)
        counts, means, variances = parts.split([1, x.shape[1], x.shape[1]], dim=1)
        count = sum(parts[:, 0].tolist())
        shares = (counts / count).t()
        mean = (shares @ means)[0]
        # Within the parts and between them: sums of squares of all would lose digits.
        apart = means - mean
        variance = (shares @ torch.addcmul(variances, apart, apart))[0]
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.count = eps, count
        out = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dx = w s (dy - sum dy / n - y sum (dy y) / n),  with y = s (x - mean), s = 1 / sqrt(var + eps)"""
        x, weight, mean, variance = ctx.saved_tensors
        x, weight = x.detach(), weight.detach()
        wide, given = x.to(weight.dtype), gradient.to(weight.dtype)
        if x.numel():  # sum (dy y), sum dy
            _, slopes, sums = torch.ops.aten.native_batch_norm_backward(
                given, wide, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        else:
            slopes, sums = torch.zeros_like(weight), torch.zeros_like(weight)
        average, slope = all_sum(torch.stack([sums, slopes])) / ctx.count
        # In two passes over the rows:  dx = (a dy + c) - b x
        scale = (variance + ctx.eps).rsqrt()
        a = weight * scale
        b = a * scale * slope
        c = b * mean - a * average
        a, b, c = (value.view(-1, *(1,) * (x.ndim - 2)) for value in (a, b, c))
        towards = torch.addcmul(c, given, a).addcmul_(wide, b, value=-1)
        return towards.to(gradient.dtype), slopes, sums, None


def _moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, in the precision of the weight; 0 where there are no rows."""
    if not x.numel():
        return torch.zeros_like(weight), torch.zeros_like(weight)
    wide = x.to(weight.dtype)  # half precision would lose the sums
    mean, variance = torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0)
    return mean, variance


def synchronize_norms(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with every batch norm synchronized: torch's own on CUDA, ours elsewhere."""
    if place().size == 1:
        return module
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    return _replace(module)


def _replace(module: nn.Module) -> nn.Module:
    """Every batch norm in place, keeping weights, statistics and names."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            synced = SyncedBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            some = next(child.buffers())
            synced.to(some.device, child.weight.dtype).load_state_dict(child.state_dict())
            synced.train(child.training)
            setattr(module, name, synced)
        else:
            _replace(child)
    return module
