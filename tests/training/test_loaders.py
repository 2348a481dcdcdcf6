"""The batch of a step: views by role, pool positions, labels; and passes over the pool."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from ropaws.core.distributed import Rank, share
from ropaws.core.randomness import SupportConfig, support_share, unlabeled_indices
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.pool.corpus import ImageStack
from ropaws.training import loaders
from ropaws.training.loaders import BatchStream, TrainingData

LABELED, LABELS = torch.tensor([3, 9, 5]), torch.tensor([0, 1, 1])
PLAIN = AugmentConfig(size=8, small_crops=1, small_size=4, jitter=0, solarize=0, equalize=0)


def stream(**changes):
    """Twelve constant images that show their number."""
    images = torch.arange(12, dtype=torch.uint8)[:, None, None, None].expand(12, 1, 8, 8) * 20
    data = TrainingData(images, LABELED, LABELS, Normalization((0.0,), (1.0,)))
    settings = {
        "views": PLAIN.multi_crop(),
        "labeled_view": PLAIN,
        "support": SupportConfig(images_per_class=2, views=3),
        "batch": 4,
        "seed": 0,
        "size": 8,
    }
    return BatchStream(data, **{**settings, **changes})


def numbers(images):
    """Which images these views show."""
    return (images.mean(dim=(1, 2, 3)) * 255 / 20).round().long()


def batch_at(one, step):
    (batch,) = one.batches(step, step + 1)
    return batch


def test_labels_and_identities_travel_with_the_support_images():
    one = stream()
    support = one.support_batch(0, one.pixels(0).labeled)
    assert support.images.shape == (12, 1, 8, 8)
    assert torch.equal(numbers(support.images), LABELED[support.identity])
    assert torch.equal(support.labels.argmax(dim=1), LABELS[support.identity])
    assert support.labels.sum(dim=0).tolist() == [6, 6]


def test_views_come_by_role_in_the_order_of_the_method():
    roles = replace(PLAIN, small_crops=2).multi_crop()
    views = batch_at(stream(views=roles), 0).views
    assert list(views) == ["large1", "large2", "small1", "small2"]
    assert [view.shape[2] for view in views.values()] == [8, 8, 4, 4]
    turned = dict(reversed(roles.items()))
    assert list(batch_at(stream(views=turned), 0).views) == list(turned)


def test_rows_of_all_views_show_the_same_image():
    one = stream()
    first, second, crop = (
        view.mean(dim=(1, 2, 3)) for view in one.unlabeled_views(0, one.pixels(0).unlabeled).values()
    )
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, crop)


def test_a_batch_says_which_image_of_the_pool_each_row_shows():
    one = stream()
    for batch in one.batches(0, 7):
        expected = unlabeled_indices(batch.step, batch=4, pool=12, seed=0)
        assert torch.equal(batch.pool_index, expected)
        for view in batch.views.values():
            assert torch.equal(numbers(view), expected)
        assert batch.steps == 7
    halves = [batch_at(stream(at=Rank(rank, 2)), 5).pool_index for rank in range(2)]
    assert torch.equal(torch.cat(halves), batch_at(one, 5).pool_index)


def test_labeled_rows_say_their_class_among_all_classes():
    """Labels count the classes of the batch, which has two of three here."""
    data = replace(stream().data, labeled_indices=torch.arange(6), labels=torch.tensor([0, 0, 4, 4, 7, 7]))
    one = replace(stream(), data=data, support=SupportConfig(classes=2, images_per_class=2, views=2))
    seen = set()
    for batch in one.batches(0, 12):
        labeled = batch.labeled
        assert torch.equal(labeled.classes, data.labels[labeled.identity])
        assert labeled.labels.shape == (8, 2)
        known = labeled.classes.unique()
        assert torch.equal(known[labeled.labels.argmax(dim=1)], labeled.classes)
        seen |= set(known.tolist())
    assert seen == {0, 4, 7}


def test_batches_are_a_function_of_seed_and_step():
    late = [batch.views["large1"] for batch in stream().batches(2, 4)]
    all_of_them = [batch.views["large1"] for batch in stream().batches(0, 4)]
    assert torch.equal(late[0], all_of_them[2])
    assert torch.equal(late[1], all_of_them[3])


def test_a_method_that_needs_no_pool_gets_no_views():
    one = stream(views={})
    batch = batch_at(one, 0)
    assert batch.views == {}
    assert len(batch.pool_index) == len(one.pixels(0).unlabeled) == 0
    assert batch.labeled.images.shape == (12, 1, 8, 8)


def labeled_epochs(count, each, steps):
    """A stream of so many labeled images per step: the rows of its steps."""
    data = replace(stream().data, labeled_indices=torch.arange(count), labels=torch.arange(count) % 3)
    one = replace(stream(views={}), data=data, support=SupportConfig(images_per_step=each, views=1))
    return [batch.labeled for batch in one.batches(0, steps)]


def test_labeled_images_in_shuffled_epochs():
    epochs = [labeled_epochs(9, 3, 6)[start : start + 3] for start in (0, 3)]
    orders = [torch.cat([batch.identity for batch in epoch]) for epoch in epochs]
    for order in orders:
        assert order.sort().values.tolist() == list(range(9))
    assert not torch.equal(*orders)
    for batch in (*epochs[0], *epochs[1]):
        assert torch.equal(numbers(batch.images), batch.identity)
        assert torch.equal(batch.classes, batch.identity % 3)
        # The columns are all classes, also where a batch lacks some.
        assert batch.labels.shape == (3, 3)
        assert torch.equal(batch.labels.argmax(dim=1), batch.classes)


def test_labeled_epochs_use_every_image_in_another_order_each_time():
    rows = [batch.identity for batch in labeled_epochs(8, 3, 12)]
    assert {len(batch) for batch in rows} == {2, 3}
    epochs = [torch.cat(rows[start : start + 3]) for start in range(0, 12, 3)]
    assert all(epoch.sort().values.tolist() == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4
    (everything,) = labeled_epochs(8, 100, 1)  # more than there are: all of them
    assert everything.identity.sort().values.tolist() == list(range(8))


@pytest.mark.parametrize("unique", [False, True])
def test_each_process_makes_its_own_rows_of_the_batch_of_one(unique):
    """Views, supports, labels and identities, whatever the number of processes."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 14, 14), dtype=torch.uint8, generator=random)
    labeled = torch.arange(20)
    data = TrainingData(images, labeled, labeled % 5, Normalization((0.5,) * 3, (0.25,) * 3))
    settings = AugmentConfig(
        size=12, small_crops=1, small_size=8, grayscale=0.3, blur=0.5, solarize=0, equalize=0
    )
    support = SupportConfig(images_per_class=3, views=2, unique_classes_per_process=unique)
    whole = BatchStream(data, settings.multi_crop(), settings, support, batch=12, seed=0, size=12)
    pixels = whole.pixels(5)
    views = whole.unlabeled_views(5, pixels.unlabeled)
    supports = whole.support_batch(5, pixels.labeled)
    for size in (2, 3, 4):
        seen = []
        for rank in range(size):
            part = replace(whole, at=Rank(rank, size))
            pixels = part.pixels(5)
            mine = share(12, part.at)
            made = part.unlabeled_views(5, pixels.unlabeled)
            assert list(made) == list(views)
            for role, own in made.items():
                torch.testing.assert_close(own, views[role][mine], atol=1e-5, rtol=0)
            chosen = support_share(15, support, part.at)
            rows = torch.cat([view * 15 + chosen for view in range(2)])
            own = part.support_batch(5, pixels.labeled)
            torch.testing.assert_close(own.images, supports.images[rows], atol=1e-5, rtol=0)
            assert torch.equal(own.labels, supports.labels[rows])
            assert torch.equal(own.identity, supports.identity[rows])
            assert torch.equal(own.classes, supports.classes[rows])
            seen += rows.tolist()
        assert sorted(seen) == list(range(30))


def test_a_pass_over_the_pool_comes_where_an_epoch_starts():
    one = stream(batch=5)  # two steps per epoch; two images are left out
    assert [step for step in range(7) if one.pool_pass(step) is not None] == [0, 2, 4, 6]
    assert one.pool_pass(4).step == 4
    assert all(stream(views={}).pool_pass(step) is None for step in range(4))


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_pass_maps_center_views_of_all_images_in_order(tmp_path, monkeypatch, place):
    monkeypatch.setattr(loaders, "PASS_BATCH", 5)
    one = stream(size=6)
    if place == "disk":
        files = [tmp_path / f"{number:02d}.png" for number in range(12)]
        for number, file in enumerate(files):
            Image.new("L", (16, 12), 20 * number).save(file)
        stack = ImageStack(files, 8, workers=1)
        one = replace(
            one, data=replace(one.data, images=stack, normalize=Normalization((0.0,) * 3, (1.0,) * 3))
        )
    sizes = []

    def shown(views):
        sizes.append(tuple(views.shape[2:]))
        return numbers(views)

    found = one.pool_pass(0)
    assert len(found) == 12
    assert torch.equal(found.map(shown), torch.arange(12))
    assert sizes == [(6, 6)] * 3


def test_the_labeled_images_of_a_step_are_drawn_once(monkeypatch):
    drawn = []
    real = loaders.support_indices

    def watched(step, **settings):
        drawn.append(step)
        return real(step, **settings)

    monkeypatch.setattr(loaders, "support_indices", watched)
    assert len(list(stream().batches(0, 5))) == 5
    assert drawn == [0, 1, 2, 3, 4]
