"""Image operations on batches, with a parameter of its own for every image.

Images are float tensors (n, channels, h, w) in [0, 1], gray (one channel) or RGB. Each operation
means what Pillow's operation of that name means; color operations leave gray images alone where
Pillow's would. Pure functions: the random choice of parameters is augment.py's.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, Pillow's mode "L"


def resized_crop(
    images: Tensor,
    boxes: Tensor,
    size: int,
    *,
    flip: Tensor | None = None,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Cut each image's box out, resize it with an antialiased filter, mirror where asked.

    images (n, channels, h, w) uint8, or float in [0, 1]; boxes (n, 4) as top, left, height, width
    in pixels, flip (n,) bool  ->  (n, channels, size, size) float32 in [0, 1]
    Resizing is linear and separable: two matrix products per image, over all channels at once.
    The bicubic filter overshoots at edges; as in Pillow, each of the two steps is clamped.
    """
    n, channels, h, w = images.shape
    scale = 255 if images.dtype == torch.uint8 else 1
    images = images.float()
    top, left, height, width = boxes.to(images.dtype).unbind(dim=1)
    rows = _resize_weights(top, height, h, size, interpolation).div_(scale)  # (n, size, h)
    columns = _resize_weights(left, width, w, size, interpolation, reverse=flip)  # (n, size, w)
    wide = torch.bmm(images.reshape(n, channels * h, w), columns.mT)
    if interpolation == "bicubic":
        wide.clamp_(0, scale)
    wide = wide.view(n, channels, h, size).transpose(1, 2).reshape(n, h, channels * size)
    out = torch.bmm(rows, wide).view(n, size, channels, size).transpose(1, 2).contiguous()
    return out.clamp_(0, 1) if interpolation == "bicubic" else out


def side_resize(side: int, size: int, interpolation: Interpolation) -> Tensor:
    """What resized_crop does along a side that it takes as a whole, as one matrix.   ->  (size, side)"""
    start, length = torch.zeros(1), torch.tensor([float(side)])
    return _resize_weights(start, length, side, size, interpolation)[0]


def _resize_weights(
    start: Tensor,
    length: Tensor,
    source: int,
    target: int,
    interpolation: Interpolation,
    *,
    reverse: Tensor | None = None,
) -> Tensor:
    """What each source pixel gives to each target pixel along one side.

    start, length (n,), reverse (n,) bool  ->  (n, target, source), rows sum to 1
    As Pillow's BILINEAR or BICUBIC on the cropped image.
    """
    place = torch.arange(target, dtype=start.dtype, device=start.device)
    if reverse is not None:
        place = torch.where(reverse[:, None], target - 1 - place, place)
    pixel = torch.arange(source, dtype=start.dtype, device=start.device)
    scale = (length / target)[:, None]
    center = start[:, None] + (place + 0.5) * scale  # (n, target)
    inside = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])  # (n, source)
    distance = (pixel + 0.5 - center[:, :, None]).abs_()
    distance.div_(scale.clamp_min(1)[:, :, None])
    weights = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_min_(0)
    weights.mul_(inside[:, None])
    return weights.div_(weights.sum(dim=2, keepdim=True))


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -1/2: 1 - 5/2 x^2 + 3/2 x^3 below 1, 2 - 4 x + 5/2 x^2 - 1/2 x^3 below 2."""
    distance = distance.clamp_max_(2)  # where the outer part is 0
    inner = (1.5 * distance).sub_(2.5).mul_(distance).mul_(distance).add_(1)
    outer = (-0.5 * distance).add_(2.5).mul_(distance).sub_(4).mul_(distance).add_(2)
    return torch.where(distance < 1, inner, outer)


def grayscale(images: Tensor) -> Tensor:
    """Luma of RGB images, one channel.   (n, 3, h, w)  ->  (n, 1, h, w); gray images as they are"""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.chunk(3, dim=1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def _blend(images: Tensor, base: Tensor, factors: Tensor) -> Tensor:
    """base + factor (image - base), clamped.   factors (n,)"""
    return torch.lerp(base, images, factors[:, None, None, None]).clamp_(0, 1)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with black; factor 1 changes nothing.   factors (n,)"""
    return (images * factors[:, None, None, None]).clamp_(0, 1)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the image's mean gray; factor 1 changes nothing.   factors (n,)"""
    rest = grayscale(images).flatten(1).mean(dim=1) * (1 - factors)
    return (images * factors[:, None, None, None]).add_(rest[:, None, None, None]).clamp_(0, 1)


def saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the image's own grayscale; factor 1 changes nothing.   factors (n,)"""
    return images if images.shape[1] == 1 else _blend(images, grayscale(images), factors)


def hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hue circle by a part of a full turn, in [-0.5, 0.5].   shifts (n,)"""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(dim=1)
    value, low = images.amax(dim=1), images.amin(dim=1)
    chroma = value - low
    # Choices are float masks here: torch.where is ten times slower than a product on CPUs.
    is_red = (value - red).eq_(0)
    is_green = (value - green).eq_(0).mul_(1 - is_red)
    is_blue = 1 - is_red - is_green
    # Place on the hue circle in sixths, counted from red; a gray pixel's does not matter.
    angle = (green - blue).mul_(is_red).addcmul_(blue - red, is_green).addcmul_(red - green, is_blue)
    angle = angle.div_(chroma.clamp_min(1e-8)).add_(is_green, alpha=2).add_(is_blue, alpha=4)
    angle = angle.div_(6).add_(shifts[:, None, None])  # now in turns
    # A channel is low within a sixth of a turn from the complement of its own color.
    complement = torch.tensor([3 / 6, 5 / 6, 1 / 6], dtype=images.dtype, device=images.device)[:, None, None]
    turn = angle[:, None] - complement
    distance = turn.sub_(turn.round()).abs_().mul_(6)  # 0 to 3 sixths
    return torch.addcmul(low[:, None], distance.sub_(1).clamp_(0, 1), chroma[:, None])


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert every value at or above the threshold.   thresholds (n,) in [0, 1]"""
    bright = images.clone().ge_(thresholds[:, None, None, None])
    return torch.addcmul(images, bright, 1 - 2 * images)


def equalize(images: Tensor) -> Tensor:
    """Spread each channel's histogram evenly over the 256 levels, by Pillow's integer rule."""
    n, channels, height, width = images.shape
    levels = (images * 255).round().long().reshape(n * channels, height * width)
    histogram = torch.zeros(n * channels, 256, dtype=torch.long, device=images.device)
    histogram.scatter_add_(1, levels, torch.ones_like(levels))
    brightest = levels.amax(dim=1, keepdim=True)
    step = (height * width - histogram.gather(1, brightest)) // 255
    before = (histogram.cumsum(dim=1) - histogram).float()
    table = (before + step // 2).div_(step.clamp_min(1)).floor_().clamp_max_(255)
    # Too few distinct pixels to spread: the channel stays as it is.
    table = torch.where(step > 0, table, torch.arange(256.0, device=images.device)).div_(255)
    return table.gather(1, levels).view(images.shape).to(images.dtype)


def gaussian_blur(images: Tensor, radii: Tensor) -> Tensor:
    """Gaussian of that standard deviation in pixels; edge pixels repeat outwards.   radii (n,)"""
    radii = radii.to(images.dtype).clamp_min(1e-3)[:, None]
    reaches = (3 * radii + 0.5).floor().clamp_min(1)  # each image's own, whatever its neighbors have
    reach = int(reaches.max())
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    kernel = (-0.5 * (offsets / radii) ** 2).exp() * (offsets.abs() <= reaches)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)  # (n, 2 reach + 1)
    for dim, pad in ((2, (0, 0, reach, reach)), (3, (reach, reach, 0, 0))):
        length = images.shape[dim]
        padded = F.pad(images, pad, mode="replicate")
        shifted = (
            padded.narrow(dim, i, length) * kernel[:, i, None, None, None] for i in range(2 * reach + 1)
        )
        images = sum(shifted, start=torch.zeros_like(images))
    return images
