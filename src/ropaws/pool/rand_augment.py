"""The weak and the strong view of FixMatch and its relatives.

As in augment.py, all chance comes from a generator on the CPU and is drawn for the whole batch; the
images are worked on where they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ropaws.pool import image_ops
from ropaws.pool.augment import Part, whole

FIXED_POINT_BITS = 16  # of a source coordinate, as in Pillow


def affine(images: Tensor, matrices: Tensor, fill: float = 0.0) -> Tensor:
    """Take each pixel from where its image's matrix says; nearest pixel, `fill` outside the image.

    source = floor(A (x + 1/2, y + 1/2) + t),  matrix = [A | t] in pixels, x before y
    images (n, channels, h, w), matrices (n, 2, 3)  ->  (n, channels, h, w)
    As Image.transform(AFFINE, NEAREST). Source coordinates are integers in units of 1/65536 pixel, so
    every device picks the same pixels.
    """
    height, width = images.shape[2:]
    steps = _fixed_point(matrices).to(images.device)[..., None, None]  # (n, 2, 3, 1, 1)
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    source = (steps[:, :, 0] * x + steps[:, :, 1] * y).add_(steps[:, :, 2]) >> FIXED_POINT_BITS
    column, row = source.unbind(dim=1)  # (n, h, w)
    nearest_column, nearest_row = column.clamp(0, width - 1), row.clamp(0, height - 1)
    outside = (column != nearest_column).logical_or_(row != nearest_row)
    taken = _take(images, nearest_row.mul_(width).add_(nearest_column))
    return taken.masked_fill_(outside[:, None], fill)


def _fixed_point(matrices: Tensor) -> Tensor:
    """The matrices for pixel centers, in whole units of 1/65536 pixel.   (n, 2, 3)  ->  (n, 2, 3) int64"""
    matrices = _double(matrices)
    first = matrices @ matrices.new_tensor([0.5, 0.5, 1.0])  # source of the center of pixel (0, 0)
    steps = torch.cat([matrices[:, :, :2], first[:, :, None]], dim=2)
    return steps.mul(2.0**FIXED_POINT_BITS).add(0.5).floor().long()


def _double(parameters: Tensor) -> Tensor:
    # On the CPU: not every device has double precision, and RandAugment's parameters come from there.
    return parameters.to("cpu", torch.float64)


def _take(images: Tensor, pixels: Tensor) -> Tensor:
    """Pixels of every channel, given as row * w + column.   pixels (n, h', w')  ->  (n, channels, h', w')"""
    n, channels = images.shape[:2]
    index = pixels.flatten(1)[:, None].expand(-1, channels, -1)
    return images.flatten(2).gather(2, index).view(n, channels, *pixels.shape[1:])


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turn counterclockwise about the center; corners become black.   degrees (n,)"""
    height, width = images.shape[2:]
    angle = torch.deg2rad(_double(degrees))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(-1, 2, 2)
    center = turn.new_tensor([width / 2, height / 2])
    return affine(images, torch.cat([turn, (center - turn @ center)[:, :, None]], dim=2))


def shear_x(images: Tensor, amounts: Tensor) -> Tensor:
    """Shift each row left by amount * y.   amounts (n,)"""
    return _changed_identity(images, 0, 1, amounts)


def shear_y(images: Tensor, amounts: Tensor) -> Tensor:
    """Shift each column up by amount * x.   amounts (n,)"""
    return _changed_identity(images, 1, 0, amounts)


def translate_x(images: Tensor, shares: Tensor) -> Tensor:
    """Shift left by a share of the width, to the nearest whole pixel.   shares (n,)"""
    return _changed_identity(images, 0, 2, _double(shares) * images.shape[3])


def translate_y(images: Tensor, shares: Tensor) -> Tensor:
    """Shift up by a share of the height, to the nearest whole pixel.   shares (n,)"""
    return _changed_identity(images, 1, 2, _double(shares) * images.shape[2])


def _changed_identity(images: Tensor, row: int, column: int, values: Tensor) -> Tensor:
    """The affine map that differs from the identity in one entry.   values (n,)"""
    matrices = torch.eye(2, 3, dtype=torch.float64).repeat(len(values), 1, 1)
    matrices[:, row, column] = _double(values)
    return affine(images, matrices)


def shifted_crop(images: Tensor, corners: Tensor, side: int, *, flip: Tensor | None = None) -> Tensor:
    """Cut a square out of each image, which continues as its mirror image beyond its borders.

    images (n, channels, h, w) of any type, corners (n, 2) int64 as top, left, flip (n,) bool
    ->  (n, channels, side, side) of the same type
    Equal to padding in mode "reflect" and cropping, without the padded copy.
    """
    height, width = images.shape[2:]
    corners = corners.to(images.device)
    place = torch.arange(side, device=images.device).expand(len(corners), side)
    rows = _reflected(corners[:, :1] + place, height)
    if flip is not None:
        place = torch.where(flip.to(images.device)[:, None], side - 1 - place, place)
    columns = _reflected(corners[:, 1:] + place, width)
    return _take(images, rows[:, :, None] * width + columns[:, None, :])


def _reflected(index: Tensor, length: int) -> Tensor:
    """Indices of any size, reflected into 0 .. length - 1; the border itself is not repeated."""
    period = max(1, 2 * (length - 1))
    index = index.remainder(period)
    return torch.minimum(index, period - index)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with a smoothed copy; factor 1 changes nothing.   factors (n,)

    Smoothing is a 3 x 3 mean in which the center counts five times. As in Pillow, the outermost pixels
    are not smoothed, and an image of less than 3 pixels per side stays as it is.
    """
    if min(images.shape[2:]) < 3:
        return images
    center = images[:, :, 1:-1, 1:-1]
    threes = (images[:, :, :-2] + images[:, :, 1:-1]).add_(images[:, :, 2:])
    smooth = (threes[..., :-2] + threes[..., 1:-1]).add_(threes[..., 2:]).add_(center, alpha=4).div_(13)
    blend = torch.lerp(smooth, center, factors.to(images)[:, None, None, None]).clamp_(0, 1)
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = blend
    return result


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the leading bits of each 8-bit level; 8 bits change nothing.   bits (n,) whole, 0 to 8"""
    step = torch.exp2(8 - bits.to(images))[:, None, None, None]
    return to_levels(images).div_(step).floor_().mul_(step).div_(255)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel so that its darkest level becomes 0 and its brightest 1.

    A channel of one level stays as it is.
    """
    levels = to_levels(images)
    low, high = levels.flatten(2).aminmax(dim=2)
    # Flat is judged in whole levels: rounding noise of a flat channel must not become full contrast.
    flat = low == high
    low, span = low.masked_fill(flat, 0)[:, :, None, None], (high - low).masked_fill(flat, 255)
    return levels.sub_(low).div_(span[:, :, None, None])


def to_levels(images: Tensor) -> Tensor:
    """The nearest of Pillow's 256 levels, as floats 0 to 255, in new memory."""
    return (images * 255).round_()


def cutout(images: Tensor, centers: Tensor, sides: Tensor, fill: Sequence[float]) -> Tensor:
    """Fill a square of each image.   centers (n, 2) as y, x in pixels, sides (n,), one fill value per channel

    first = floor(max(0, center - side / 2)), last = floor(first + side), both filled; side 0 fills nothing
    As the published FixMatch codes draw it with ImageDraw.rectangle: a side of 16 covers 17 pixels, and
    the square is cut off at the lower and right border but moves inward at the upper and left one.
    """
    centers, sides = centers.to(images), sides.to(images)[:, None]
    first = (centers - sides / 2).clamp_min_(0).floor_()
    last = torch.where(sides > 0, (first + sides).floor_(), -1)
    rows, columns = (
        _between(first[:, axis], last[:, axis], images.shape[2 + axis]).to(images.dtype) for axis in (0, 1)
    )
    # A float mask: torch.where is several times slower than a product on CPUs.
    square = (rows[:, :, None] * columns[:, None, :])[:, None]  # (n, 1, h, w)
    return (images * (1 - square)).addcmul_(square, images.new_tensor(fill)[:, None, None])


def _between(first: Tensor, last: Tensor, length: int) -> Tensor:
    """Which places of a side lie in first .. last.   first, last (n,)  ->  (n, length) bool"""
    place = torch.arange(length, device=first.device)
    return (place >= first[:, None]) & (place <= last[:, None])


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
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: image_ops.equalize(images),
    "brightness": lambda images, amounts: image_ops.brightness(images, _factors(images, amounts)),
    "color": lambda images, amounts: image_ops.saturation(images, _factors(images, amounts)),
    "contrast": lambda images, amounts: image_ops.contrast(images, _factors(images, amounts)),
    "sharpness": lambda images, amounts: sharpness(images, _factors(images, amounts)),
    "posterize": lambda images, amounts: posterize(images, (4 + 4 * amounts.abs()).floor()),
    "solarize": _solarize,
    "rotate": lambda images, amounts: rotate(images, 30 * amounts),
    "shear_x": lambda images, amounts: shear_x(images, 0.3 * amounts),
    "shear_y": lambda images, amounts: shear_y(images, 0.3 * amounts),
    "translate_x": lambda images, amounts: translate_x(images, 0.3 * amounts),
    "translate_y": lambda images, amounts: translate_y(images, 0.3 * amounts),
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
        view = shifted_crop(images, corners, side, flip=flip)
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
        padded = shifted_crop(images, torch.full((len(images), 2), -most), side + 2 * most)
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
        return cutout(view, centers[part.rows], sides[part.rows], fill)


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
