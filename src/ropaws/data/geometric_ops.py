"""More image operations on batches: those of RandAugment that image_ops.py does not have.

Images are float tensors (n, channels, h, w) in [0, 1], gray (one channel) or RGB, and every image has a
parameter of its own. Each operation means what Pillow's operation of that name means. Parameters may be
on the CPU or on the device of the images. Pure functions: rand_augment.py draws the parameters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
