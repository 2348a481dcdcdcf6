"""Splits, batches and their randomness."""

from dataclasses import replace

import pytest
import torch

from ropaws.data.augment import AugmentConfig, Normalization
from ropaws.data.loaders import BatchStream, TrainingData
from ropaws.data.randomness import POOL_ORDER, SPLIT, generator
from ropaws.data.samplers import SupportConfig, support_indices, support_share, unlabeled_indices
from ropaws.data.splits import draw_split
from ropaws.distributed import share
from ropaws.distributed import Place

NAMES = ("a", "b", "c")
LABELS = torch.tensor([0, 1, 2, -1] * 10)


def test_a_split_has_its_labels_and_no_others():
    split = draw_split(LABELS, NAMES, labels_per_class=4, seed=0)
    assert len(split.indices) == len(split.indices.unique()) == 12
    assert torch.equal(split.labels, LABELS[split.indices])
    assert split.labels.bincount().tolist() == [4, 4, 4]


def test_a_split_depends_on_its_seed_alone():
    one, again, other = (draw_split(LABELS, NAMES, labels_per_class=4, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.indices, again.indices)
    assert not torch.equal(one.indices, other.indices)


def test_a_class_without_or_with_too_few_labels_is_named():
    with pytest.raises(ValueError, match="class 'c' has no labeled image"):
        draw_split(torch.tensor([0, 1, 0, 1]), NAMES, labels_per_class=1, seed=0)
    with pytest.raises(
        ValueError, match=r"class 'a' has 10 labeled images, fewer than data\.labels_per_class=11"
    ):
        draw_split(LABELS, NAMES, labels_per_class=11, seed=0)


def test_without_any_label_there_is_nothing_to_draw():
    with pytest.raises(ValueError, match="no training image has a label"):
        draw_split(torch.tensor([-1, -1]), (), labels_per_class=1, seed=0)


def test_an_epoch_shows_every_image_once_in_a_new_order():
    epochs = [
        torch.cat([unlabeled_indices(step, batch=4, pool=22, seed=0) for step in range(start, start + 5)])
        for start in (0, 5)
    ]
    for epoch in epochs:
        assert len(epoch.unique()) == 20  # the last two are left out of this epoch
    assert not torch.equal(*epochs)
    assert torch.equal(unlabeled_indices(7, batch=4, pool=22, seed=0), epochs[1][8:12])


def test_a_batch_larger_than_the_pool_is_refused():
    with pytest.raises(
        ValueError, match=r"train\.batch=23 is larger than the unlabeled set of 22 images; use at most 22"
    ):
        unlabeled_indices(0, batch=23, pool=22, seed=0)


def test_support_is_class_balanced_with_labels_relative_to_the_batch():
    labels = torch.tensor([0] * 5 + [1] * 5 + [7] * 5)
    config = SupportConfig(classes=2, images_per_class=3)
    seen = set()
    for step in range(20):
        positions, relative = support_indices(step, labels, config, seed=0)
        assert relative.tolist() == [0, 0, 0, 1, 1, 1]
        assert len(positions.unique()) == 6
        first, second = labels[positions].view(2, 3)
        assert len(first.unique()) == len(second.unique()) == 1
        seen |= {int(first[0]), int(second[0])}
    assert seen == {0, 1, 7}


def test_a_short_class_is_drawn_with_replacement_and_one_label_is_enough():
    labels = torch.tensor([0, 1, 1])
    positions, _ = support_indices(0, labels, SupportConfig(images_per_class=5), seed=0)
    assert positions[:5].tolist() == [0] * 5
    assert sorted(positions[5:].bincount().tolist()) == [
        0,
        2,
        3,
    ]  # each comes up before any comes up a third time


def test_more_classes_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"support\.classes=4, but only 2 classes have labels"):
        support_indices(0, torch.tensor([0, 1]), SupportConfig(classes=4), seed=0)


def test_purposes_and_steps_have_randomness_of_their_own():
    draws = {
        (purpose, step): float(torch.rand(1, generator=generator(0, purpose, step)))
        for purpose in (SPLIT, POOL_ORDER)
        for step in range(3)
    }
    assert len(set(draws.values())) == 6
    assert draws[(SPLIT, 1)] == float(torch.rand(1, generator=generator(0, SPLIT, 1)))


def stream(**changes):
    images = torch.arange(12, dtype=torch.uint8)[:, None, None, None].expand(12, 1, 8, 8) * 20
    data = TrainingData(
        images, torch.tensor([3, 9, 5]), torch.tensor([0, 1, 1]), Normalization((0.0,), (1.0,))
    )
    plain = AugmentConfig(size=8, small_crops=1, small_size=4, jitter=0, solarize=0, equalize=0)
    return BatchStream(data, plain, SupportConfig(images_per_class=2, views=3), batch=4, seed=0, **changes)


def test_labels_and_identities_travel_with_the_support_images():
    one = stream()
    support = one.support_batch(0, one.pixels(0))
    assert support.images.shape == (12, 1, 8, 8)
    shown = (
        (support.images.mean(dim=(1, 2, 3)) * 255 / 20).round().long()
    )  # constant images show their number
    number_of = torch.tensor([3, 9, 5])
    assert torch.equal(shown, number_of[support.identity])
    assert torch.equal(support.labels.argmax(dim=1), torch.tensor([0, 1, 1])[support.identity])
    assert support.labels.sum(dim=0).tolist() == [6, 6]


def test_rows_of_all_views_show_the_same_image():
    one = stream()
    views = one.views(0, one.pixels(0))
    first, second, crop = (v.mean(dim=(1, 2, 3)) for v in (views.first, views.second, *views.crops))
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, crop)


def test_batches_are_a_function_of_seed_and_step():
    late = [views.first for _, views, _ in stream().batches(2, 4)]
    all_of_them = [views.first for _, views, _ in stream().batches(0, 4)]
    assert torch.equal(late[0], all_of_them[2])
    assert torch.equal(late[1], all_of_them[3])


def test_a_method_that_needs_no_pool_gets_empty_views():
    one = stream(with_views=False)
    views = one.views(0, one.pixels(0))
    assert len(views.first) == len(views.second) == 0
    assert views.crops == ()


@pytest.mark.parametrize("name", ["classes", "images_per_class", "views"])
def test_bad_settings_are_named(name):
    with pytest.raises(ValueError, match=rf"support\.{name} must be at least 1, got 0"):
        SupportConfig(**{name: 0})


@pytest.mark.parametrize("unique", [False, True])
def test_each_process_makes_its_own_rows_of_the_batch_of_one(unique):
    """Views, supports, labels and identities, whatever the number of processes."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 14, 14), dtype=torch.uint8, generator=random)
    labeled = torch.arange(20)
    data = TrainingData(images, labeled, labeled % 5, Normalization((0.5,) * 3, (0.25,) * 3))
    settings = AugmentConfig(size=12, small_crops=1, small_size=8, gray=0.3, blur=0.5, solarize=0, equalize=0)
    support = SupportConfig(images_per_class=3, views=2, unique_classes_per_process=unique)
    whole = BatchStream(data, settings, support, batch=12, seed=0)
    views, supports = whole.views(5, whole.pixels(5)), whole.support_batch(5, whole.pixels(5))
    for size in (2, 3, 4):
        seen = []
        for rank in range(size):
            part = replace(whole, at=Place(rank, size))
            pixels = part.pixels(5)
            mine = share(12, part.at)
            made = part.views(5, pixels)
            for all_of_them, own in zip((views.first, views.second, *views.crops),
                                        (made.first, made.second, *made.crops), strict=True):  # fmt: skip
                torch.testing.assert_close(own, all_of_them[mine], atol=1e-5, rtol=0)
            chosen = support_share(15, support, part.at)
            rows = torch.cat([view * 15 + chosen for view in range(2)])
            own = part.support_batch(5, pixels)
            torch.testing.assert_close(own.images, supports.images[rows], atol=1e-5, rtol=0)
            assert torch.equal(own.labels, supports.labels[rows])
            assert torch.equal(own.identity, supports.identity[rows])
            seen += rows.tolist()
        assert sorted(seen) == list(range(30))
