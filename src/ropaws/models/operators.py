"""Where torchvision is installed but does not fit this torch, importing it must not break others."""

import contextlib
import importlib.util

import torch

_KEPT: list[torch.library.Library] = []  # an operator lives as long as its library


def declare_missing_operators() -> None:
    """To be called before timm or torchmetrics is imported, both of which import torchvision.

    That fails where its compiled part does not fit this torch. Nothing here calls the two operators
    whose absence is the reason, so their names are enough. Where torchvision is whole or not there,
    nothing is done.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there already
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
