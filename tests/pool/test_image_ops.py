"""Each operation against Pillow's meaning of it, with the same parameters."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ropaws.pool import image_ops


def random_images(n=6, size=24, channels=3, seed=0):
    """Smooth random images with some detail: (n, channels, size, size) uint8."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 6, 6, generator=random)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
    noise = 0.1 * torch.rand(n, channels, size, size, generator=random)
    return ((0.9 * smooth + noise) * 255).round().to(torch.uint8)


def to_pil(image):
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray((array[:, :, 0] if array.shape[2] == 1 else array).copy())


def from_pil(image):
    array = np.asarray(image, dtype=np.float32)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


def assert_like_pillow(actual, images, operation, *, most, mean):
    """Compare in levels of 255: `most` for the worst pixel, `mean` for the average one."""
    expected = torch.stack([from_pil(operation(to_pil(image), i)) for i, image in enumerate(images)])
    difference = (actual * 255 - expected).abs()
    assert difference.max() <= most
    assert difference.mean() <= mean


BOTH = pytest.mark.parametrize("channels", [1, 3], ids=["gray", "color"])
FACTORS = torch.tensor([0.0, 0.4, 0.8, 1.0, 1.3, 1.8])


@BOTH
@pytest.mark.parametrize("size", [9, 24, 40])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resized_crop(channels, size, interpolation):
    images = random_images(channels=channels)
    boxes = torch.tensor(
        [[0, 0, 24, 24], [3, 5, 12, 9], [10, 0, 14, 24], [1, 1, 1, 1], [4, 4, 20, 7], [0, 9, 5, 15]]
    )
    flip = torch.tensor([False, True, False, True, True, False])

    def pillow(image, i):
        top, left, height, width = boxes[i].tolist()
        out = image.crop((left, top, left + width, top + height)).resize(
            (size, size), Image.Resampling[interpolation.upper()]
        )
        return ImageOps.mirror(out) if flip[i] else out

    actual = image_ops.resized_crop(images / 255, boxes, size, flip=flip, interpolation=interpolation)
    # Pillow rounds between its two steps; the weights of the bicubic filter make more of that.
    assert_like_pillow(actual, images, pillow, most=1.01 if interpolation == "bilinear" else 1.3, mean=0.5)
    same = image_ops.resized_crop(images, boxes, size, flip=flip, interpolation=interpolation)
    torch.testing.assert_close(same, actual, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [11, 50])
def test_bicubic_overshoot_is_clamped_as_in_pillow(size):
    """Black and white blocks: the filter leaves [0, 1] at every edge, in both directions."""
    blocks = torch.rand(3, 3, 5, 5, generator=torch.Generator().manual_seed(2)).round()
    images = (blocks.repeat_interleave(5, dim=2).repeat_interleave(5, dim=3) * 255).to(torch.uint8)
    boxes = torch.tensor([[0.0, 0, 25, 25]]).expand(3, 4)
    actual = image_ops.resized_crop(images, boxes, size, interpolation="bicubic")
    assert actual.min() == 0
    assert actual.max() == 1

    def pillow(image, _):
        return image.resize((size, size), Image.Resampling.BICUBIC)

    assert_like_pillow(actual, images, pillow, most=1.3, mean=0.5)


@BOTH
@pytest.mark.parametrize(
    ("operation", "enhance"),
    [(image_ops.brightness, ImageEnhance.Brightness), (image_ops.contrast, ImageEnhance.Contrast)],
)
def test_brightness_and_contrast(channels, operation, enhance):
    images = random_images(channels=channels)
    actual = operation(images / 255, FACTORS)
    assert_like_pillow(
        actual, images, lambda im, i: enhance(im).enhance(float(FACTORS[i])), most=1.6, mean=0.6
    )


def test_saturation():
    images = random_images()
    actual = image_ops.saturation(images / 255, FACTORS)
    assert_like_pillow(
        actual, images, lambda im, i: ImageEnhance.Color(im).enhance(float(FACTORS[i])), most=1.6, mean=0.6
    )


@pytest.mark.parametrize("shift", [-128, -40, 0, 13, 77, 127])
def test_hue(shift):
    """Pillow's HSV has 256 hues and 256 saturations, hence the wider tolerance."""
    images = random_images()

    def pillow(image, _):
        hue, saturation, value = image.convert("HSV").split()
        hue = Image.fromarray(((np.asarray(hue).astype(int) + shift) % 256).astype(np.uint8))
        return Image.merge("HSV", (hue, saturation, value)).convert("RGB")

    actual = image_ops.hue(images / 255, torch.full((len(images),), shift / 256))
    assert_like_pillow(actual, images, pillow, most=10, mean=1.5)


def test_hue_comes_back_after_a_full_turn_and_keeps_gray():
    images = random_images() / 255
    there = image_ops.hue(images, torch.full((6,), 0.37))
    torch.testing.assert_close(image_ops.hue(there, torch.full((6,), -0.37)), images, rtol=0, atol=1e-5)
    assert (there - images).abs().max() > 0.1
    gray = images[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(image_ops.hue(gray, torch.full((6,), 0.37)), gray)


def test_grayscale():
    images = random_images()
    assert_like_pillow(
        image_ops.grayscale(images / 255), images, lambda im, i: im.convert("L"), most=0.51, mean=0.3
    )


@BOTH
def test_solarize(channels):
    images = random_images(channels=channels)
    levels = [0, 64, 128, 200, 255, 256]
    actual = image_ops.solarize(images / 255, torch.tensor(levels) / 255)
    assert_like_pillow(actual, images, lambda im, i: ImageOps.solarize(im, levels[i]), most=0.01, mean=0.01)


@BOTH
def test_equalize_is_exact(channels):
    images = random_images(channels=channels)
    images[0] = 7  # a constant image stays as it is
    images[1] = torch.where(images[1] > 100, 200, 10).to(torch.uint8)
    assert_like_pillow(
        image_ops.equalize(images / 255), images, lambda im, i: ImageOps.equalize(im), most=0.01, mean=0.01
    )


@BOTH
def test_gaussian_blur(channels):
    """Pillow approximates the Gaussian by three box blurs, each with its own edge and rounding."""
    images = random_images(channels=channels)
    radii = torch.tensor([0.1, 0.5, 0.8, 1.0, 1.5, 2.0])
    actual = image_ops.gaussian_blur(images / 255, radii)
    assert_like_pillow(
        actual, images, lambda im, i: im.filter(ImageFilter.GaussianBlur(float(radii[i]))), most=9, mean=1
    )


@BOTH
def test_neutral_parameters_change_nothing(channels):
    images = random_images(channels=channels) / 255
    ones, zeros = torch.ones(6), torch.zeros(6)
    for out in (
        image_ops.brightness(images, ones),
        image_ops.contrast(images, ones),
        image_ops.saturation(images, ones),
        image_ops.hue(images, zeros),
        image_ops.solarize(images, 1.1 * ones),
        image_ops.gaussian_blur(images, zeros),
        image_ops.resized_crop(images, torch.tensor([[0, 0, 24, 24]]).expand(6, 4), 24),
    ):
        torch.testing.assert_close(out, images, rtol=0, atol=1e-6)
