"""Batch norm whose statistics are those of the global batch, on any backend."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ropaws.distributed import all_sum, place


class SyncedBatchNorm(_BatchNorm):
    """As BatchNorm1d and BatchNorm2d, with the mean and variance over all processes.

    torch's own SyncBatchNorm refuses CPUs. Two all-reduces a layer, the second of squared distances from
    the mean: one of sums of squares would lose digits.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected (n, channels, ...), got {input.ndim} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or place().size == 1:
            return super().forward(input)
        dims = [d for d in range(input.ndim) if d != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        wide = input.to(self.weight.dtype)  # half precision would lose the sums
        count = all_sum(wide.new_tensor(float(input.numel() // input.shape[1])))
        mean = all_sum(wide.sum(dims)) / count
        centred = wide - mean.view(shape)
        variance = all_sum(centred.square().sum(dims)) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        return (normal * self.weight.view(shape) + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 0.1 if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def synchronise_norms(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with every batch norm synchronised: torch's own on CUDA, ours elsewhere."""
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
