"""Random augmentation: parameters drawn a sample at a time, applied a batch at a time.

Parameters come from a generator on the CPU, so one seed gives the same views on every device; the
images are worked on where they are.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, get_args

import torch
from torch import Generator, Tensor

from ropaws.pool import image_ops
from ropaws.pool.image_ops import Interpolation

ASPECT = (3 / 4, 4 / 3)  # width / height of a random crop
CROP_TRIES = 10
JITTER_GROUPS = 2
MOST_PIXELS = 4096  # per side of a view
MOST_CROPS = 1000


class View(Protocol):
    """A kind of random view of images, such as AugmentConfig, WeakView and StrongView."""

    def pixels(
        self, images: Tensor, generator: Generator, part: "Part | None" = None, aspects: Tensor | None = None
    ) -> Tensor:
        """One random view of each image.   (n, channels, h, w) uint8  ->  (n, channels, size, size)

        aspects (n,): width / height of each image in truth, where it is squeezed; None: as h and w say.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random views of an image."""

    size: int = 32
    """Pixels per side of the two large views and of the supports."""
    scale: tuple[float, float] = (0.75, 1.0)
    """Share of the image's area that a large view shows; PAWS takes 0.5 to 1 without small crops."""
    small_crops: int = 6
    """Small crops of each unlabeled image, besides its two large views."""
    small_size: int = 18
    """Pixels per side of the small crops."""
    small_scale: tuple[float, float] = (0.3, 0.75)
    """Share of the image's area that a small crop shows."""
    flip: float = 0.5
    """Probability of mirroring left and right."""
    jitter: float = 0.8
    """Probability of changing brightness, contrast, saturation and hue, in random order."""
    jitter_strength: float = 0.5
    """1 changes the first three by up to 80 % and hue by up to 20 % of the circle."""
    grayscale: float = 0.0
    """Probability of removing all color."""
    solarize: float = 0.2
    """Probability of inverting what is brighter than a random threshold."""
    equalize: float = 0.2
    """Probability of spreading the histogram."""
    blur: float = 0.0
    """Probability of a Gaussian blur of radius 0.1 to 2 pixels."""
    interpolation: Interpolation = "bilinear"
    """How images are resized, always antialiased; pretrained weights were trained with one of them."""

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grayscale", "solarize", "equalize", "blur"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"augment.{name} is a probability from 0 to 1, got {value}")
        for name in ("scale", "small_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ValueError(f"augment.{name} must satisfy 0 < low <= high <= 1, got {low} {high}")
        for name in ("size", "small_size"):
            if not 1 <= (value := getattr(self, name)) <= MOST_PIXELS:
                raise ValueError(f"augment.{name} must be from 1 to {MOST_PIXELS} pixels, got {value}")
        if not 0 <= self.small_crops <= MOST_CROPS:
            raise ValueError(f"augment.small_crops must be from 0 to {MOST_CROPS}, got {self.small_crops}")
        if not 0 <= self.jitter_strength <= 1.25:
            raise ValueError(f"augment.jitter_strength must be from 0 to 1.25, got {self.jitter_strength}")
        if (value := self.interpolation) not in get_args(Interpolation):
            raise ValueError(f"augment.interpolation must be bilinear or bicubic, got {value}")

    def pixels(
        self, images: Tensor, generator: Generator, part: "Part | None" = None, aspects: Tensor | None = None
    ) -> Tensor:
        """A random view of large size; see View."""
        return augment_pixels(images, self, generator, part, aspects)

    def multi_crop(self) -> "dict[str, View]":
        """The views of PAWS by role: large1 and large2, then small1, small2 ..."""
        small = replace(self, size=self.small_size, scale=self.small_scale)
        large: dict[str, View] = {"large1": self, "large2": self}
        return large | {f"small{number + 1}": small for number in range(self.small_crops)}


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation per channel, of images in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply_(self, images: Tensor) -> Tensor:
        """Normalize images (n, channels, h, w) in place."""
        mean, std = torch.tensor([self.mean, self.std], device=images.device)[:, :, None, None]
        return images.sub_(mean).div_(std)


class Part(NamedTuple):
    """Which rows of a batch these images are. Chance is drawn for the whole batch, so that an image
    gets the same view however the batch is shared out among processes.
    """

    rows: Tensor  # (n,) ascending
    of: int  # rows of the whole batch


def whole(images: Tensor) -> Part:
    return Part(torch.arange(len(images)), len(images))


def random_views(
    images: Tensor,
    views: Mapping[str, View],
    normalize: Normalization,
    generator: Generator,
    part: Part | None = None,
    aspects: Tensor | None = None,
) -> dict[str, Tensor]:
    """One view of each image for every role, drawn in the order of the roles.

    images (u, channels, h, w) uint8, aspects (u,)  ->  role: (u, channels, size, size), normalized
    """
    return {role: augment(images, view, normalize, generator, part, aspects) for role, view in views.items()}


def augment(
    images: Tensor,
    view: View,
    normalize: Normalization,
    generator: Generator,
    part: Part | None = None,
    aspects: Tensor | None = None,
) -> Tensor:
    """One normalized random view of each image.   uint8 (n, channels, h, w)  ->  (n, channels, size, size)"""
    if aspects is None or bool((aspects == 1).all()):
        return normalize.apply_(view.pixels(images, generator, part))
    if "aspects" not in inspect.signature(view.pixels).parameters:
        raise ValueError(
            f"{type(view).__name__}.pixels takes no `aspects`, which it needs for images that are not square;"
            " add it (docs/add-a-method.md), or use --data.crop center"
        )
    return normalize.apply_(view.pixels(images, generator, part, aspects))


def augment_pixels(
    images: Tensor,
    config: AugmentConfig,
    generator: Generator,
    part: Part | None = None,
    aspects: Tensor | None = None,
) -> Tensor:
    """One random view of each image.   (n, channels, h, w) uint8  ->  (n, channels, size, size) in [0, 1]"""
    part = part or whole(images)
    height, width = images.shape[2:]
    boxes = random_boxes(part.of, height, width, config.scale, generator, rows=part.rows, aspects=aspects)
    flip = _happens(part, config.flip, generator).to(images.device)
    view = image_ops.resized_crop(
        images, boxes.to(images.device), config.size, flip=flip, interpolation=config.interpolation
    )
    view = _jitter(view, config, generator, part)
    view = _sometimes(view, part, config.grayscale, generator, lambda x: image_ops.grayscale(x).expand_as(x))
    thresholds = torch.rand(part.of, generator=generator)[part.rows]
    view = _sometimes(view, part, config.solarize, generator, image_ops.solarize, thresholds)
    view = _sometimes(view, part, config.equalize, generator, image_ops.equalize)
    radii = 0.1 + 1.9 * torch.rand(part.of, generator=generator)[part.rows]
    return _sometimes(view, part, config.blur, generator, image_ops.gaussian_blur, radii)


def random_boxes(
    n: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    generator: Generator,
    *,
    rows: Tensor | None = None,
    aspects: Tensor | None = None,
) -> Tensor:
    """Boxes of random area, aspect and place, in whole pixels.   ->  (n, 4) top, left, height, width

    As torchvision's RandomResizedCrop: up to ten tries that fit, then the largest central box.
    rows (k,): those of the n images to draw boxes for, by default all  ->  (k, 4)
    aspects (k,): width / height of these images in truth, where they are squeezed to height x width. That
    changes no share of the area, but a pixel is then `stretch` times as wide as high.
    """
    rows = torch.arange(n) if rows is None else rows
    stretch = torch.ones(len(rows)) if aspects is None else aspects * (height / width)
    area, aspect, y, x = torch.rand(4, n, CROP_TRIES, generator=generator)[:, rows]
    area = (scale[0] + (scale[1] - scale[0]) * area) * height * width
    low, high = map(math.log, ASPECT)
    aspect = (low + (high - low) * aspect).exp() / stretch[:, None]
    heights = (area / aspect).sqrt().round().clamp_min(1)
    widths = (area * aspect).sqrt().round().clamp_min(1)
    fits = (heights <= height) & (widths <= width)
    first = fits.float().argmax(dim=1, keepdim=True)  # of the tries, the first that fits
    fits, heights, widths, y, x = (t.gather(1, first).squeeze(1) for t in (fits, heights, widths, y, x))
    top = (y * (height - heights + 1)).floor()
    left = (x * (width - widths + 1)).floor()
    boxes = torch.stack([top, left, heights, widths], dim=1)
    return torch.where(fits[:, None], boxes, central_boxes(height, width, stretch))


def central_boxes(height: int, width: int, stretch: Tensor, *, square: bool = False) -> Tensor:
    """The largest central boxes of an allowed aspect (or square ones), of images whose pixels are `stretch`
    times as wide as high.   stretch (n,)  ->  (n, 4) top, left, height, width
    """
    narrow, wide = (1.0, 1.0) if square else ASPECT
    heights = (width * stretch.double() / narrow).round().clamp(1, height)
    widths = (height / stretch.double() * wide).round().clamp(1, width)
    top, left = ((height - heights) / 2).floor(), ((width - widths) / 2).floor()
    return torch.stack([top, left, heights, widths], dim=1).float()


def center_view(
    images: Tensor, size: int, normalize: Normalization, interpolation: Interpolation = "bilinear"
) -> Tensor:
    """The view of evaluation: central square, resized.   uint8 (n, channels, h, w)  ->  float32"""
    height, width = images.shape[2:]
    boxes = central_boxes(height, width, torch.ones(len(images)), square=True).to(images.device)
    return normalize.apply_(image_ops.resized_crop(images, boxes, size, interpolation=interpolation))


def _happens(part: Part, probability: float, generator: Generator) -> Tensor:
    return (torch.rand(part.of, generator=generator) < probability)[part.rows]


def _sometimes(
    images: Tensor,
    part: Part,
    probability: float,
    generator: Generator,
    operation: Callable[..., Tensor],
    parameters: Tensor | None = None,
) -> Tensor:
    """Apply an operation, in place, to a random part of the batch."""
    rows = _happens(part, probability, generator).nonzero().squeeze(1)
    if len(rows) == 0:
        return images
    arguments = [] if parameters is None else [parameters[rows].to(images.device)]
    rows = rows.to(images.device)
    return images.index_copy_(0, rows, operation(images.index_select(0, rows), *arguments))


def _jitter(images: Tensor, config: AugmentConfig, generator: Generator, part: Part) -> Tensor:
    """Brightness, contrast, saturation and hue by random amounts in random order, in place.

    Amounts are each image's own. The order is drawn for each half of the batch: an order of each
    image's own would cost as much again in gathering and scattering.
    """
    strength = config.jitter_strength
    amounts = (2 * torch.rand(4, part.of, generator=generator) - 1)[:, part.rows]
    amounts = amounts * _happens(part, config.jitter, generator)
    orders = torch.rand(JITTER_GROUPS, 4, generator=generator).argsort(dim=1).tolist()
    if strength == 0:
        return images
    operations: list[tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = [
        (image_ops.brightness, 1 + 0.8 * strength * amounts[0]),
        (image_ops.contrast, 1 + 0.8 * strength * amounts[1]),
        (image_ops.saturation, 1 + 0.8 * strength * amounts[2]),
        (image_ops.hue, 0.2 * strength * amounts[3]),
    ]
    if images.shape[1] == 1:  # a gray image has no saturation and no hue
        operations = operations[:2]
    for group, order in zip(torch.arange(part.of).chunk(JITTER_GROUPS), orders, strict=False):
        start, stop = torch.searchsorted(part.rows, torch.tensor([group[0], group[-1] + 1])).tolist()
        for index in order if stop > start else ():
            if index < len(operations):
                operation, parameters = operations[index]
                rows = images[start:stop]
                rows.copy_(operation(rows, parameters[start:stop].to(images.device)))
    return images


def kind_of(view: View) -> View | None:
    """Under which its features are kept: those of the run's own augmentation, small crops too, under None."""
    return None if isinstance(view, AugmentConfig) else view
