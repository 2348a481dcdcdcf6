"""Features of images by a frozen backbone: by content, once, whatever stands beside an image."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ropaws.data.augment import AugmentConfig, Normalization
from ropaws.data.files.reading import Decoding, decode
from ropaws.data.files.streaming import ImageStack
from ropaws.data.sources import DataConfig
from ropaws.data.whole_images import WholeImages
from ropaws.models import ModelConfig, build_encoder
from ropaws.runs import embedding as module
from ropaws.runs.embedding import Embedding, embed_images

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
    from ropaws.data.augment import center_view

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
    assert embed(found, other, data).features.views(torch.arange(3)).shape[1] == 1


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
    one, other = module.image_keys(images)
    assert not np.array_equal(one, other)
