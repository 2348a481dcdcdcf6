"""The weak and the strong view of FixMatch and its relatives.

As in augment.py, all chance comes from a generator on the CPU and is drawn for the whole batch; the
images are worked on where they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ropaws.data import geometric_ops, image_ops
from ropaws.data.augment import Part, whole


def _factors(images: Tensor, amounts: Tensor) -> Tensor:
    """Factors of Pillow's enhancers, 0.05 to 0.95: only darker, grayer, flatter or smoother."""
    return (0.05 + 0.9 * amounts.abs()).to(images.device)


def _solarize(images: Tensor, amounts: Tensor) -> Tensor:
    """Invert the levels from 256 (1 - |amount|) up."""
    first = (256 * (1 - amounts.abs())).ceil()
    # Half a level lower: the comparison does not depend on how level / 255 was rounded.
    return image_ops.solarize(images, ((first - 0.5) / 255).to(images.device))


# What an amount from -1 to 1 means to each operation; those without a direction ignore its sign.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda images, _: images,
    "autocontrast": lambda images, _: geometric_ops.autocontrast(images),
    "equalize": lambda images, _: image_ops.equalize(images),
    "brightness": lambda images, amounts: image_ops.brightness(images, _factors(images, amounts)),
    "color": lambda images, amounts: image_ops.saturation(images, _factors(images, amounts)),
    "contrast": lambda images, amounts: image_ops.contrast(images, _factors(images, amounts)),
    "sharpness": lambda images, amounts: geometric_ops.sharpness(images, _factors(images, amounts)),
    "posterize": lambda images, amounts: geometric_ops.posterize(images, (4 + 4 * amounts.abs()).floor()),
    "solarize": _solarize,
    "rotate": lambda images, amounts: geometric_ops.rotate(images, 30 * amounts),
    "shear_x": lambda images, amounts: geometric_ops.shear_x(images, 0.3 * amounts),
    "shear_y": lambda images, amounts: geometric_ops.shear_y(images, 0.3 * amounts),
    "translate_x": lambda images, amounts: geometric_ops.translate_x(images, 0.3 * amounts),
    "translate_y": lambda images, amounts: geometric_ops.translate_y(images, 0.3 * amounts),
}
NAMES = tuple(OPERATIONS)


class Round(NamedTuple):
    """One operation for each image of a batch."""

    operations: Tensor  # (n,) indices into NAMES
    amounts: Tensor  # (n,) from -1 to 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is drawn in one of the RandAugments of the literature."""

    rounds: int  # operations per image, drawn with replacement
    probability: float  # that a drawn operation is applied
    levels: int | None  # amounts are 1 / levels ... (levels - 1) / levels; None: any from 0 to 1
    cutout: tuple[float, float]  # smallest and largest side, as a share of the image's
    fill: tuple[int, int, int]  # color of the cutout, in 8-bit levels

    def draw_round(self, n: int, generator: Generator) -> Round:
        operations = torch.randint(len(NAMES), (n,), generator=generator)
        applied = torch.rand(n, generator=generator) < self.probability
        if self.levels is None:
            amounts = torch.rand(n, generator=generator)
        else:
            amounts = torch.randint(1, self.levels, (n,), generator=generator) / self.levels
        signs = 2 * torch.randint(2, (n,), generator=generator) - 1
        return Round(torch.where(applied, operations, NAMES.index("identity")), signs * amounts)


VARIANTS = {
    # "RandAugment(3, 5)" of TorchSSL, USB and IOMatch, whose second number has no effect.
    "uniform": Variant(rounds=3, probability=1.0, levels=None, cutout=(0.0, 0.5), fill=(125, 123, 114)),
    # "RandAugmentMC(2, 10)" of kekmodel's FixMatch, OpenMatch and CCSSL.
    "levels": Variant(rounds=2, probability=0.5, levels=10, cutout=(0.5, 0.5), fill=(127, 127, 127)),
}


@dataclass(frozen=True, kw_only=True)
class WeakView:
    """Mirror at random, pad by reflection, crop a square at random, resize it if need be.

    The square has the side of the uncropped image (its shorter side, if it is not square).
    """

    size: int = 32
    """Pixels per side of the view."""
    flip: float = 0.5
    """Probability of mirroring left and right."""
    padding: float = 0.125
    """Padding at each border, as a share of the image's shorter side."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        for name in ("flip", "padding"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")

    def pixels(
        self, images: Tensor, generator: Generator, part: Part | None = None, aspects: Tensor | None = None
    ) -> Tensor:
        """One random view of each image, before normalization.

        images (n, channels, h, w) uint8, aspects (n,)  ->  (n, channels, size, size) float32 in [0, 1]
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8, got {images.dtype}")
        part = part or whole(images)
        height, width = images.shape[2:]
        side = min(height, width)
        pad = int(self.padding * side)
        top, left = (
            torch.randint(-pad, length - side + pad + 1, (part.of,), generator=generator)
            for length in (height, width)
        )
        flip = torch.rand(part.of, generator=generator) < self.flip
        corners, flip = torch.stack([top, left], dim=1)[part.rows], flip[part.rows]
        view = self._cropped(images, corners, side, flip)
        odd = torch.empty(0) if aspects is None else (aspects != 1).nonzero().squeeze(1)
        if aspects is not None and len(odd):
            share = (corners[odd] + pad + 0.5) / (2 * pad + 1)  # of the way from the first corner to the last
            on_device = odd.to(images.device)
            stretched = self._stretched(images[on_device], share, flip[odd], aspects[odd])
            view.index_copy_(0, on_device, stretched)
        return view

    def _cropped(self, images: Tensor, corners: Tensor, side: int, flip: Tensor) -> Tensor:
        view = geometric_ops.shifted_crop(images, corners, side, flip=flip)
        if side == self.size:
            return view.float().div_(255)
        box = torch.tensor([0, 0, side, side], device=images.device)
        return image_ops.resized_crop(view, box.expand(len(view), 4), self.size).clamp_(0, 1)

    def _stretched(self, images: Tensor, share: Tensor, flip: Tensor, aspects: Tensor) -> Tensor:
        """The same of whole images that are squeezed to squares: what is a square in truth is a box there.

        share (k, 2): place of the box along both sides, from 0 to 1; aspects (k,): width / height in truth
        """
        side = images.shape[2]
        lengths = torch.stack([side * aspects, side / aspects], dim=1).round().clamp(1, side)  # (k, 2)
        pads = (self.padding * lengths).floor()
        most = int(pads.max())
        padded = geometric_ops.shifted_crop(images, torch.full((len(images), 2), -most), side + 2 * most)
        corners = (share * (side - lengths + 2 * pads)).round() - pads + most
        boxes = torch.cat([corners, lengths], dim=1).to(images.device)
        return image_ops.resized_crop(padded, boxes, self.size, flip=flip.to(images.device)).clamp_(0, 1)


@dataclass(frozen=True, kw_only=True)
class StrongView:
    """A weak view of its own draw, then random operations, then a filled square (cutout).

    The operations are those of OPERATIONS, with Pillow's meaning of them. Translations are rounded to
    the nearest pixel in both variants; the published code of "levels" truncates them.
    """

    size: int = 32
    """Pixels per side of the view."""
    flip: float = 0.5
    """Probability of mirroring left and right."""
    padding: float = 0.125
    """Padding at each border, as a share of the image's shorter side."""
    variant: Literal["uniform", "levels"] = "uniform"
    """uniform: three operations of any strength, cutout of up to half the side. levels: two operations of
    nine strengths, each applied with probability 0.5, cutout of half the side. uniform is the stronger."""

    def __post_init__(self) -> None:
        self._weak_view()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant}")

    def _weak_view(self) -> WeakView:
        return WeakView(size=self.size, flip=self.flip, padding=self.padding)

    def pixels(
        self, images: Tensor, generator: Generator, part: Part | None = None, aspects: Tensor | None = None
    ) -> Tensor:
        """One random view of each image, before normalization.

        images (n, channels, h, w) uint8, aspects (n,)  ->  (n, channels, size, size) float32 in [0, 1]
        Values are whole 8-bit levels, as after Pillow's operations.
        """
        part = part or whole(images)
        variant = VARIANTS[self.variant]
        view = _whole_levels(self._weak_view().pixels(images, generator, part, aspects))
        for _ in range(variant.rounds):
            operations, amounts = variant.draw_round(part.of, generator)
            view = _whole_levels(apply_round(view, Round(operations[part.rows], amounts[part.rows])))
        smallest, largest = (self.size * share for share in variant.cutout)
        sides = smallest + (largest - smallest) * torch.rand(part.of, generator=generator)
        centers = self.size * torch.rand(part.of, 2, generator=generator)
        fill = _fill_values(variant.fill, view.shape[1])
        return geometric_ops.cutout(view, centers[part.rows], sides[part.rows], fill)


def apply_round(images: Tensor, drawn: Round) -> Tensor:
    """Apply each image's operation, in place; images with the same operation go through it together."""
    for index in drawn.operations.unique().tolist():
        rows = (drawn.operations == index).nonzero().squeeze(1)
        on_device = rows.to(images.device)
        result = OPERATIONS[NAMES[index]](images.index_select(0, on_device), drawn.amounts[rows])
        images.index_copy_(0, on_device, result)
    return images


def _whole_levels(images: Tensor) -> Tensor:
    """Round to whole 8-bit levels, as Pillow's images are after every operation; in place.

    Some operations jump from level to level: unrounded, noise of the last bit could become visible.
    """
    return images.mul_(255).round_().div_(255)


def _fill_values(color: tuple[int, int, int], channels: int) -> list[float]:
    """The color in [0, 1] for each channel; its luma for gray images."""
    luma = round(sum(weight * level for weight, level in zip(image_ops.LUMA, color, strict=True)))
    return [level / 255 for level in (color if channels == 3 else [luma] * channels)]
