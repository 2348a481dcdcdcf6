"""The share of the pool that is in-class, and the curve from scores to probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws.classify.in_class_share import (
    CONFIDENCE,
    LEAST_KEPT,
    around_border,
    border_score,
    fit_curve,
    in_class_share,
    score_gap,
    share_interval,
)
from ropaws.core.records import Share
from tests import oracles


def scores(count, share, seed, gap=3.0):
    """A pool of which this share is in-class, and labels: normal scores, out-of-class ones lower."""
    random = np.random.default_rng(seed)
    inside = round(share * count)
    pool = np.concatenate([random.normal(0, 1, inside), random.normal(-gap, 1, count - inside)])
    return torch.from_numpy(pool), lambda labels: torch.from_numpy(random.normal(0, 1, labels))


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_the_share_is_the_best_bin(seed, labels, pool):
    random = np.random.default_rng(seed)
    labeled, unlabeled = random.normal(0, 1, labels), random.normal(-1, 2, pool)
    found = in_class_share(torch.from_numpy(unlabeled), torch.from_numpy(labeled))
    expected = oracles.best_bin_share(unlabeled.tolist(), labeled.tolist(), LEAST_KEPT, CONFIDENCE)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("share", "low", "high"), [(1.0, 0.88, 1.0), (0.5, 0.42, 0.6), (0.1, 0.07, 0.16)])
def test_the_estimated_share_is_near_the_truth_over_many_draws(share, low, high):
    found = []
    for seed in range(30):
        pool, draw = scores(4000, share, seed)
        found.append(in_class_share(pool, draw(100)))
    assert low < np.mean(found) < high
    assert np.std(found) < 0.1


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_the_interval_holds_the_estimate_and_mostly_the_truth(share):
    inside = 0
    for seed in range(40):
        pool, draw = scores(2000, share, seed, gap=4.0)
        interval = share_interval(pool, draw(60))
        assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
        inside += interval.low - 0.02 <= share <= interval.high + 0.02
    assert inside >= 28


def test_few_labels_say_little_and_no_label_nothing():
    pool, draw = scores(500, 0.5, 0)
    few, many = (share_interval(pool, draw(labels)) for labels in (3, 200))
    assert few.high - few.low > many.high - many.low
    lone = share_interval(pool, draw(1))
    assert (lone.low, lone.high) == (0, 1)
    assert share_interval(pool, torch.full((3,), torch.nan)) == (0.75, 0.0, 1.0)
    assert share_interval(pool[:0], draw(5)) == (0.75, 0.0, 1.0)


def test_a_share_says_how_wrong_a_flag_may_be_that_agrees_with_it():
    """At the ends of the interval, as many flags as the estimate leaves out are wrong by count."""
    share = Share(0.6, 0.2, 0.85)
    images, flagged = 1000, 400
    lost = (flagged - (images - 850)) / 850  # 850 are in-class, and 150 flags are right at best
    missed = (800 - flagged) / 800  # 200 are
    assert (round(100 * lost), round(100 * missed)) == (29, 50)
    assert share.doubt == "The share is uncertain: up to 50% of the out-of-class ones may not be flagged."
    both = Share(0.5, 0.1, 0.9).doubt
    assert both.endswith(
        "up to 44% of the in-class images may be flagged, and up to 44% of the out-of-class ones not."
    )
    assert Share(0.5, 0.45, 0.55).doubt == ""
    assert Share(1.0, 1.0, 1.0).doubt == Share(0.0, 0.0, 0.0).doubt == ""


def test_images_that_look_like_the_classes_are_allowed_for():
    """Half of the pool looks as the labels do and is of no class: nothing but the interval can know."""
    random = np.random.default_rng(0)
    pool, labels = random.normal(0, 1, 800), random.normal(0, 1, 200)
    pool[:100] -= 4  # what can be told apart, a part of them only
    found = share_interval(
        torch.from_numpy(pool), torch.from_numpy(labels), counts=torch.full((10,), 20), gap=None
    )
    assert found.estimate > 0.8
    assert found.low < 0.6


def test_one_label_per_class_never_says_all_of_the_pool():
    pool, draw = scores(500, 1.0, 0)
    held_out = draw(10) - 3
    found = share_interval(pool, held_out, counts=torch.ones(10))
    assert in_class_share(pool, held_out) == 1
    assert found.estimate < 0.95
    assert found.high - found.low > 0.4
    many = share_interval(pool, draw(200), counts=torch.full((10,), 20))
    assert many.estimate > 0.93
    assert many.high - many.low < 0.4  # a part of what looks in-class may be of no class


def test_labels_very_far_from_a_pool_of_nearly_equal_scores():
    """A warning of the solver would fail this test."""
    pool = torch.tensor([0.0] * 20 + [1e-28], dtype=torch.float64)
    curve = fit_curve(pool, torch.tensor([1.0, 2.0]), 0.5)
    assert all(math.isfinite(value) for value in curve)
    assert curve(pool).isfinite().all()


def test_labels_that_are_all_equal_are_no_error():
    pool, _ = scores(500, 0.5, 0)
    share = share_interval(pool, torch.zeros(10))
    assert 0 < share.estimate < 1
    curve = fit_curve(pool, torch.zeros(10), share.estimate)
    assert torch.isfinite(curve(pool)).all()
    flat = fit_curve(torch.ones(50), torch.ones(4), 0.7)
    assert (flat(torch.ones(3)) > 0.98).all()  # nothing tells the two apart


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_the_mean_prior_of_the_pool_is_the_share_and_ranks_as_the_score(share):
    pool, draw = scores(3000, share, 1)
    curve = fit_curve(pool, draw(50), share)
    prior = curve(pool)
    assert float(prior.mean()) == pytest.approx(share, abs=0.01)
    assert ((prior >= 0) & (prior <= 1)).all()
    assert (prior[pool.argsort()].diff() >= 0).all()


@pytest.mark.parametrize("share", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("labels", ["like the pool", "worse than the pool"])
def test_the_prior_has_an_order_whatever_the_share(share, labels):
    pool, draw = scores(1000, 0.5, 1)
    held_out = draw(10) if labels == "like the pool" else draw(10) - 5
    curve = fit_curve(pool, held_out, share)
    prior = around_border(curve(pool), float(curve(torch.tensor(border_score(pool, share, None)))))
    assert (prior[pool.argsort()].diff() > 0).all()
    assert float((prior < 0.5).double().mean()) == pytest.approx(1 - share, abs=0.002)  # the flag agrees


@pytest.mark.parametrize(("share", "count"), [(0.2, 150), (0.5, 150), (0.85, 1000)])
def test_a_gap_is_found_and_is_the_border(share, count):
    pool, draw = scores(count, share, 0, gap=8.0)
    held_out = draw(12)
    gap = score_gap(pool, held_out)
    inside = torch.arange(count) < round(share * count)
    assert ((pool >= gap) == inside).double().mean() > 0.98
    found = share_interval(pool, held_out, gap=gap)
    assert found.estimate == pytest.approx(share, abs=0.02)
    allowed = 0.05 + 0.25 * (1 - found.estimate)
    assert found.low == pytest.approx(max(0.0, found.estimate - allowed), abs=1e-6)
    assert found.high <= found.estimate + 0.05 + 1e-9
    assert border_score(pool, found.estimate, gap) == gap
    lone = share_interval(pool, held_out, counts=torch.ones(12), gap=gap)
    assert lone.low == 0  # other classes may be above the gap, too


def test_others_of_two_kinds_are_both_below_the_border():
    """The valley between the two is deeper than that below the classes."""
    inside, draw = scores(300, 1.0, 0)
    near, far = draw(250) - 5, draw(400) - 25
    pool = torch.cat([inside, near, far])
    gap = score_gap(pool, draw(12))
    assert float((inside >= gap).double().mean()) > 0.95
    assert float((near >= gap).double().mean()) < 0.05
    assert float((far >= gap).double().mean()) == 0
    assert score_gap(pool, torch.cat([draw(8), draw(4) - 5])) < float(near.min())  # some labels are there


def test_a_kind_that_looks_like_the_classes_is_within_the_interval():
    pool, draw = scores(1000, 0.4, 0, gap=8.0)
    lookalikes = draw(120)  # a sixth of the others
    pool = torch.cat([pool, lookalikes])
    held_out = draw(30)
    gap = score_gap(pool, held_out)
    assert gap is not None
    found = share_interval(pool, held_out, gap=gap)
    assert found.low < 400 / 1120 < found.estimate - 0.05


def test_no_gap_is_seen_where_there_is_none_or_labels_disagree():
    pool, draw = scores(1000, 0.5, 0, gap=1.0)
    assert score_gap(pool, draw(12)) is None
    assert score_gap(*(part for part in scores(1000, 1.0, 0)[:1]), draw(12)) is None
    pool, draw = scores(1000, 0.5, 0, gap=8.0)
    assert score_gap(pool, draw(12) - 8) is None
    assert score_gap(pool[:10], draw(12)) is None
    assert score_gap(torch.ones(100), draw(12)) is None
    both = torch.cat([draw(10), draw(10) - 8])
    assert score_gap(pool, both) is None
    assert score_gap(pool, both, torch.tensor([1.0] * 10 + [0.01] * 10)) is not None


def test_odds_are_taken_against_the_border():
    found = around_border(torch.tensor([0.1, 0.2, 0.8]), 0.2)
    assert found.tolist() == pytest.approx([0.25 * 4 / 9 / (0.25 * 4 / 9 + 0.25), 0.5, 16 / 17])
    assert around_border(torch.tensor([0.1]), math.nan).tolist() == pytest.approx([0.1])


def test_the_prior_is_near_one_for_a_curated_pool_and_low_for_junk():
    pool, draw = scores(3000, 1.0, 2)
    share = in_class_share(pool, draw(100))
    assert float(fit_curve(pool, draw(100), share)(pool).mean()) > 0.9
    pool, draw = scores(3000, 0.1, 3, gap=6.0)  # the first tenth is in-class
    prior = fit_curve(pool, draw(100), in_class_share(pool, draw(100)))(pool)
    assert float(prior[:300].mean()) > 0.7
    assert float(prior[300:].mean()) < 0.1


@given(st.integers(0, 1000), st.integers(2, 40), st.integers(1, 20), st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_any_scores_give_probabilities(seed, pool, labels, share):
    random = np.random.default_rng(seed)
    unlabeled = torch.from_numpy(random.normal(0, 10.0 ** random.integers(-6, 6), pool))
    labeled = torch.from_numpy(random.choice(unlabeled.numpy(), labels))
    found = fit_curve(unlabeled, labeled, share)(unlabeled)
    assert ((found >= 0) & (found <= 1)).all()
