"""Features in the place of images: rows, views that are drawn, batches, principal components."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import ropaws.core.features as features_module
from ropaws.core.distributed import Rank
from ropaws.core.features import FeatureBank, FeatureRows, principal_components
from ropaws.core.randomness import SupportConfig, draw_views
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.pool.corpus import Corpus, EmbeddedImages, features_of, without_features
from ropaws.training.loaders import BatchStream, TrainingData

LABELED, LABELS = torch.tensor([3, 9, 5]), torch.tensor([0, 1, 1])
ROLES = AugmentConfig(small_crops=2).multi_crop()


def rows(count=12, views=4, dims=3):
    """Row i, view v is (i, v, 0 ...): the center view has v = -1."""
    number, view = torch.arange(count).float(), torch.arange(views).float()
    center = torch.zeros(count, dims)
    center[:, 0], center[:, 1] = number, -1
    random = torch.zeros(count, views, dims)
    random[:, :, 0], random[:, :, 1] = number[:, None], view
    return FeatureRows(center, random)


def stream(images=None, **changes):
    data = TrainingData(rows() if images is None else images, LABELED, LABELS, Normalization((0.0,), (1.0,)))
    settings = {
        "views": ROLES,
        "labeled_view": AugmentConfig(),
        "support": SupportConfig(images_per_class=2, views=3),
        "batch": 4,
        "seed": 0,
        "size": 8,
    }
    return BatchStream(data, **{**settings, **changes})


def batch_at(one, step):
    (batch,) = one.batches(step, step + 1)
    return batch


def test_rows_are_indexed_like_images():
    found = rows()
    assert found.shape == (12, 3)
    assert len(found) == 12
    index = torch.tensor([7, 2, 7])
    assert found[index][:, 0].tolist() == [7, 2, 7]
    assert found.views(index).shape == (3, 4, 3)
    alone = FeatureRows(found.center)
    assert torch.equal(alone.views(index), found[index][:, None])  # the center view where there are no others


def test_a_bank_gives_the_rows_of_its_segments_in_any_order():
    whole = np.random.default_rng(0).normal(size=(9, 3, 5)).astype(np.float16)
    where = np.array([[1, 0], [0, 4], [0, 0], [1, 3]])
    bank = FeatureBank([whole[:5], whole[5:]], where, "made")
    expected = torch.from_numpy(whole[[5, 4, 0, 8]].astype(np.float32))
    index = torch.tensor([3, 0, 2, 2])
    assert torch.equal(bank[index], expected[index, 0])
    assert torch.equal(bank.views(index), expected[index, 1:])
    assert torch.equal(bank[:2], expected[:2, 0])
    assert bank.shape == (4, 5)
    assert bank.digest() != FeatureBank([whole[:5], whole[5:]], where[::-1], "made").digest()


@pytest.mark.parametrize(
    ("center", "views", "words"),
    [
        (torch.tensor([[0.0, float("nan")]]), None, "features: row 0 is not finite"),
        (torch.zeros(3), None, r"features must be an array \(n, d\) of floating-point"),
        (torch.zeros(3, 2, dtype=torch.long), None, "floating-point numbers, got torch.int64"),
        (torch.zeros(3, 2), torch.zeros(3, 2), r"views must be \(n, views, d\)"),
        (torch.zeros(3, 2), torch.zeros(3, 4, 5), r"views must be \(n, views, d\)"),
        (torch.zeros(3, 2), torch.full((3, 4, 2), torch.inf), "views: row 0 is not finite"),
    ],
)
def test_bad_features_get_one_line(center, views, words):
    with pytest.raises(ValueError, match=words):
        FeatureRows(center, views)


def test_large_finite_features_are_taken_though_their_sum_is_not_finite():
    largest = torch.finfo(torch.float32).max
    assert len(FeatureRows(torch.full((3, 2), largest))) == 3
    with pytest.raises(ValueError, match=r"row 2 is not finite \(1 such rows\)"):
        FeatureRows(torch.tensor([[largest, largest], [0, 0], [-torch.inf, torch.inf]]))


def test_roles_get_different_views_of_the_same_images():
    one = stream()
    seen = set()
    for step in range(6):
        batch = batch_at(one, step)
        assert list(batch.views) == list(ROLES)
        for view in batch.views.values():
            assert torch.equal(view[:, 0].long(), batch.pool_index)
        chosen = torch.stack([view[:, 1] for view in batch.views.values()])
        assert chosen.sort(dim=0).values.T.tolist() == [[0, 1, 2, 3]] * 4
        seen |= set(map(tuple, chosen.T.tolist()))
    assert len(seen) > 8  # in random order


def test_more_roles_than_views_use_them_again():
    random = torch.Generator().manual_seed(0)
    drawn = draw_views(2, 3, 5, random)
    assert torch.equal(drawn[:, 0], drawn[:, 2])
    assert (drawn[:, 0] != drawn[:, 1]).all()


def test_only_the_views_that_are_drawn_are_read(tmp_path, monkeypatch):
    """In memory and, beyond what is held, from the segments: the same."""
    everything = rows(views=4)
    index, chosen = torch.tensor([2, 0]), torch.tensor([[3, 1], [0, 0]])
    expected = everything.views(index)[torch.arange(2)[:, None], chosen]
    assert torch.equal(everything.views(index, chosen=chosen), expected)
    arrays = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float16)
    where = np.array([[0, 1], [1, 2], [1, 0]])
    held, mapped = (FeatureBank(list(arrays), where, "x") for _ in range(2))
    monkeypatch.setattr(features_module, "IN_MEMORY", 0)
    assert mapped._held is None
    monkeypatch.undo()
    assert held._held is not None
    chosen = torch.tensor([[2, 1], [0, 0]])
    found = [bank.views(index, chosen=chosen) for bank in (held, mapped)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(
        found[0][0, 0], torch.from_numpy(arrays[1, 0, 3]).float()
    )  # the center view is the first


def test_supports_are_views_of_the_labeled_images_with_their_labels():
    batch = batch_at(stream(), 2)
    support = batch.labeled
    assert support.images.shape == (2 * 2 * 3, 3)
    assert torch.equal(support.images[:, 0].long(), LABELED[support.identity])
    assert torch.equal(support.classes, LABELS[support.identity])
    by_image = support.images[:, 1].view(3, 4)
    assert all(len(set(views)) == 3 for views in by_image.T.tolist())


def test_the_parts_of_two_processes_are_the_batch_of_one():
    whole = batch_at(stream(), 3)
    parts = [batch_at(stream(at=Rank(rank, 2)), 3) for rank in range(2)]
    for role, view in whole.views.items():
        assert torch.equal(torch.cat([part.views[role] for part in parts]), view)
    rows_of = [{tuple(row) for row in part.labeled.images.tolist()} for part in parts]
    assert rows_of[0] | rows_of[1] == {tuple(row) for row in whole.labeled.images.tolist()}


def test_a_pass_over_the_pool_sees_the_center_features():
    found = stream().pool_pass(0).map(lambda features: features)
    assert torch.equal(found, rows().center)


def test_embedded_images_show_their_pixels_and_train_on_their_features():
    pixels = torch.zeros(12, 3, 8, 8, dtype=torch.uint8)
    images = EmbeddedImages(pixels, rows(), {2: 3}, {2: "broken"})
    assert images.shape == pixels.shape
    assert images[torch.tensor([1])].shape == (1, 3, 8, 8)
    assert features_of(images) is images.features
    assert images.shown(torch.tensor([1, 2])).tolist() == [1, 3]
    one = stream(images)
    expected = [3 if index == 2 else index for index in one.chosen(0).unlabeled.tolist()]
    assert batch_at(one, 0).pool_index.tolist() == expected
    corpus = Corpus(("a",), images, torch.zeros(12), pixels[:0], torch.zeros(0))
    assert without_features(corpus).train_images is pixels
    with pytest.raises(ValueError, match="12 rows of features for 3 images"):
        EmbeddedImages(pixels[:3], rows())


@pytest.mark.parametrize(("count", "dims"), [(200, 10), (7, 10), (7, 40)])  # the last are few for so many
def test_principal_components_are_those_of_a_singular_value_decomposition(count, dims):
    random = np.random.default_rng(0)
    values = random.normal(size=(count, dims)) * np.linspace(3, 0.1, dims) + 10
    mean, components = principal_components(FeatureRows(torch.from_numpy(values)), 4, block=64)
    rows = values / np.linalg.norm(values, axis=1, keepdims=True)
    expected = np.linalg.svd(rows - rows.mean(axis=0))[2][:4]
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-5)
    overlap = np.abs(np.sum(components.numpy() * expected, axis=1))
    np.testing.assert_allclose(overlap, 1, atol=1e-3)
    np.testing.assert_allclose(components @ components.T, np.eye(4), atol=1e-6)


def test_missing_components_are_zeros():
    _, components = principal_components(FeatureRows(torch.randn(20, 3)), 5)
    assert components.shape == (5, 3)
    assert not components[3:].any()


def test_batches_do_not_depend_on_the_process_or_the_past():
    one = stream()
    later = list(one.batches(0, 4))[3]
    again = batch_at(replace(one), 3)
    assert all(torch.equal(later.views[role], again.views[role]) for role in ROLES)


def test_every_step_of_every_seed_has_chance_of_its_own():
    """What methods draw in a step: the same when the step is made again, another one with another seed."""
    batches = {
        (seed, step): next(stream(seed=seed).batches(step, step + 1)) for seed in (0, 1) for step in (2, 3)
    }
    assert len({batch.seed for batch in batches.values()}) == 4
    assert next(stream(seed=1).batches(3, 4)).seed == batches[1, 3].seed
