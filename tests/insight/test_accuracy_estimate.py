"""Estimates of the accuracy on the pool: do their intervals hold, and what do they say of few labels?"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import binom, binomtest
from sklearn.datasets import load_digits

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight import accuracy_estimate as ae
from ropaws.insight.held_out import held_out_probs, logistic_probs
from ropaws.insight.suggestions import STRATEGIES, Situation


def rng(seed):
    return torch.Generator().manual_seed(seed)


# Audits


@pytest.mark.parametrize("count", [20, 30, 104])
def test_the_interval_of_an_audit_holds_for_any_accuracy(count):
    """Exactly: the probability of each number of right answers, over those whose interval has the truth."""
    intervals = [ae.binomial_interval(good, count) for good in range(count + 1)]
    for truth in np.linspace(0.02, 0.98, 49):
        holds = sum(
            binom.pmf(good, count, truth)
            for good, (low, high) in enumerate(intervals)
            if low <= truth <= high
        )
        assert holds >= 0.95
    for good in (0, 3, count // 2, count):
        plain = binomtest(good, count).proportion_ci(0.95, method="exact")
        assert intervals[good] == pytest.approx((plain.low, plain.high))


def test_an_audit_is_a_share_with_its_interval():
    right = torch.tensor([True] * 24 + [False] * 6)
    found = ae.audit_accuracy(right)
    assert (found.value, found.labels, found.kind) == (0.8, 30, ae.AUDIT)
    assert found.low < 0.8 < found.high
    assert ae.audit_accuracy(right[:0]) is None


def test_half_widths_are_widest_in_the_middle():
    widths = [ae.audit_half_width(30, share / 30) for share in range(31)]
    assert max(widths) == widths[15] == pytest.approx(0.187, abs=0.001)
    assert widths == pytest.approx(widths[::-1])


def test_wrong_questions_about_audits_are_refused():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        ae.audit_half_width(0)
    with pytest.raises(ValueError, match="expected must be from 0 to 1, got 2"):
        ae.audit_half_width(30, 2)


def test_audits_are_uniform_and_in_random_order():
    candidates = torch.tensor([3, 5, 8, 13, 21])
    first = [ae.draw_audit(candidates, 2, seed)[0].item() for seed in range(1000)]
    counts = [first.count(row) for row in candidates.tolist()]
    assert min(counts) > 150  # 200 each, give or take
    assert max(counts) < 250
    whole = ae.draw_audit(candidates, 9, seed=1)
    assert sorted(whole.tolist()) == candidates.tolist()
    assert torch.equal(ae.draw_audit(candidates, 2, seed=1), whole[:2])


# Labels that are no random sample


def test_the_curve_is_the_likeliest_one():
    confidence = torch.rand(40, generator=rng(0), dtype=torch.float64)
    right = (torch.rand(40, generator=rng(1)) < confidence).double()
    inputs = ae._inputs(confidence)

    def unlikely(curve):
        logits = inputs.numpy() @ curve
        fit = np.sum(np.logaddexp(0, logits) - right.numpy() * logits)
        offset, slope = curve
        return fit + ae.OFFSET_PRECISION * offset**2 / 2 + ae.SLOPE_PRECISION * (slope - ae.SLOPE) ** 2 / 2

    expected = minimize(unlikely, [0.0, 1.0], tol=1e-10).x
    np.testing.assert_allclose(ae._fit_curve(inputs, right)[0], expected, atol=1e-4)


@pytest.mark.parametrize("skew", [-1.5, 1.5])  # labels that are harder, or easier, than the pool
def test_the_correction_undoes_a_biased_choice(skew):
    naive, errors, holds = [], [], []
    for seed in range(150):
        odds = torch.randn(2000, generator=rng(seed)) + 1
        right = torch.rand(2000, generator=rng(seed + 1000)) < odds.sigmoid()
        chosen = (skew * odds).softmax(dim=0).multinomial(60, generator=rng(seed + 2000))
        rest = torch.ones(2000, dtype=torch.bool)
        rest[chosen] = False
        truth = float(right[rest].double().mean())
        found = ae.corrected_accuracy(right[chosen], odds[chosen].sigmoid(), odds[rest].sigmoid())
        naive.append(float(right[chosen].double().mean()) - truth)
        errors.append(found.value - truth)
        holds.append(found.low <= truth <= found.high)
        assert (found.labels, found.kind) == (60, ae.CORRECTED)
    assert abs(np.mean(naive)) > 0.1
    assert abs(np.mean(errors)) < 0.03
    assert np.mean(holds) > 0.93


def test_images_without_weight_do_not_count():
    confidence = torch.linspace(0.5, 0.99, 30)
    right, pool = confidence > 0.6, torch.tensor([0.9, 0.1])
    alone = ae.corrected_accuracy(right, confidence, pool[:1])
    weighted = ae.corrected_accuracy(right, confidence, pool, weights=torch.tensor([2.0, 0.0]))
    assert weighted == pytest.approx(alone)
    assert alone.value > ae.corrected_accuracy(right, confidence, pool).value + 0.1


def test_more_labels_and_smaller_corrections_give_narrower_intervals():
    def width(count, pool):
        confidence = torch.full((count,), 0.8)
        right = torch.arange(count) % 5 > 0
        found = ae.corrected_accuracy(right, confidence, torch.full((10,), pool))
        return found.high - found.low

    assert width(200, 0.8) < width(20, 0.8)
    assert width(200, 0.8) > 2 * 1.96 * ae.CURVE_ERROR  # no number of labels proves the curve
    assert width(200, 0.5) > width(200, 0.8)


# Both accuracies of a pool


@pytest.mark.parametrize(("labels", "low"), [(15, 0.79), (40, 0.92)])
def test_labels_that_are_all_right_promise_no_more_than_a_random_sample(labels, low):
    sure = torch.full((labels,), 0.99)
    found = ae.corrected_accuracy(torch.ones(labels, dtype=torch.bool), sure, sure)
    assert found.low <= low
    assert found.high == 1


def test_what_a_classifier_answers():
    probs = torch.tensor([[0.3, 0.2, 0.5], [0.15, 0.3, 0.55], [0.1, 0.8, 0.1]])
    found = ae.open_answers(probs)
    assert found.answer.tolist() == [0, 2, 1]
    assert found.confidence.tolist() == pytest.approx([0.3, 0.55, 0.8])
    closed = ae.closed_answers(probs)
    assert closed.answer.tolist() == [0, 1, 1]
    assert closed.confidence.tolist() == pytest.approx([0.6, 2 / 3, 8 / 9])


def made(labels, seed=0, classes=3):
    """Probabilities that are mostly right about labels."""
    numbers = torch.where(labels == OUT_OF_CLASS, classes, labels)
    return (
        torch.randn(len(labels), classes + 1, generator=rng(seed)) + 2 * torch.eye(classes + 1)[numbers]
    ).softmax(1)


def test_what_can_be_said_of_which_labels():
    pool = made(torch.tensor([0, 1, 2, OUT_OF_CLASS] * 20), seed=1)

    def kinds(labels, audited):
        labels = torch.tensor(labels)
        audit = torch.arange(len(labels)) < audited
        found = ae.pool_accuracy(made(labels), labels, audit, pool)
        return tuple(None if part is None else part.kind for part in found)

    assert kinds([0, 1, 2] * 10, 0) == (ae.CORRECTED, None)  # nobody has seen what is out-of-class
    assert kinds([0, 1, 2, OUT_OF_CLASS] * 10, 0) == (ae.CORRECTED, ae.CORRECTED)
    assert kinds([0, 1, 2, OUT_OF_CLASS] * 2, 0) == (None, None)  # too few labels
    assert kinds([0] * 5 + [OUT_OF_CLASS] * 30, 0) == (None, None)  # fewer than 2 per class
    assert kinds([0, 1, 2, OUT_OF_CLASS] * 10, 39) == (ae.AUDIT, ae.AUDIT)
    assert kinds([0, 1, 2, OUT_OF_CLASS] * 10, 24) == (ae.CORRECTED, ae.AUDIT)  # 18 of them in-class
    assert kinds([0, 1, 2] * 10, 30) == (ae.AUDIT, ae.AUDIT)
    assert kinds([0] * 5 + [OUT_OF_CLASS] * 30, 30) == (None, ae.AUDIT)


def test_an_audit_counts_its_own_labels_alone():
    labels = torch.tensor([0, 1] * 30)
    audit = torch.arange(60) < 30
    held_out = torch.zeros(60, 3)
    held_out[audit.nonzero().squeeze(1), labels[audit]] = 1.0  # right there, wrong elsewhere
    held_out[(~audit).nonzero().squeeze(1), 1 - labels[~audit]] = 1.0
    found = ae.pool_accuracy(held_out, labels, audit, held_out)
    assert found.in_class.value == found.overall.value == 1.0
    assert found.in_class.labels == 30


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_probabilities_give_an_interval_around_a_share(data):
    classes, count, pool = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(0, 40)),
        data.draw(st.integers(0, 5)),
    )
    sharp, seed = data.draw(st.sampled_from([0.0, 1.0, 1e4])), data.draw(st.integers(0, 10_000))
    numbers = torch.randint(0, classes + 1, (count,), generator=rng(seed))
    labels = torch.where(numbers == classes, OUT_OF_CLASS, numbers)
    audit = torch.rand(count, generator=rng(seed)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    probs = (sharp * torch.randn(count + pool, classes + 1, generator=rng(seed))).softmax(dim=1)
    for found in ae.pool_accuracy(probs[:count], labels, audit, probs[count:]):
        if found is not None:
            assert 0 <= found.low <= found.value <= found.high <= 1


# Held-out probabilities, and all of it together on digits: 6 classes, the other four out-of-class


def test_what_is_held_out_is_not_learned_from():
    points, labels = torch.randn(200, 400, generator=rng(0)), torch.arange(2).repeat(100)
    probs = held_out_probs(points, labels, classes=2)
    assert abs(float((probs.argmax(dim=1) == labels).double().mean()) - 0.5) < 0.12
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(200, dtype=torch.float64))


def test_a_lone_label_cannot_be_known_when_it_is_held_out():
    points = torch.randn(12, 5, generator=rng(1))
    labels = torch.tensor([0] * 6 + [1] * 5 + [2])
    assert held_out_probs(points, labels, classes=3)[11, 2] == 0
    every_one_alone = held_out_probs(points[:4], torch.arange(4), classes=4)
    assert (every_one_alone.diagonal() == 0).all()
    with pytest.raises(ValueError, match="at least 2 of them, got 1"):
        held_out_probs(points[:1], labels[:1], classes=3)


def digits():
    """Pixels, and answers."""
    pixels, numbers = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float(), torch.from_numpy(np.where(numbers > 5, OUT_OF_CLASS, numbers))


def simulated(choice, budget, seed, audited=0):
    """Labels of a budget and perhaps an audit: the estimates, the naive one, and the truth."""
    points, answers = digits()
    rows = torch.randperm(len(points), generator=rng(seed))[:600]
    points, answers, labels = points[rows], answers[rows], torch.full((600,), UNLABELED)
    situation = Situation(
        points / points.norm(dim=1, keepdim=True), labels, 6, torch.ones(600), torch.ones(600, 1)
    )
    chosen = STRATEGIES[choice](situation, budget, seed)
    labels[chosen] = answers[chosen]
    audit = torch.zeros(600, dtype=torch.bool)
    audit[ae.draw_audit((labels == UNLABELED).nonzero().squeeze(1), audited, seed)] = True
    labels = torch.where(audit, answers, labels)
    known = labels != UNLABELED
    numbers = torch.where(labels == OUT_OF_CLASS, 6, labels)[known]
    held_out = held_out_probs(points[known], numbers, classes=7)
    pool = logistic_probs(points[known], numbers, points[~known], 7)
    found = ae.pool_accuracy(held_out, labels[known], audit[known], pool).overall
    naive = ae.audit_accuracy(ae.open_answers(held_out).answer == numbers)
    truth = ae.open_answers(pool).answer == torch.where(answers == OUT_OF_CLASS, 6, answers)[~known]
    return found, naive, float(truth.double().mean())


def test_intervals_hold_on_digits_for_labels_at_cluster_centers():
    results = [simulated("k-means", 60, seed) for seed in range(16)]
    corrected = np.mean([found.value - truth for found, _, truth in results])
    naive = np.mean([said.value - truth for _, said, truth in results])
    assert abs(corrected) < abs(naive)
    assert sum(found.low <= truth <= found.high for found, _, truth in results) >= 14


def test_intervals_of_audits_hold_on_digits():
    results = [simulated("margin", 40, seed, audited=30) for seed in range(16)]
    assert {found.kind for found, _, _ in results} == {ae.AUDIT}
    assert {found.labels for found, _, _ in results} == {30}
    assert sum(found.low <= truth <= found.high for found, _, truth in results) >= 14
    assert abs(np.mean([found.value - truth for found, _, truth in results])) < 0.06
