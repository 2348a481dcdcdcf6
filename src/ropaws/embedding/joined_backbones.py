"""Several backbones together, dinov2-small+tiny-vit: each sees its own views; unit features side by side."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.features import Features

JOIN = "+"


def part_names(backbone: str) -> tuple[str, ...]:
    """The networks that a name stands for: one, or several."""
    return tuple(backbone.split(JOIN))


def init_files(init: Path) -> tuple[Path, ...]:
    """The weight files that a setting names: one, or as many as there are networks, joined alike."""
    parts = str(init).split(JOIN)
    if len(parts) == 1 or init.exists() or not all(parts):
        return (init,)
    return tuple(map(Path, parts))


def check_joined(backbone: str, *, frozen: bool, trained_from_scratch: bool, sizes: Sequence[int]) -> None:
    """Raise an error for what networks together cannot do."""
    names = part_names(backbone)
    if len(names) == 1:
        if sizes:
            raise ValueError(f"model.view_sizes goes with several networks, got {backbone}; use augment.size")
        return
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"model.backbone: join different networks, such as dinov2-small+tiny-vit, got {backbone}"
        )
    if trained_from_scratch or not frozen:
        raise ValueError(
            f"model.backbone={backbone}: networks together are used as they are, with weights and"
            " model.frozen; to train the whole network (--train-backbone), choose one of them"
        )
    if sizes and (len(sizes) != len(names) or min(sizes) < 1):
        raise ValueError(
            f"model.view_sizes must be a size for each of the {len(names)} networks of {backbone}, got"
            f" {tuple(sizes)}"
        )


class JoinedBackbone(nn.Module):
    """Frozen networks whose features stand side by side; what they see of an image, each gets by itself.

    Args:
        parts: Each with the number of its `features`.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.features = sum(int(part.features) for part in parts)  # type: ignore[arg-type, misc]

    def forward(self, images: Tensor) -> Tensor:
        raise ValueError(
            "networks together see views of their own, so images cannot go through them as through one; use"
            " one of them for this"
        )


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all networks, each scaled to unit length.   (..., d_i) each  ->  (..., sum of d_i)"""
    return torch.cat([F.normalize(part.float(), dim=-1) for part in parts], dim=-1)


class JoinedFeatures(Features):
    """Features of the same images by several networks.

    Args:
        parts: By each of them, in as many views.
        made_from: Digest of all of them.
    """

    def __init__(self, parts: Sequence[Features], made_from: str) -> None:
        self.parts = tuple(parts)
        self.made_from = made_from

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.parts[0]), sum(part.shape[1] for part in self.parts)))

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self._joined(lambda part: part[index])

    @property
    def view_count(self) -> int:
        return self.parts[0].view_count

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        return self._joined(lambda part: part.views(index, kind, chosen))

    def digest(self) -> str:
        state = hashlib.blake2b(self.made_from.encode(), digest_size=16)
        for part in self.parts:
            state.update(part.digest().encode())
        return state.hexdigest()

    def _joined(self, read: Callable[[Features], Tensor]) -> Tensor:
        return side_by_side([read(part) for part in self.parts])
