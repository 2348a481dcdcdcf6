from dataclasses import replace

import pytest
import torch

from ropaws.pool import image_ops
from ropaws.pool.augment import (
    AugmentConfig,
    Normalization,
    augment,
    augment_pixels,
    center_view,
    central_boxes,
    random_boxes,
    random_views,
)
from tests.pool.test_image_ops import random_images

EVERYTHING = AugmentConfig(
    size=20,
    small_crops=2,
    small_size=12,
    jitter=0.8,
    jitter_strength=1.0,
    grayscale=0.3,
    solarize=0.3,
    equalize=0.3,
    blur=0.5,
)
OFF = AugmentConfig(size=24, scale=(1, 1), flip=0, jitter=0, solarize=0, equalize=0)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def plain(channels=3):
    return Normalization((0.5,) * channels, (0.25,) * channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_views_have_their_shapes_and_are_finite(channels):
    roles = EVERYTHING.multi_crop()
    views = random_views(random_images(channels=channels), roles, plain(channels), seeded())
    assert views["large1"].shape == views["large2"].shape == (6, channels, 20, 20)
    assert [views[role].shape for role in ("small1", "small2")] == [(6, channels, 12, 12)] * 2
    assert list(views) == ["large1", "large2", "small1", "small2"]
    for view in views.values():
        assert view.dtype == torch.float32
        assert view.isfinite().all()
        assert view.min() >= -2.001
        assert view.max() <= 2.001


def test_a_seed_gives_the_same_views_and_another_seed_others():
    images = random_images()
    one, again, other = (augment(images, EVERYTHING, plain(), seeded(s)) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_every_image_of_a_batch_gets_its_own_parameters():
    same = random_images(n=1).expand(16, -1, -1, -1)
    out = augment(same, EVERYTHING, plain(), seeded())
    assert len({tuple(view.flatten().tolist()) for view in out}) == 16


def test_input_is_left_alone():
    images = random_images()
    before = images.clone()
    augment(images, EVERYTHING, plain(), seeded())
    assert torch.equal(images, before)


def test_with_everything_off_an_image_is_only_normalized():
    images = random_images()
    # scale (1, 1) with a random aspect never fits a square image, except the whole of it
    out = augment_pixels(images, OFF, seeded())
    whole = [i for i in range(6) if torch.allclose(out[i], images[i] / 255, atol=1e-5)]
    assert whole == list(range(6))
    normalized = plain().apply_(images / 255)
    torch.testing.assert_close(normalized, (images / 255 - 0.5) / 0.25)


def test_probability_one_and_zero_are_kept():
    images = random_images(n=64)
    gray = augment_pixels(
        images, AugmentConfig(size=24, jitter=0, solarize=0, equalize=0, grayscale=1.0), seeded()
    )
    torch.testing.assert_close(gray[:, 0], gray[:, 1])
    base = AugmentConfig(size=24, jitter=0, solarize=0, equalize=0, flip=0.0)
    flipped = AugmentConfig(size=24, jitter=0, solarize=0, equalize=0, flip=1.0)
    torch.testing.assert_close(
        augment_pixels(images, base, seeded()).flip(3),
        augment_pixels(images, flipped, seeded()),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("shape", [(32, 32), (20, 50), (50, 20), (1, 1), (1, 40)])
@pytest.mark.parametrize("scale", [(0.05, 0.14), (0.3, 0.75), (1.0, 1.0)])
def test_boxes_lie_inside_and_have_the_asked_area(shape, scale):
    height, width = shape
    boxes = random_boxes(500, height, width, scale, seeded())
    top, left, h, w = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (h >= 1).all()
    assert (w >= 1).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    if shape == (32, 32) and scale == (0.3, 0.75):
        share = h * w / (height * width)
        assert share.min() > 0.27
        assert share.max() < 0.79
        assert 0.5 < share.mean() < 0.55
        assert top.unique().numel() > 5
        assert (w / h).min() < 0.85
        assert (w / h).max() > 1.18


def test_central_box_is_central():
    upright = torch.ones(1)
    assert central_boxes(30, 30, upright, square=True).tolist() == [[0, 0, 30, 30]]
    assert central_boxes(30, 50, upright, square=True).tolist() == [[0, 10, 30, 30]]
    assert central_boxes(10, 100, upright).tolist() == [[0, 43, 10, 13]]


def test_center_view_of_a_wide_image_is_its_middle_square():
    images = torch.zeros(1, 1, 8, 16, dtype=torch.uint8)
    images[..., 4:12] = 255
    view = center_view(images, 8, Normalization((0.0,), (1.0,)))
    torch.testing.assert_close(view, torch.ones(1, 1, 8, 8))


def test_views_are_resized_as_asked():
    normalize = Normalization((0.0,), (1.0,))
    images = (torch.rand(4, 1, 20, 20, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    plain = AugmentConfig(size=9, jitter=0, solarize=0, equalize=0, scale=(1.0, 1.0), flip=0)
    for interpolation in ("bilinear", "bicubic"):
        config = replace(plain, interpolation=interpolation)
        boxes = torch.tensor([[0, 0, 20, 20]]).expand(4, 4)
        expected = image_ops.resized_crop(images, boxes, 9, interpolation=interpolation)
        assert torch.equal(center_view(images, 9, normalize, interpolation), expected)
        random = random_boxes(4, 20, 20, (1.0, 1.0), torch.Generator().manual_seed(5))
        view = config.pixels(images, torch.Generator().manual_seed(5))
        assert torch.equal(view, image_ops.resized_crop(images, random, 9, interpolation=interpolation))
        assert config.multi_crop()["small1"].interpolation == interpolation
    assert torch.equal(center_view(images, 9, normalize), center_view(images, 9, normalize, "bilinear"))
    assert not torch.equal(center_view(images, 9, normalize), center_view(images, 9, normalize, "bicubic"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"flip": 1.5}, r"augment\.flip is a probability from 0 to 1, got 1\.5"),
        ({"scale": (0.9, 0.5)}, r"augment\.scale must satisfy"),
        ({"small_scale": (0.0, 0.5)}, r"augment\.small_scale must satisfy"),
        ({"size": 0}, r"augment\.size"),
        ({"small_crops": -1}, r"augment\.small_crops"),
        ({"jitter_strength": 2}, r"augment\.jitter_strength"),
        ({"interpolation": "lanczos"}, r"augment\.interpolation must be bilinear or bicubic, got lanczos"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        AugmentConfig(**settings)


@pytest.fixture
def applied(monkeypatch):
    """Every operation that the augmentation applies: name, number of images, parameters."""
    calls = []

    def spy(name, real):
        def operation(images, *parameters):
            calls.append((name, len(images), *parameters))
            return real(images, *parameters)

        return operation

    for name in (
        "brightness",
        "contrast",
        "saturation",
        "hue",
        "grayscale",
        "solarize",
        "equalize",
        "gaussian_blur",
    ):
        monkeypatch.setattr(f"ropaws.pool.image_ops.{name}", spy(name, getattr(image_ops, name)))
    return calls


def test_each_operation_happens_as_often_and_as_strongly_as_asked(applied):
    n = 4000
    images = random_images(n=1, size=4).expand(n, -1, -1, -1)
    config = AugmentConfig(
        size=4, jitter=0.6, jitter_strength=0.5, grayscale=0.1, solarize=0.2, equalize=0.3, blur=0.4
    )
    augment_pixels(images, config, seeded())
    # Contrast and saturation take the grayscale inside; those calls are not the grayscale operation's.
    grays = [call for call in applied if call[0] == "grayscale"]
    outer = [call for call in applied if call[0] != "grayscale"]
    parameters = {
        name: torch.cat([call[2] for call in outer if call[0] == name]) for name, _, *p in outer if p
    }
    for name, neutral in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0)):
        parameters[name] = parameters[name][parameters[name] != neutral]  # an image that is left alone
        assert len(parameters[name]) / n == pytest.approx(0.6, abs=0.03)
    share = {name: sum(call[1] for call in outer if call[0] == name) / n for name, *_ in outer}
    assert share["solarize"] == pytest.approx(0.2, abs=0.03)
    assert share["equalize"] == pytest.approx(0.3, abs=0.03)
    assert share["gaussian_blur"] == pytest.approx(0.4, abs=0.03)
    assert any(call[1] / n == pytest.approx(0.1, abs=0.02) for call in grays)
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.6, 1.4),
        "saturation": (0.6, 1.4),
        "hue": (-0.1, 0.1),
        "solarize": (0.0, 1.0),
        "gaussian_blur": (0.1, 2.0),
    }
    for name, (low, high) in ranges.items():
        values, spread = parameters[name], high - low
        assert low <= values.min() < low + 0.02 * spread
        assert high - 0.02 * spread < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.03 * spread)


def test_the_four_color_changes_come_in_every_order(applied):
    orders = set()
    for seed in range(200):
        applied.clear()
        augment_pixels(
            random_images(n=1, size=4), AugmentConfig(size=4, jitter=1, solarize=0, equalize=0), seeded(seed)
        )
        orders.add(tuple(call[0] for call in applied if call[0] != "grayscale"))
    assert len(orders) == 24
