"""Every operation and both strong views against Pillow, and the facts of what is drawn."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from ropaws.pool import image_ops, rand_augment
from ropaws.pool import rand_augment as geometric_ops
from ropaws.pool.augment import Part
from ropaws.pool.rand_augment import NAMES, OPERATIONS, VARIANTS, StrongView, WeakView
from tests.pool.test_image_ops import assert_like_pillow, from_pil, random_images, to_pil

BOTH = pytest.mark.parametrize("channels", [1, 3], ids=["gray", "color"])
EITHER = pytest.mark.parametrize("variant", ["uniform", "levels"])
EXACT = {"most": 1e-3, "mean": 1e-3}
ROUNDED = {"most": 1.6, "mean": 0.6}  # Pillow truncates where we round
CUTOUT_FILL = {"uniform": (125, 123, 114), "levels": (127, 127, 127)}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def transform(image, *matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def enhancer(name):
    return lambda image, a: getattr(ImageEnhance, name)(image).enhance(0.05 + 0.9 * abs(a))


# RandAugment's table, written a second time in Pillow's terms.   amount from -1 to 1
PILLOW = {
    "identity": lambda image, a: image,
    "autocontrast": lambda image, a: ImageOps.autocontrast(image),
    "equalize": lambda image, a: ImageOps.equalize(image),
    "brightness": enhancer("Brightness"),
    "color": enhancer("Color"),
    "contrast": enhancer("Contrast"),
    "sharpness": enhancer("Sharpness"),
    "posterize": lambda image, a: ImageOps.posterize(image, int(4 + 4 * abs(a))),
    "solarize": lambda image, a: ImageOps.solarize(image, 256 - int(256 * abs(a))),
    "rotate": lambda image, a: image.rotate(30 * a),
    "shear_x": lambda image, a: transform(image, 1, 0.3 * a, 0, 0, 1, 0),
    "shear_y": lambda image, a: transform(image, 1, 0, 0, 0.3 * a, 1, 0),
    "translate_x": lambda image, a: transform(image, 1, 0, 0.3 * a * image.width, 0, 1, 0),
    "translate_y": lambda image, a: transform(image, 1, 0, 0, 0, 1, 0.3 * a * image.height),
}
BLENDS = {"autocontrast", "brightness", "color", "contrast", "sharpness"}


def pillow_cutout(image, center, side, color):
    """As in the published codes; drawn on the same image."""
    top, left = (int(max(0, float(c) - side / 2)) for c in center)
    box = (left, top, min(image.width, left + side), min(image.height, top + side))
    fill = color if image.mode == "RGB" else Image.new("RGB", (1, 1), color).convert("L").getpixel((0, 0))
    ImageDraw.Draw(image).rectangle(box, fill)
    return image


# Operations


@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_operation_is_pillows(name, channels):
    images = random_images(n=40, channels=channels)
    levels = torch.arange(-9, 10) / 10  # of these, 0 is not drawn
    amounts = torch.cat([levels, 2 * torch.rand(21, generator=seeded()) - 1])
    actual = OPERATIONS[name](images / 255, amounts)
    tolerance = ROUNDED if name in BLENDS else EXACT
    assert_like_pillow(actual, images, lambda im, i: PILLOW[name](im, float(amounts[i])), **tolerance)
    if name not in ("identity", "color"):
        assert (actual - images / 255).abs().max() > 0.01


SIXTY_FOURTHS = st.integers(-160, 160).map(lambda k: k / 64)  # exact in Pillow's fixed point


@settings(max_examples=60, deadline=None)
@given(
    matrix=st.tuples(*[SIXTY_FOURTHS] * 6),
    shift=st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
    shape=st.tuples(st.sampled_from([1, 3]), st.integers(1, 12), st.integers(1, 12)),
    fill=st.integers(0, 255),
)
def test_affine_is_pillows_for_any_matrix(matrix, shift, shape, fill):
    image = torch.randint(0, 256, shape, generator=seeded(), dtype=torch.uint8)
    a, b, c, d, e, f = matrix
    matrix = (a, b, c + shift[0], d, e, f + shift[1])
    actual = geometric_ops.affine(image[None] / 255, torch.tensor(matrix).view(1, 2, 3), fill / 255)
    pil = to_pil(image)
    color = fill if shape[0] == 1 else (fill,) * 3
    expected = pil.transform(pil.size, Image.Transform.AFFINE, matrix, fillcolor=color)
    torch.testing.assert_close(actual[0] * 255, from_pil(expected))


@settings(max_examples=60, deadline=None)
@given(degrees=st.floats(-400, 400, width=32), height=st.integers(1, 20), width=st.integers(1, 20))
def test_rotate_is_pillows_for_any_angle(degrees, height, width):
    image = torch.randint(0, 256, (3, height, width), generator=seeded(), dtype=torch.uint8)
    actual = geometric_ops.rotate(image[None] / 255, torch.tensor([degrees]))
    torch.testing.assert_close(actual[0] * 255, from_pil(to_pil(image).rotate(degrees)))


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 24])
def test_sharpness(channels, size):
    images = random_images(channels=channels, size=size)
    factors = torch.tensor([0.0, 0.4, 0.8, 1.0, 1.3, 1.8])
    actual = geometric_ops.sharpness(images / 255, factors)
    assert_like_pillow(
        actual, images, lambda im, i: ImageEnhance.Sharpness(im).enhance(float(factors[i])), **ROUNDED
    )


@BOTH
def test_posterize_to_every_number_of_bits(channels):
    images, bits = random_images(n=8, channels=channels), torch.arange(1, 9)
    actual = geometric_ops.posterize(images / 255, bits)
    assert_like_pillow(actual, images, lambda im, i: ImageOps.posterize(im, i + 1), **EXACT)


@BOTH
def test_autocontrast_of_flat_and_of_narrow_channels(channels):
    images = random_images(channels=channels)
    images[0] = 7
    images[1] = torch.where(images[1] > 100, 101, 100).to(torch.uint8)
    images[2, 0] = 255
    actual = geometric_ops.autocontrast(images / 255)
    assert_like_pillow(actual, images, lambda im, i: ImageOps.autocontrast(im), **ROUNDED)
    noisy = 0.2 + 1e-7 * torch.rand(2, channels, 8, 8, generator=seeded())
    torch.testing.assert_close(geometric_ops.autocontrast(noisy), noisy, rtol=0, atol=1 / 255)


@BOTH
def test_neutral_parameters_change_nothing(channels):
    images = random_images(channels=channels) / 255
    zeros = torch.zeros(6)
    for operation in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
        assert torch.equal(getattr(geometric_ops, operation)(images, zeros), images)
    assert torch.equal(
        geometric_ops.cutout(images, zeros[:, None].expand(6, 2), zeros, [1] * channels), images
    )
    for out in (
        geometric_ops.sharpness(images, zeros + 1),
        geometric_ops.posterize(images, zeros + 8),
        geometric_ops.rotate(images, zeros + 360),
    ):
        torch.testing.assert_close(out, images, rtol=0, atol=1e-6)


@BOTH
def test_cutout_is_the_rectangle_of_the_published_codes(channels):
    images = random_images(n=60, channels=channels)
    centers, sides = 24 * torch.rand(60, 2, generator=seeded(1)), 30 * torch.rand(60, generator=seeded(2))
    sides[:30] = 12
    fill = [level / 255 for level in (125, 123, 114)[:channels]]
    actual = geometric_ops.cutout(images / 255, centers, sides, fill)
    color = (125, 123, 114) if channels == 3 else (125, 125, 125)
    assert_like_pillow(
        actual, images, lambda im, i: pillow_cutout(im, centers[i], float(sides[i]), color), **EXACT
    )


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    corner=st.tuples(st.integers(-8, 8), st.integers(-8, 8)),
    side=st.integers(1, 9),
    flip=st.booleans(),
)
def test_shifted_crop_is_reflect_padding_and_a_crop(shape, corner, side, flip):
    image = torch.randint(0, 256, (3, *shape), generator=seeded(), dtype=torch.uint8)
    padded = np.pad(image.numpy(), ((0, 0), (8, 18), (8, 18)), mode="reflect")
    top, left = corner[0] + 8, corner[1] + 8
    expected = padded[:, top : top + side, left : left + side]
    actual = geometric_ops.shifted_crop(image[None], torch.tensor([corner]), side, flip=torch.tensor([flip]))
    assert np.array_equal(actual[0].numpy(), expected[..., ::-1] if flip else expected)


# The weak view


@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 12), (8, 32)])
def test_weak_view_shows_every_crop_of_the_padded_image_equally_often(height, width):
    numbered = torch.arange(height * width, dtype=torch.uint8).view(1, height, width)  # all distinct
    side = min(height, width)
    pad = int(0.125 * side)
    padded = np.pad(numbered[0].numpy(), pad, mode="reflect")
    crops = [
        padded[y : y + side, x : x + side][:, ::step].tobytes()
        for y in range(padded.shape[0] - side + 1)
        for x in range(padded.shape[1] - side + 1)
        for step in (1, -1)
    ]
    n = 200 * len(crops)
    views = WeakView(size=side).pixels(numbered.expand(n, 1, height, width), seeded())
    seen = [view.tobytes() for view in (views[:, 0] * 255).round().to(torch.uint8).numpy()]
    counts = np.array([seen.count(crop) for crop in crops])
    assert counts.sum() == n
    assert 100 < counts.min() <= counts.max() < 300


@BOTH
@pytest.mark.parametrize("size", [9, 32])
def test_weak_view_of_another_size_is_the_resized_view(channels, size):
    images = random_images(n=10, channels=channels)
    views = (WeakView(size=24).pixels(images, seeded()) * 255).round().to(torch.uint8)
    actual = WeakView(size=size).pixels(images, seeded())
    assert_like_pillow(
        actual, views, lambda im, i: im.resize((size, size), Image.Resampling.BILINEAR), most=1.01, mean=0.5
    )


def test_weak_view_without_chance_is_the_image():
    images = random_images()
    assert torch.equal(WeakView(size=24, flip=0, padding=0).pixels(images, seeded()), images / 255)
    mirrored = WeakView(size=24, flip=1, padding=0).pixels(images, seeded())
    assert torch.equal(mirrored, images.flip(3) / 255)


# The strong view


@BOTH
@EITHER
def test_strong_view_is_the_pipeline_in_pillow(variant, channels):
    """From the same draws. Blends are rounded otherwise, which a later operation may amplify."""
    images = random_images(n=150, size=32, channels=channels)
    actual = StrongView(variant=variant).pixels(images, seeded())
    generator = seeded()
    weak = (WeakView().pixels(images, generator) * 255).round().to(torch.uint8)
    expected, exact = [to_pil(image) for image in weak], torch.ones(150, dtype=torch.bool)
    for _ in range(VARIANTS[variant].rounds):
        operations, amounts = VARIANTS[variant].draw_round(150, generator)
        for i, (operation, amount) in enumerate(zip(operations.tolist(), amounts.tolist(), strict=True)):
            expected[i] = PILLOW[NAMES[operation]](expected[i], amount).copy()
            exact[i] &= NAMES[operation] not in BLENDS
    sides = torch.rand(150, generator=generator)
    sides = 16 * sides if variant == "uniform" else torch.full_like(sides, 16)
    centers = 32 * torch.rand(150, 2, generator=generator)
    for i, image in enumerate(expected):
        pillow_cutout(image, centers[i], float(sides[i]), CUTOUT_FILL[variant])
    difference = (actual * 255 - torch.stack([from_pil(image) for image in expected])).abs()
    assert 20 < exact.sum() < 150
    assert difference[exact].max() < 1e-3
    assert difference[~exact].flatten(1).mean(dim=1).quantile(0.9) < 2


def test_uniform_draws_three_operations_of_any_strength():
    assert VARIANTS["uniform"].rounds == 3
    operations, amounts = VARIANTS["uniform"].draw_round(28_000, seeded())
    counts = operations.bincount(minlength=14)
    assert len(NAMES) == len(counts) == 14
    assert 1800 < counts.min() <= counts.max() < 2200
    quantiles = amounts.quantile(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]))
    torch.testing.assert_close(quantiles, torch.tensor([-1.0, -0.8, 0.0, 0.8, 1.0]), rtol=0, atol=0.02)
    for operation in range(14):  # strength and operation are independent
        assert 0.46 < amounts[operations == operation].abs().mean() < 0.54


def test_levels_draws_two_operations_and_applies_half_of_them():
    assert VARIANTS["levels"].rounds == 2
    operations, amounts = VARIANTS["levels"].draw_round(28_000, seeded())
    counts = operations.bincount(minlength=14)
    identity = NAMES.index("identity")
    assert counts[identity] / 28_000 == pytest.approx(0.5 + 0.5 / 14, abs=0.01)
    others = counts[torch.arange(14) != identity]
    assert 850 < others.min() <= others.max() < 1150
    levels, counts = (10 * amounts).round().long().unique(return_counts=True)
    assert levels.tolist() == [*range(-9, 0), *range(1, 10)]
    torch.testing.assert_close(amounts, (10 * amounts).round() / 10)
    assert 1400 < counts.min() <= counts.max() < 1720


@EITHER
def test_rounds_are_applied_and_factors_stay_below_one(variant, monkeypatch):
    factors, rounds = [], []
    for module, name in ((image_ops, "brightness"), (image_ops, "saturation"), (image_ops, "contrast"),
                         (geometric_ops, "sharpness")):  # fmt: skip
        monkeypatch.setattr(module, name, lambda images, f: factors.append(f) or images)
    apply = rand_augment.apply_round
    monkeypatch.setattr(rand_augment, "apply_round", lambda x, drawn: rounds.append(drawn) or apply(x, drawn))
    StrongView(variant=variant, size=4).pixels(random_images(n=3000, size=4), seeded())
    assert len(rounds) == {"uniform": 3, "levels": 2}[variant]
    assert len(factors) == 4 * len(rounds)
    found = torch.cat(factors)
    low, high = {"uniform": (0.05, 0.95), "levels": (0.14, 0.86)}[variant]
    assert found.min() == pytest.approx(low, abs=0.01)
    assert found.max() == pytest.approx(high, abs=0.01)
    assert found.min() >= 0.05
    assert found.max() <= 0.95


@BOTH
@EITHER
def test_cutout_of_black_images(variant, channels):
    """No operation changes black, so that all that is seen is the cutout."""
    views = StrongView(variant=variant).pixels(
        torch.zeros(4000, channels, 32, 32, dtype=torch.uint8), seeded()
    )
    fill = CUTOUT_FILL[variant] if channels == 3 else ({"uniform": 123, "levels": 127}[variant],)
    square = views[:, 0] > 0
    for channel, level in enumerate(fill):
        torch.testing.assert_close(views[:, channel], square * torch.tensor(level / 255))
    for axis in (1, 2):
        lines = square.any(dim=3 - axis)
        lengths, first = lines.sum(dim=1), lines.float().argmax(dim=1)
        assert torch.equal(square.sum(dim=axis).amax(dim=1), lengths)  # a full rectangle
        uncut = lengths[first < 16]
        if variant == "levels":
            assert (uncut == 17).all()  # Pillow's rectangle includes its last pixel
            assert len(uncut) / 4000 == pytest.approx(24 / 32, abs=0.03)
        else:
            assert uncut.max() == 16
            # E[floor(side) + 1]; a larger square starts before pixel 16 more often.
            assert uncut.float().mean() == pytest.approx(9.03, abs=0.3)
        assert (lengths[first >= 16] <= 32 - first[first >= 16]).all()


# Both views

VIEWS = pytest.mark.parametrize(
    "view",
    [WeakView(size=32), WeakView(size=19), StrongView(size=32), StrongView(size=19, variant="levels")],
    ids=["weak", "weak-resized", "strong", "strong-resized"],
)


@VIEWS
@BOTH
@pytest.mark.parametrize(("height", "width"), [(32, 32), (27, 40), (1, 1)])
def test_views_are_images_of_their_size(view, channels, height, width):
    images = torch.randint(0, 256, (64, channels, height, width), generator=seeded(), dtype=torch.uint8)
    original = images.clone()
    out = view.pixels(images, seeded())
    assert out.shape == (64, channels, view.size, view.size)
    assert out.dtype == torch.float32
    assert out.min() >= 0
    assert out.max() <= 1
    assert torch.equal(images, original)
    assert torch.equal(out, view.pixels(images, seeded()))
    if height > 1:
        assert not torch.equal(out, view.pixels(images, seeded(1)))


@pytest.mark.parametrize("size", [9, 32, 50])
def test_resized_white_is_not_brighter_than_white(size):
    white = torch.full((8, 3, 27, 27), 255, dtype=torch.uint8)
    assert WeakView(size=size).pixels(white, seeded()).max() <= 1


@EITHER
@pytest.mark.parametrize("size", [20, 32])
def test_strong_views_have_whole_levels(variant, size):
    out = StrongView(variant=variant, size=size).pixels(random_images(n=64, size=32), seeded())
    torch.testing.assert_close(out, (out * 255).round() / 255, rtol=0, atol=1e-7)


@VIEWS
@BOTH
@pytest.mark.parametrize("size", [32, 27])
def test_a_shared_batch_gets_the_same_views(view, channels, size):
    images = random_images(n=61, size=size, channels=channels)
    expected = view.pixels(images, seeded())
    for rows in (torch.arange(0, 61, 2), torch.arange(1, 61, 2), torch.tensor([7]), torch.arange(0)):
        actual = view.pixels(images[rows], seeded(), Part(rows, 61))
        assert torch.equal(actual, expected[rows])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"flip": 1.5}, "flip must be from 0 to 1, got 1.5"),
        ({"padding": -0.1}, "padding must be from 0 to 1, got -0.1"),
    ],
)
@pytest.mark.parametrize("kind", [WeakView, StrongView])
def test_wrong_settings_are_named(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_wrong_variant_and_wrong_images_are_named():
    with pytest.raises(ValueError, match="variant must be one of uniform, levels, got strong"):
        StrongView(variant="strong")
    with pytest.raises(TypeError, match=r"images must be uint8, got torch\.float32"):
        StrongView().pixels(torch.rand(2, 3, 32, 32), seeded())
