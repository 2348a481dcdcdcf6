"""Suspected label errors, and the leave-one-out classifiers behind them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.classify.soft_nn import leave_one_out as soft_nn_votes
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight import label_errors as leave_one_out
from ropaws.insight.label_errors import check_labels, label_quality, rank_label_errors


def blobs(per_class, classes, seed, *, spread=0.15, d=16):
    """Clusters around random directions.   ->  points (classes * per_class, d), labels"""
    random = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(classes, d, generator=random), dim=1)
    labels = torch.arange(classes).repeat_interleave(per_class)
    return centers[labels] + spread * torch.randn(len(labels), d, generator=random), labels


def flipped(labels, classes, share, seed):
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=random)[: round(share * len(labels))]
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + torch.randint(1, classes, (len(chosen),), generator=random)) % classes
    return wrong


def test_flipped_labels_are_found_and_ranked_first():
    points, labels = blobs(20, 5, seed=1)
    assert rank_label_errors(points, labels, classes=5) == []
    chosen = torch.tensor([3, 27, 55, 99])
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + 1) % 5
    found = rank_label_errors(points, wrong, classes=5)
    assert {error.position for error in found} == set(chosen.tolist())
    for error in found:
        assert error.label == wrong[error.position]
        assert error.suspected == labels[error.position]
        assert error.other >= 2.5 * error.own
    quality = label_quality(points, wrong, classes=5)
    assert set(quality.argsort()[:4].tolist()) == set(chosen.tolist())
    assert [error.position for error in found] == quality.argsort()[:4].tolist()


@pytest.mark.parametrize("per_class", [3, 6, 20])
def test_right_labels_that_few_others_contradict_are_not_named(per_class):
    named = contradicted = by_chance = 0.0
    for seed in range(6):
        points, labels = blobs(per_class, 6, seed, spread=0.4)
        found = check_labels(points, labels, classes=6)
        assert len(found.errors) <= found.contradicted == len(rank_label_errors(points, labels, classes=6))
        named, contradicted = named + len(found.errors), contradicted + found.contradicted
        by_chance += found.by_chance
    assert contradicted > 10
    assert 0.5 * contradicted < by_chance < 2 * contradicted
    assert named <= 0.1 * contradicted


def test_wrong_labels_are_named_beyond_those_that_chance_explains():
    points, truth = blobs(20, 5, seed=1, spread=0.3)
    labels = flipped(truth, 5, 0.1, seed=1)
    found, ranked = check_labels(points, labels, classes=5), rank_label_errors(points, labels, classes=5)
    wrong = set((labels != truth).nonzero().squeeze(1).tolist())
    named = {error.position for error in found.errors}
    assert len(named & wrong) >= 7
    assert len(named - wrong) <= 1
    assert found.errors == [error for error in ranked if error.position in named]


def test_what_chance_explains_is_the_sum_over_the_others_probabilities():
    points, truth = blobs(6, 4, seed=2, spread=0.35)
    labels = flipped(truth, 4, 0.1, seed=2)
    labels[-1] = OUT_OF_CLASS  # alone: no other could confirm it
    found = check_labels(points, labels, classes=4)
    numbers, log_probs = leave_one_out._judged(points, labels, 4)
    none, some = leave_one_out._error_rates(log_probs[:-1], numbers[:-1])
    probs = (log_probs / none.temperature).softmax(dim=1).numpy()
    odds = log_probs.exp().numpy()
    expected = sum(
        probs[i, y] for i in range(len(probs) - 1) for y in range(5) if odds[i].max() >= 2.5 * odds[i, y]
    )
    assert found.by_chance == pytest.approx(expected, rel=1e-6)
    own = (log_probs[:-1] / some.temperature).softmax(dim=1).numpy()[np.arange(23), numbers[:-1].numpy()]
    likely = (1 - some.rate) * own + some.rate * (1 - own) / 3
    assert some.likelihood == pytest.approx(np.log(likely).sum(), rel=1e-6)
    assert some.wrong(log_probs[:-1], numbers[:-1])[0] == pytest.approx(
        some.rate * (1 - own[0]) / 3 / likely[0], rel=1e-6
    )
    assert found.contradicted >= len(found.errors)


@pytest.mark.parametrize(("classes", "odds"), [(2, 1.0), (4, 2.0), (12, 4.0)])
def test_the_more_classes_the_clearer_an_error_must_be(classes, odds):
    points, truth = blobs(60, classes, seed=5, spread=0.4)
    labels = flipped(truth, classes, 0.2, seed=5)
    found = rank_label_errors(points, labels, classes=classes)
    ratios = torch.tensor([error.other / error.own for error in found])
    assert odds <= ratios.min() < 1.5 * odds  # the least suspect one is close to the limit
    listed = torch.zeros(len(labels), dtype=torch.bool)
    listed[[error.position for error in found]] = True
    assert (labels != truth)[listed].double().mean() > 2 * (labels != truth).double().mean()


@pytest.mark.parametrize("per_class", [5, 40])
def test_better_than_soft_nearest_neighbors_at_one_temperature(per_class):
    ours, former = [], []
    for seed in range(5):
        points, truth = blobs(per_class, 6, seed, spread=0.3, d=32)
        points = points + 1  # all images share something, as features of a network do
        labels = flipped(truth, 6, 0.2, seed)
        votes = soft_nn_votes(LabeledEmbeddings(F.normalize(points, dim=1), labels, 6), temperature=0.1)
        margin = votes.gather(1, labels[:, None]).squeeze(1) - votes.amax(dim=1)
        wrong = (labels != truth).numpy()
        quality = label_quality(points, labels, classes=6).clamp_max(1e6)
        ours.append(average_precision_score(wrong, -quality))
        former.append(average_precision_score(wrong, -margin))
    assert np.mean(ours) > np.mean(former) + 0.03
    assert np.mean(ours) > 0.7


def unit_centered(features):
    rows = F.normalize(features.double(), dim=1)
    rows = rows - rows.mean(dim=0)
    return (rows / rows.square().sum(dim=1).mean().sqrt()).numpy()


@pytest.mark.parametrize("d", [4, 40])  # more rows than dimensions, and fewer
def test_ridge_is_a_fit_without_the_row(monkeypatch, d):
    penalty, temperature = 0.7, 0.3
    monkeypatch.setattr(leave_one_out, "PENALTIES", (penalty,))
    monkeypatch.setattr(leave_one_out, "SCORE_TEMPERATURES", (temperature,))
    features, labels = blobs(5, 3, seed=2, spread=1.0, d=d)
    labels[0] = 2
    rows, given = unit_centered(features), F.one_hot(labels, 4).numpy()
    scores = np.full((15, 4), -np.inf)
    for i in range(15):
        others = np.arange(15) != i
        inside = rows[others].T @ rows[others] + penalty * np.eye(d)
        found = rows[i] @ np.linalg.solve(inside, rows[others].T @ given[others])
        scores[i, :3] = found[:3] / given[others].sum(axis=0)[:3] * 15 / 4
    expected = torch.from_numpy(scores / temperature).log_softmax(dim=1)
    found = leave_one_out.ridge(leave_one_out.main_directions(features), labels, classes=4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_soft_nn_is_the_loop_over_the_others(monkeypatch):
    monkeypatch.setattr(leave_one_out, "KERNEL_TEMPERATURES", (0.2,))
    features, labels = blobs(4, 3, seed=3, spread=1.0, d=6)
    rows = unit_centered(features)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = np.zeros((12, 3))
    for i in range(12):
        for c in range(3):
            voters = [j for j in range(12) if j != i and labels[j] == c]
            expected[i, c] = np.mean([np.exp(rows[i] @ rows[j] / 0.2) for j in voters])
    expected /= expected.sum(axis=1, keepdims=True)
    expected = np.log((1 - leave_one_out.FLOOR) * expected + leave_one_out.FLOOR / 3)
    points = leave_one_out.main_directions(features)
    np.testing.assert_allclose(leave_one_out.soft_nn(points, labels, classes=3), expected, atol=1e-4)
    monkeypatch.setattr(leave_one_out, "BLOCK", 5)
    np.testing.assert_allclose(leave_one_out.soft_nn(points, labels, classes=3), expected, atol=1e-4)


def test_a_lone_label_is_not_suspected():
    points, labels = blobs(5, 2, seed=2)
    points, labels = torch.cat([points, points[:1]]), torch.cat([labels, torch.tensor([2])])
    assert 10 not in {error.position for error in rank_label_errors(points, labels, classes=3)}
    quality = label_quality(points, labels, classes=3)
    assert quality[10] == torch.inf
    assert quality[:10].isfinite().all()


@pytest.mark.parametrize("labels", [[], [0], [0, 0], [0, 1], [1, 1, 1], [0, 1, 2], [OUT_OF_CLASS] * 2])
def test_too_few_labels_to_contradict_one_another(labels):
    labels = torch.tensor(labels, dtype=torch.long)
    points = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0))
    assert rank_label_errors(points, labels, classes=3) == []
    assert (label_quality(points, labels, classes=3) == torch.inf).all()


def test_out_of_class_is_one_more_answer():
    points, truth = blobs(20, 3, seed=4)
    labels = torch.where(truth == 2, OUT_OF_CLASS, truth)
    labels[0], labels[45] = OUT_OF_CLASS, 1
    found = {e.position: (e.label, e.suspected) for e in rank_label_errors(points, labels, classes=2)}
    assert found == {0: (OUT_OF_CLASS, 0), 45: (1, OUT_OF_CLASS)}


@pytest.mark.parametrize("wrong", [UNLABELED, 3])
def test_images_without_a_label_are_refused(wrong):
    with pytest.raises(ValueError, match="labels must be class numbers below 3"):
        label_quality(torch.randn(3, 2), torch.tensor([0, 1, wrong]), classes=3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_labels_of_any_features(data):
    count = data.draw(st.integers(0, 12))
    labels = torch.tensor(
        data.draw(st.lists(st.sampled_from([0, 1, 2, OUT_OF_CLASS]), min_size=count, max_size=count)),
        dtype=torch.long,
    )
    values = st.lists(st.integers(-2, 2), min_size=3, max_size=3)
    points = torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count))).view(count, 3).float()
    found = rank_label_errors(points, labels, classes=3)
    quality = label_quality(points, labels, classes=3)
    assert not quality.isnan().any()
    positions = [error.position for error in found]
    assert len(set(positions)) == len(positions)
    assert (quality[positions].diff() >= 0).all()
    for error in found:
        assert error.label == labels[error.position] != error.suspected
        assert int((labels == error.label).sum()) > 1
        assert (labels == error.suspected).any()
        assert 0 <= len(labels.unique()) / 2 * error.own <= error.other <= 1
