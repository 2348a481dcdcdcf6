"""Splits, which images a step has, and their randomness."""

import pytest
import torch

from ropaws.core.randomness import (
    POOL_ORDER,
    SPLIT,
    SupportConfig,
    generator,
    support_indices,
    unlabeled_indices,
)
from ropaws.pool.sources import draw_split

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
    # each comes up before any comes up a third time
    assert sorted(positions[5:].bincount().tolist()) == [0, 2, 3]


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


@pytest.mark.parametrize("name", ["classes", "images_per_class", "views", "images_per_step"])
def test_bad_settings_are_named(name):
    with pytest.raises(ValueError, match=rf"support\.{name} must be at least 1, got 0"):
        SupportConfig(**{name: 0})
