"""Batch norms folded into the convolutions before them: the same features in less time.

A module names its pairs in `norm_pairs`: tuples of the name of a convolution and of the batch norm that
takes its output, and nothing else does. Pairs that a module does not have (a missing shortcut) are skipped.
"""

import copy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def folded(backbone: nn.Module) -> nn.Module:
    """A copy for inference whose batch norms are part of the convolutions; it cannot be trained.

    A backbone that declares no pairs (timm's) is returned as it is, not a copy.
    """
    if not any(hasattr(module, "norm_pairs") for module in backbone.modules()):
        return backbone
    copied = copy.deepcopy(backbone).eval().requires_grad_(False)
    for module in list(copied.modules()):
        for convolution, norm in getattr(module, "norm_pairs", ()):
            _fold(module, convolution, norm)
    return copied


def _fold(module: nn.Module, convolution: str, norm: str) -> None:
    parts = dict(module.named_modules())
    if convolution not in parts:
        return
    merged = fuse_conv_bn_eval(parts[convolution], parts[norm])
    for name, part in ((convolution, merged), (norm, nn.Identity())):
        parent, _, own = name.rpartition(".")
        setattr(parts[parent], own, part)
