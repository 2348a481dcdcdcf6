"""Random views of whole images: what they show, and what stays as it was."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

import ropaws
from ropaws.core.randomness import SupportConfig
from ropaws.pool.augment import ASPECT, AugmentConfig, Normalization, Part, augment, random_boxes
from ropaws.pool.corpus import Decoding, ImageStack, WholeImages, decode, no_watch
from ropaws.pool.decoding import SquareCache, read_batch, read_image, read_square
from ropaws.pool.rand_augment import StrongView, WeakView
from ropaws.pool.sources import DataConfig
from ropaws.training.loaders import BatchStream, TrainingData
from tests import tiny
from tests.photos import make_photos

PLAIN = Normalization((0.0,) * 3, (1.0,) * 3)
CROP_ONLY = AugmentConfig(size=16, scale=(0.3, 1.0), flip=0, jitter=0, solarize=0, equalize=0, small_crops=0)
# Of the noise images below, by the version before data.crop.
SQUARES = {(30, 50): "d985ddb0e4b2efe4", (50, 20): "8ba6222c38caea48", (24, 24): "53cdac81d900e5a7"}
BOXES = {(20, 20): "4b29acf0dc9b2456", (20, 50): "cb07e1464eeabc88"}


def digest(values):
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).hexdigest()


def noise(shape, random):
    return Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8))


def shaded(path, width, height):
    """Red grows from left to right, green from top to bottom."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    Image.fromarray(np.stack([red, green, 0 * red], axis=2).round().astype(np.uint8)).save(path)
    return path


@pytest.fixture
def mixed(tmp_path):
    """Wide, tall and square images."""
    shapes = [(60, 20), (20, 60), (32, 32), (40, 30)] * 3
    return [
        shaded(tmp_path / f"{i:02d}.png", width + i, height + i) for i, (width, height) in enumerate(shapes)
    ]


def stream_of(images, view=CROP_ONLY):
    views = {"one": view, "other": view}
    data = TrainingData(images, torch.arange(3), torch.tensor([0, 1, 0]), PLAIN)
    return BatchStream(data, views, view, SupportConfig(images_per_class=1, views=2), 4, seed=0, size=16)


def extremes(views):
    """Least and most red and green in any view, from 0 to 1: which part of the images was shown."""
    red, green = views[:, 0], views[:, 1]
    return red.min(), red.max(), green.min(), green.max()


def test_squares_and_boxes_are_those_of_the_version_before(tmp_path):
    random = np.random.default_rng(3)
    for shape, expected in SQUARES.items():
        noise(shape, random).save(tmp_path / "image.png")
        assert digest(read_square(tmp_path / "image.png", 16)) == expected
    for shape, expected in BOXES.items():
        boxes = random_boxes(200, *shape, (0.3, 1.0), torch.Generator().manual_seed(5))
        assert digest(boxes.to(torch.int16).numpy()) == expected


def test_the_whole_of_a_square_image_is_its_square_bit_by_bit(tmp_path):
    noise((24, 24), np.random.default_rng(0)).save(tmp_path / "image.png")
    whole = read_image(tmp_path / "image.png", 16, "whole")
    assert whole.aspect == 1
    assert np.array_equal(whole.square, read_square(tmp_path / "image.png", 16))


@pytest.mark.parametrize("side", [20, 64, 600])
def test_squeezing_is_resizing_each_side(tmp_path, side):
    """Within a level or two of Pillow's, also where the image is reduced by a whole factor first."""
    path = tmp_path / "image.png"
    noise((side, 3 * side // 2), np.random.default_rng(0)).resize((3 * side, side)).save(path)
    whole = read_image(path, 32, "whole")
    assert whole.aspect == 3
    with Image.open(path) as image:
        expected = image.resize((32, 32), Image.Resampling.BILINEAR, reducing_gap=3.0)
    assert np.abs(whole.square.astype(int) - np.asarray(expected)).max() <= 2


def test_an_image_is_turned_before_its_proportions_are_taken(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(shaded(tmp_path / "a.png", 40, 20)) as image:
        image.save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png", 8, "whole").aspect == 0.5


@pytest.mark.parametrize("in_memory", [True, False])
def test_random_views_reach_the_edges_of_a_long_image(tmp_path, in_memory):
    files = [shaded(tmp_path / f"{i}.png", 90, 30) for i in range(8)]
    shown = {}
    for crop in ("whole", "center"):
        images = ImageStack(files, 24, crop=crop, workers=1)
        if in_memory:
            images = decode(files, Decoding(24, crop=crop, workers=1), no_watch, "").images
        steps = list(stream_of(images).batches(0, 12))
        views = torch.cat([view for step in steps for view in step.views.values()])
        shown[crop] = extremes(views)
        labeled = torch.cat([step.labeled.images for step in steps])
        assert (extremes(labeled)[0] < 0.2) == (crop == "whole")
    left, right, top, bottom = shown["whole"]
    assert left < 0.05
    assert right > 0.95
    assert top < 0.15
    assert bottom > 0.85
    left, right, top, bottom = shown["center"]
    assert left > 0.3
    assert right < 0.7


def test_views_have_true_proportions(tmp_path):
    """In a view of a long image, red grows a third as fast as green: it is not squeezed."""
    image = shaded(tmp_path / "a.png", 300, 100)
    whole = read_image(image, 64, "whole")
    pixels = torch.from_numpy(whole.square.copy()).permute(2, 0, 1)[None].expand(400, -1, -1, -1)
    aspects = torch.full((400,), whole.aspect)
    config = replace(CROP_ONLY, scale=(0.05, 0.3))
    views = config.pixels(pixels, torch.Generator().manual_seed(0), None, aspects)
    red = views[:, 0, 8, -2] - views[:, 0, 8, 1]
    green = views[:, 1, -2, 8] - views[:, 1, 1, 8]
    ratio = 3 * red / green  # width / height of the box in truth
    assert ratio.median() == pytest.approx(1, abs=0.1)
    assert ratio.quantile(0.02) > 0.85 * ASPECT[0]
    assert ratio.quantile(0.98) < 1.15 * ASPECT[1]


@settings(max_examples=60, deadline=None)
@given(
    aspect=st.floats(0.001, 1000),
    size=st.integers(8, 300),
    low=st.floats(0.01, 1),
    seed=st.integers(0, 1000),
)
def test_boxes_of_squeezed_images_lie_inside_with_the_asked_area_and_aspect(aspect, size, low, seed):
    aspects = torch.full((50,), aspect)
    boxes = random_boxes(50, size, size, (low, 1.0), torch.Generator().manual_seed(seed), aspects=aspects)
    top, left, height, width = boxes.T
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (top + height <= size).all()
    assert (left + width <= size).all()
    # In truth, but for rounding to whole pixels on both sides.
    widest = (width + 1) * aspect / (height - 1).clamp_min(1e-3)
    narrowest = (width - 1) * aspect / (height + 1)
    clamped = (height == 1) | (width == 1)  # a box that has no whole pixel has one
    assert (clamped | ((widest >= ASPECT[0]) & (narrowest <= ASPECT[1]))).all()


@settings(max_examples=30, deadline=None)
@given(aspect=st.floats(0.001, 1000), seed=st.integers(0, 100))
def test_views_of_any_proportions_are_finite(aspect, seed):
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (4, 3, 12, 12), dtype=torch.uint8, generator=random)
    aspects = torch.tensor([aspect, 1.0, 1 / aspect, aspect])
    for view in (CROP_ONLY, WeakView(size=8), WeakView(size=12, padding=1.0), StrongView(size=8)):
        found = view.pixels(images, random, None, aspects)
        assert found.isfinite().all()
        assert found.min() >= 0
        assert found.max() <= 1


@pytest.mark.parametrize("view", [CROP_ONLY, AugmentConfig(size=16), WeakView(size=16), StrongView(size=16)])
def test_square_images_have_the_same_views_however_they_are_cropped(view):
    images = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8)
    one, other = (
        view.pixels(images, torch.Generator().manual_seed(0), None, aspects)
        for aspects in (None, torch.ones(6))
    )
    assert torch.equal(one, other)
    # Beside images that are not square, too.
    aspects = torch.tensor([1.0, 2.0, 1.0, 0.3, 1.0, 1.0])
    mixed = view.pixels(images, torch.Generator().manual_seed(0), None, aspects)
    if not isinstance(view, AugmentConfig) or view is CROP_ONLY:
        assert torch.equal(mixed[aspects == 1], one[aspects == 1])
    assert not torch.equal(mixed[aspects != 1], one[aspects != 1])


@pytest.mark.parametrize("view", [AugmentConfig(size=16), WeakView(size=16), StrongView(size=16)])
def test_views_do_not_depend_on_how_a_batch_is_shared_out(view):
    images = torch.randint(0, 256, (10, 3, 20, 20), dtype=torch.uint8)
    aspects = torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0, 3.0, 1.0, 0.7, 1.0, 1.2])
    all_views = view.pixels(images, torch.Generator().manual_seed(0), None, aspects)
    for rows in (torch.arange(4), torch.arange(4, 10)):
        part = view.pixels(images[rows], torch.Generator().manual_seed(0), Part(rows, 10), aspects[rows])
        torch.testing.assert_close(part, all_views[rows], rtol=0, atol=2 / 255)


class OldView:
    """As views of a person's own were before: of square images alone."""

    def pixels(self, images, generator, part=None):
        return images.float() / 255


def test_a_view_that_knows_no_proportions_says_so():
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    for aspects in (None, torch.ones(2)):
        assert len(augment(images, OldView(), PLAIN, torch.Generator(), None, aspects)) == 2
    with pytest.raises(ValueError, match=r"OldView\.pixels takes no `aspects`.*--data\.crop center"):
        augment(images, OldView(), PLAIN, torch.Generator(), None, torch.tensor([1.0, 2.0]))


def test_weak_views_of_long_images_are_squares_at_random_places(tmp_path):
    whole = read_image(shaded(tmp_path / "a.png", 200, 50), 40, "whole")
    pixels = torch.from_numpy(whole.square.copy()).permute(2, 0, 1)[None].expand(200, -1, -1, -1)
    views = WeakView(size=10, flip=0).pixels(
        pixels, torch.Generator().manual_seed(0), None, torch.full((200,), whole.aspect)
    )
    red = views[:, 0].mean(dim=(1, 2))
    assert red.min() < 0.2
    assert red.max() > 0.8
    width = (views[:, 0, :, -1] - views[:, 0, :, 0]).mean(dim=1)
    inside = (red > 0.3) & (red < 0.7)
    assert width[inside].mean() == pytest.approx(0.25 * 0.9, abs=0.04)  # nine tenths between pixel centers


def test_in_memory_and_on_disk_are_the_same(mixed):
    stack = ImageStack(mixed, 16, crop="whole", workers=1)
    held = decode(mixed, Decoding(16, crop="whole", workers=1), no_watch, "").images
    assert isinstance(held, WholeImages)
    assert torch.equal(held[torch.arange(12)], stack[torch.arange(12)])
    for one, other in zip(stream_of(stack).batches(0, 3), stream_of(held).batches(0, 3), strict=True):
        for role, view in one.views.items():
            assert torch.equal(view, other.views[role])
        assert torch.equal(one.labeled.images, other.labeled.images)


def test_central_squares_do_not_depend_on_the_crop(mixed):
    plain = decode(mixed, Decoding(16, workers=1), no_watch, "").images
    held = decode(mixed, Decoding(16, crop="whole", workers=1), no_watch, "").images
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(held[:], plain)


def test_square_images_alone_are_a_tensor(tmp_path):
    files = [shaded(tmp_path / f"{i}.png", 20 + i, 20 + i) for i in range(4)]
    assert isinstance(decode(files, Decoding(16, crop="whole", workers=1), no_watch, "").images, torch.Tensor)


def test_whole_images_join_and_are_chosen(mixed):
    held = decode(mixed, Decoding(16, crop="whole", workers=1), no_watch, "").images
    more = held.followed_by(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    assert len(more) == 14
    assert more.whole(torch.tensor([13])).aspects.tolist() == [1.0]
    part = more.chosen(torch.tensor([1, 13]))
    found, expected = part.whole(torch.tensor([0])), held.whole(torch.tensor([1]))
    assert torch.equal(found.pixels, expected.pixels)
    assert torch.equal(found.aspects, expected.aspects)


def test_a_cache_keeps_squares_and_whole_images_apart(mixed, tmp_path):
    cache = SquareCache(tmp_path / "cache", 1 << 30, settled=0)
    stack = ImageStack(mixed, 16, crop="whole", cache=cache, workers=1)
    rows = torch.arange(12)
    for wanted in ("center", "whole", "both", "whole", "center"):
        fresh = read_batch(stack.request(rows, wanted))
        kept = read_batch(stack.request(rows, wanted), cache)
        for one, other in zip(fresh, kept, strict=True):
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    places = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(places) == 24
    place = places[0]
    place.write_bytes(b"torn")
    assert np.array_equal(read_batch(stack.request(rows, "whole"), cache).squares, fresh_wholes(stack, rows))


def fresh_wholes(stack, rows):
    return read_batch(stack.request(rows, "whole")).squares


def test_an_unreadable_image_is_replaced_with_its_proportions(mixed):
    mixed[0].write_bytes(b"broken")
    stack = ImageStack(mixed, 16, crop="whole", workers=1)
    rows = torch.tensor([0, 2])
    found = stack.complete(rows, read_batch(stack.request(rows, "whole")))
    assert found.positions.tolist() == [1, 2]
    assert found.aspects.tolist() == pytest.approx([21 / 61, 1.0])


def test_a_crop_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"data\.crop"):
        DataConfig(crop="middle")


def own_config(photos, **data):
    base = tiny.config("unused.npz", steps=4, checkpoint_every=2)
    own = DataConfig(
        labeled=photos / "labeled", unlabeled=(photos / "pool",), test=photos / "test", image_size=14,
        labels_per_class=None, workers=1, **data,
    )  # fmt: skip
    return replace(base, data=own)


def test_a_run_on_long_images_from_training_to_predictions(tmp_path):
    photos = make_photos(tmp_path)
    for path in photos.rglob("*.png"):
        with Image.open(path) as image:
            image.resize((108, 36)).save(path)
    weights = {}
    for name, data in {"whole": {}, "streamed": {"memory_gb": 0.0}, "center": {"crop": "center"}}.items():
        run = ropaws.train(own_config(photos, **data), tmp_path / name)
        weights[name] = (run / "model.safetensors").read_bytes()
        assert 0 <= ropaws.evaluate(run)["accuracy"] <= 1
        assert len(ropaws.predict(run, sorted((photos / "pool").iterdir())[:3])) == 3
    assert weights["whole"] == weights["streamed"]
    assert weights["whole"] != weights["center"]
