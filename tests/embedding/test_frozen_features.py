"""Features of images by a frozen backbone: by content, once, whatever stands beside an image."""

import functools
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from ropaws.core.features import FeatureRows
from ropaws.embedding import frozen_features as module
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.embedding.frozen_features import Embedding, embed_images
from ropaws.pool import content
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.pool.corpus import Decoding, ImageStack, WholeImages, decode
from ropaws.pool.decoding import SquareCache
from ropaws.pool.sources import DataConfig
from tests.pool.files.test_content import palette_image, rows_of, turned_image

VIEW = AugmentConfig(size=16, scale=(0.5, 1.0))


class Killed(Exception):  # noqa: N818 - as a signal would
    """In the middle of the work."""


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return build_encoder(ModelConfig(backbone="small-8", projection_dims=4), channels=3).eval()


@pytest.fixture
def images():
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (150, 3, 20, 20), dtype=torch.uint8, generator=random)


@pytest.fixture
def settings(encoder):
    return Embedding(encoder, "small-8", VIEW, 2, Normalization((0.5,) * 3, (0.25,) * 3), 20)


@pytest.fixture
def data(tmp_path):
    return DataConfig(feature_cache=tmp_path / "cache", workers=1)


def computed(monkeypatch):
    """The positions that are computed from now on."""
    seen = []
    real = module._fill

    def fill(store, images, keys, positions, *rest):
        seen.extend(positions.tolist())
        return real(store, images, keys, positions, *rest)

    monkeypatch.setattr(module, "_fill", fill)
    return seen


def no_watch(items, _title, _total):
    return items


def embed(images, settings, data, **options):
    return embed_images(images, settings, data, **{"watch": no_watch, "warn": pytest.fail, **options})


def everything(found):
    index = torch.arange(len(found))
    return torch.cat([found.features[index][:, None], found.features.views(index)], dim=1)


def test_features_are_those_of_the_backbone(images, settings, data, encoder):
    from ropaws.pool.augment import center_view

    found = embed(images, settings, data)
    with torch.no_grad():
        expected = encoder.features(center_view(images, 16, settings.normalize))
    torch.testing.assert_close(found.features[torch.arange(150)], expected, atol=2e-3, rtol=2e-3)
    views = found.features.views(torch.arange(150))
    assert views.shape == (150, 2, encoder.feature_dims)
    assert not torch.equal(views[:, 0], views[:, 1])
    assert torch.equal(found[:3], images[:3])


def test_an_image_has_the_same_views_whatever_stands_beside_it(images, settings, data, tmp_path):
    whole = everything(embed(images, settings, data))
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))[:37]
    other = replace(data, feature_cache=tmp_path / "other")
    assert torch.equal(everything(embed(images[order], settings, other)), whole[order])


def test_the_second_time_nothing_is_computed_and_new_images_are(images, settings, data, monkeypatch):
    first = everything(embed(images[:100], settings, data))
    seen = computed(monkeypatch)
    assert torch.equal(everything(embed(images[:100], settings, data)), first)
    assert seen == []
    assert torch.equal(everything(embed(images[:130], settings, data))[:100], first)
    assert seen == list(range(100, 130))


def test_copies_are_computed_once(images, settings, data, monkeypatch):
    seen = computed(monkeypatch)
    found = embed(torch.cat([images[:5], images[:5]]), settings, data)
    assert seen == [0, 1, 2, 3, 4]
    assert torch.equal(everything(found)[:5], everything(found)[5:])


def test_features_that_are_known_are_taken_as_they_are(images, settings, data):
    found = embed(images, settings, data)
    assert embed(found, settings, data) is found
    other = replace(settings, views=1)
    assert embed(found, other, data).features.views(torch.arange(3)).shape[1] == 2  # and the center view


def test_one_random_view_is_drawn_from_beside_the_center_view(images, settings, data):
    rows = torch.arange(3)
    one = embed(images, replace(settings, views=1), data).features
    several = embed(images, replace(settings, views=3), data).features
    views = one.views(rows)
    assert one.view_count == 2
    assert several.view_count == 3
    assert torch.equal(views[:, 0], one[rows])
    assert torch.equal(views[:, 1], several.views(rows)[:, 0])
    assert torch.equal(one.views(rows, chosen=torch.tensor([[1, 0]] * 3)), views.flip(1))
    held = FeatureRows(one[rows], views[:, 1:])
    assert held.view_count == 2
    assert torch.equal(held.views(rows), views)
    assert torch.equal(held.views(rows, chosen=torch.tensor([[1, 0]] * 3)), views.flip(1))


@pytest.mark.parametrize(
    "change", ["weights", "normalize", "size", "views", "strength", "precision", "decoding"]
)
def test_other_backbones_and_views_have_other_features(settings, change):
    torch.manual_seed(1)
    encoder = build_encoder(ModelConfig(backbone="small-8", projection_dims=4), channels=3)
    other = {
        "weights": {"encoder": encoder},
        "normalize": {"normalize": Normalization((0.4,) * 3, (0.25,) * 3)},
        "size": {"view": replace(VIEW, size=24)},
        "views": {"views": 3},
        "strength": {"view": replace(VIEW, jitter=0.1)},
        "precision": {},
        "decoding": {"image_size": 32},
    }[change]
    if change == "precision":
        torch.manual_seed(0)
        half = build_encoder(
            ModelConfig(backbone="small-8", projection_dims=4), channels=3, autocast=torch.bfloat16
        )
        other = {"encoder": half}
    assert replace(settings, **other).digest != settings.digest


def test_settings_without_effect_on_the_features_share_them(settings):
    torch.manual_seed(0)
    same = build_encoder(ModelConfig(backbone="small-8", projection_dims=9), channels=3)
    same.backbone.train()
    assert replace(settings, encoder=same).digest == settings.digest
    assert replace(settings, view=replace(VIEW, small_crops=1, small_size=7)).digest == settings.digest
    center = replace(settings, views=0)
    assert replace(center, view=replace(VIEW, jitter=0.1)).digest == center.digest


def test_after_a_kill_only_the_rest_is_computed_and_all_is_the_same(
    images, settings, data, monkeypatch, tmp_path
):
    whole = everything(embed(images, settings, replace(data, feature_cache=tmp_path / "whole")))
    monkeypatch.setattr(module, "SEGMENT", 64)

    def kill(items, _title, _total):
        for number, item in enumerate(items):
            if number == 2:
                raise Killed
            yield item

    with pytest.raises(Killed):
        embed(images, settings, data, watch=kill)
    seen = computed(monkeypatch)
    assert torch.equal(everything(embed(images, settings, data)), whole)
    assert seen == list(range(128, 150))  # what was written in time is not


def test_a_damaged_segment_is_computed_again(images, settings, data, monkeypatch):
    whole = everything(embed(images, settings, data))
    (path,) = data.feature_cache.rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    lines = []
    seen = computed(monkeypatch)
    assert torch.equal(everything(embed(images, settings, data, warn=lines.append)), whole)
    assert len(seen) == 150
    assert "its checksum is wrong" in lines[0]


def files(folder, count, broken=()):
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number:02d}.png"
        if number in broken:
            path.write_bytes(b"broken")
        else:
            Image.fromarray(random.integers(0, 256, (24, 24, 3)).astype(np.uint8)).save(path)
    return ImageStack(sorted(folder.iterdir()), 20, workers=1)


def test_files_are_read_as_they_are_needed_and_found_again_by_content(settings, data, tmp_path, monkeypatch):
    stack = files(tmp_path / "photos", 12)
    found = everything(embed(stack, settings, data))
    in_memory = replace(data, feature_cache=tmp_path / "memory")
    assert torch.equal(found, everything(embed(stack[torch.arange(12)], settings, in_memory)))
    seen = computed(monkeypatch)
    (tmp_path / "photos").rename(tmp_path / "moved")
    moved = ImageStack(sorted((tmp_path / "moved").iterdir(), reverse=True), 20, workers=1)
    assert torch.equal(everything(embed(moved, settings, data)).flip(0), found)
    assert seen == []


def test_an_unreadable_file_has_the_row_of_the_next_one(settings, data, tmp_path):
    stack = files(tmp_path / "photos", 30, broken=(4, 29))
    found = embed(stack, settings, data)
    assert found.replaced == {4: 5, 29: 0}
    assert set(found.reasons) == {4, 29}
    rows = everything(found)
    assert torch.equal(rows[4], rows[5])
    assert found.shown(torch.tensor([3, 4, 29])).tolist() == [3, 5, 0]
    many = files(tmp_path / "bad", 10, broken=(1, 2))
    with pytest.raises(ValueError, match="2 of 10 images cannot be read"):
        embed(many, settings, data)


@pytest.fixture
def one_process():
    """Images are read in this process, in which a test can interfere."""
    here = pytest.MonkeyPatch()
    here.setattr(module, "map_in_workers", lambda function, items, workers: map(function, items))
    yield
    here.undo()


def truth(stack, settings, folder):
    """Features of all images, each computed alone and for the first time."""
    alone = [replace_files(stack, [file]) for file in stack.files]
    data = DataConfig(workers=1)
    return torch.cat(
        [
            everything(embed(one, settings, replace(data, feature_cache=folder / str(number))))
            for number, one in enumerate(alone)
        ]
    )


def replace_files(stack, files):
    return ImageStack(files, stack.size, crop=stack.crop, cache=stack.cache, workers=1)


def failing(monkeypatch, fails):
    """Reading a file fails where fails(path) says so."""
    real = content.open_regular

    def opened(path, *args):
        if fails(path):
            raise OSError(5, "Input/output error")
        return real(path, *args)

    monkeypatch.setattr(content, "open_regular", opened)


def between(monkeypatch, happens):
    """After the images were looked up in the cache, and before they are read."""
    real = module.image_keys

    def looked_up(images):
        keys = real(images)
        happens()
        return keys

    monkeypatch.setattr(module, "image_keys", looked_up)


@pytest.mark.usefixtures("one_process")
def test_images_that_could_not_be_looked_up_are_not_those_of_one_another(
    settings, data, tmp_path, monkeypatch
):
    """An error of the disk on five files, which has passed when they are read."""
    stack = files(tmp_path / "photos", 12)
    expected = truth(stack, settings, tmp_path / "alone")
    bad, seen = set(stack.files[2:7]), set()
    failing(monkeypatch, lambda path: path in bad and path not in seen and not seen.add(path))
    assert torch.equal(everything(embed(stack, settings, data)), expected)
    assert len(seen) == 5
    monkeypatch.undo()
    computing = computed(monkeypatch)
    assert torch.equal(everything(embed(stack, settings, data)), expected)  # nor are they later
    assert computing == []


@pytest.mark.usefixtures("one_process")
def test_images_that_cannot_be_read_poison_nothing(settings, data, tmp_path, monkeypatch):
    stack = files(tmp_path / "photos", 22)
    expected = truth(stack, settings, tmp_path / "alone")
    bad = {stack.files[4], stack.files[9]}
    failing(monkeypatch, lambda path: path in bad)
    found = embed(stack, settings, data)
    assert found.reasons == {4: "[Errno 5] Input/output error", 9: "[Errno 5] Input/output error"}
    good = [row for row in range(22) if row not in found.reasons]
    assert torch.equal(everything(found)[good], expected[good])
    monkeypatch.undo()
    computing = computed(monkeypatch)
    assert torch.equal(everything(embed(stack, settings, data)), expected)
    assert computing == [4, 9]


@pytest.mark.usefixtures("one_process")
def test_a_file_that_is_replaced_after_it_was_looked_up(settings, data, tmp_path, monkeypatch):
    """The run has the features of what it read, and the cache binds them to that and nothing else."""
    stack = files(tmp_path / "photos", 6)
    before = truth(stack, settings, tmp_path / "before")
    old, new = stack.files[3].read_bytes(), files(tmp_path / "others", 8).files[7].read_bytes()
    between(monkeypatch, lambda: stack.files[3].write_bytes(new))
    found = everything(embed(stack, settings, data))
    monkeypatch.undo()
    after = truth(stack, settings, tmp_path / "after")
    assert not torch.equal(before[3], after[3])
    assert torch.equal(found, after)
    assert torch.equal(everything(embed(stack, settings, data)), after)
    stack.files[3].write_bytes(old)
    assert torch.equal(everything(embed(stack, settings, data)), before)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("what", ["replaced", "damaged", "gone"])
def test_a_copy_does_not_depend_on_the_file_that_it_is_a_copy_of(settings, data, tmp_path, monkeypatch, what):
    """Of several copies one is computed: if that one changes, the others are computed by themselves."""
    stack = files(tmp_path / "photos", 24)
    for number in (5, 8):
        stack.files[number].write_bytes(stack.files[2].read_bytes())
    expected = truth(stack, settings, tmp_path / "alone")
    new = {"replaced": stack.files[0].read_bytes(), "damaged": b"damaged"}.get(what)
    between(monkeypatch, lambda: stack.files[2].write_bytes(new) if new else stack.files[2].unlink())
    found = embed(stack, settings, data)
    rows = everything(found)
    others = [row for row in range(24) if row != 2]
    assert torch.equal(rows[others], expected[others])
    assert torch.equal(rows[2], expected[{"replaced": 0, "damaged": 2, "gone": 2}[what]])
    assert found.reasons == {}


@pytest.mark.usefixtures("one_process")
def test_many_copies_of_a_damaged_file_take_two_rounds(settings, data, tmp_path, monkeypatch):
    stack = files(tmp_path / "photos", 60, broken=(1, 2, 3, 4, 5))
    rounds = []
    real = module._fill
    monkeypatch.setattr(module, "_fill", lambda *args: rounds.append(len(args[3])) or real(*args))
    assert set(embed(stack, settings, data).reasons) == {1, 2, 3, 4, 5}
    assert rounds == [56, 4]


@pytest.mark.usefixtures("one_process")
@hypothesis.settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(random=st.randoms(use_true_random=False))
def test_whatever_happens_to_files_no_image_has_the_features_of_another(settings, tmp_path_factory, random):
    """Errors of the disk, replaced and removed files, copies, at any moment; then once more without any."""
    place = tmp_path_factory.mktemp("files")
    stack = files(place / "photos", 20)
    contents = [file.read_bytes() for file in stack.files]
    data = DataConfig(feature_cache=place / "cache", workers=1)

    @functools.cache
    def feature_of(content):
        alone = place / f"{hash(content)}.png"
        alone.write_bytes(content)
        fresh = replace(data, feature_cache=place / alone.stem)
        return everything(embed(ImageStack([alone], 20, workers=1), settings, fresh))[0]

    def change():
        for file in random.sample(stack.files, 4):
            file.write_bytes(random.choice(contents))
        for file in random.sample(stack.files, random.randrange(2)):
            file.write_bytes(b"damaged")

    change()
    before = [file.read_bytes() for file in stack.files]
    with pytest.MonkeyPatch.context() as patch:
        broken = set(random.sample(stack.files, 5))
        failing(patch, lambda path: path in broken)
        between(patch, lambda: (change(), broken.clear()))
        first = embed(stack, settings, data)
    after = [file.read_bytes() for file in stack.files]
    again = embed(stack, settings, data)
    for found, contents_of in ((first, zip(before, after, strict=True)), (again, zip(after))):
        for number, (row, possible) in enumerate(zip(everything(found), contents_of, strict=True)):
            if number in found.reasons:
                assert b"damaged" in possible
            else:
                known = [feature_of(content) for content in set(possible) - {b"damaged"}]
                assert any(torch.equal(row, one) for one in known)


@pytest.mark.usefixtures("one_process")
def test_images_of_a_dataset_have_features_of_their_own(settings, data, tmp_path):
    """Those that differ in their palette or in how they are turned alone."""
    contents = [palette_image(tmp_path / "a.png", [0, 0, 0, 9 * n, 0, 200]) for n in range(4)]
    contents += [turned_image(tmp_path / "b.png", turn) for turn in (1, 3, 6, 8)]
    stack = ImageStack(rows_of(tmp_path / "saved", contents), 20, workers=1)
    found = everything(embed(stack, settings, data))
    assert torch.equal(found, truth(stack, settings, tmp_path / "alone"))
    assert len({row.numpy().tobytes() for row in found[:, 0]}) == 8


@pytest.mark.usefixtures("one_process")
def test_features_of_another_backbone_are_not_used_wherever_they_are(settings, data, tmp_path):
    stack = files(tmp_path / "photos", 12)
    torch.manual_seed(5)
    encoder = build_encoder(ModelConfig(backbone="small-8", projection_dims=4), channels=3).eval()
    other = replace(settings, encoder=encoder)
    expected = everything(embed(stack, settings, replace(data, feature_cache=tmp_path / "own")))
    embed(stack, other, data)
    (data.feature_cache / other.digest).rename(data.feature_cache / settings.digest)
    lines = []
    assert torch.equal(everything(embed(stack, settings, data, warn=lines.append)), expected)
    assert len(lines) == 1
    assert "another backbone" in lines[0]


@pytest.mark.usefixtures("one_process")
def test_squares_from_a_cache_bring_the_key_of_what_they_were_decoded_from(
    settings, data, tmp_path, monkeypatch
):
    """Pixels that were kept of a file that has been replaced since are not bound to the new one."""
    stack = files(tmp_path / "photos", 6)
    stack.cache = SquareCache(tmp_path / "squares", 10**9, settled=0)
    before = truth(stack, settings, tmp_path / "before")  # fills the cache of squares
    kept = stack.cache.get(stack.files[0], 20, "center")
    stack.files[0].write_bytes(stack.files[1].read_bytes())
    monkeypatch.setattr(SquareCache, "get", lambda *_: kept)  # as if the file looked the same
    first = replace_files(stack, stack.files[:1])
    found = everything(embed(first, settings, data))
    monkeypatch.undo()
    assert torch.equal(found[0], before[0])  # what was read
    plain = ImageStack(stack.files, 20, workers=1)
    assert torch.equal(everything(embed(plain, settings, data))[0], before[1])


def test_features_beyond_half_precision_are_an_error(images, settings, data, encoder):
    class Loud(torch.nn.Module):
        features = 2

        def forward(self, images):
            return images.flatten(1)[:, :2].abs() * 1e6 + 1e6

    loud = build_encoder(ModelConfig(backbone="small-8", projection_dims=4), channels=3)
    loud.backbone = Loud()
    with pytest.raises(ValueError, match="backbone small-8 gives features that are not finite, or beyond"):
        embed(images[:3], replace(settings, encoder=loud), data)


def test_random_views_are_of_whole_images(settings, data, tmp_path):
    """In memory and on disk alike; the center view is that of the central square, whatever the crop."""
    random = np.random.default_rng(0)
    files = [tmp_path / f"{i}.png" for i in range(6)]
    for i, file in enumerate(files):
        shape = (20, 20, 3) if i == 5 else (20, 60, 3)
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(file)
    whole = replace(settings, crop="whole")
    assert whole.digest != settings.digest
    assert replace(whole, views=0).digest == replace(settings, views=0).digest
    held = decode(files, Decoding(20, crop="whole", workers=1), no_watch, "").images
    found = {
        "disk": everything(embed(ImageStack(files, 20, crop="whole", workers=1), whole, data)),
        "memory": everything(embed(held, whole, replace(data, feature_cache=tmp_path / "memory"))),
        "center": everything(embed(held, settings, data)),
    }
    assert torch.equal(found["disk"], found["memory"])
    assert torch.equal(found["disk"][:, 0], found["center"][:, 0])
    assert torch.equal(found["disk"][5], found["center"][5])
    assert not torch.isclose(found["disk"][:5, 1:], found["center"][:5, 1:]).all(dim=2).any()


def test_images_that_differ_at_their_ends_alone_have_features_of_their_own(settings, data):
    squares = torch.zeros(2, 3, 20, 20, dtype=torch.uint8)
    wholes = torch.zeros(2, 3, 20, 20, dtype=torch.uint8)
    wholes[1, :, :, :4] = 255
    images = WholeImages(squares, wholes, torch.tensor([0, 1]), torch.tensor([3.0, 3.0]))
    one, other = module.image_keys(images).values
    assert not np.array_equal(one, other)
