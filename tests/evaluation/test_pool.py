"""Analyses on arrays: pools in blocks, and what is read from them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws import equations as eq
from ropaws.evaluation import propagation
from ropaws.evaluation.baselines import knn_predictions, logistic_predictions
from ropaws.evaluation.calibration import expected_calibration_error, reliability
from ropaws.evaluation.confusion import class_accuracy, confusion_matrix
from ropaws.evaluation.label_errors import doubtful_labels
from ropaws.evaluation.neighbors import leave_one_out, nearest
from ropaws.evaluation.ood import detection
from ropaws.evaluation.sskde import fit_sskde
from ropaws.evaluation.suggestions import suggest
from ropaws.methods.propagation import Kernel, ask_voters, choose_voters, pool_posterior, solve_voters
from tests.oracles import leave_one_out as slow_leave_one_out
from tests.oracles import sskde as slow_sskde


def rows(n, seed, d=6, dtype=torch.float64):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def blobs(per_class, classes, seed, *, spread=0.15, d=16):
    """Clusters around random directions.   ->  points (classes * per_class, d), labels"""
    random = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(classes, d, generator=random), dim=1)
    labels = torch.arange(classes).repeat_interleave(per_class)
    noise = spread * torch.randn(len(labels), d, generator=random)
    return F.normalize(centers[labels] + noise, dim=1), labels


KERNEL = Kernel(temperature=0.1, prior_temperature=0.3, label_ratio=5.0)
SUPPORT, LABELS = rows(9, 1), F.one_hot(torch.arange(9) % 3, 3).double()


@pytest.mark.parametrize("self_vote", [False, True])
@pytest.mark.parametrize("prior", [None, 0.3])
@pytest.mark.parametrize("iterations", [1, 2, 7, None])
def test_a_pool_of_voters_is_the_closed_form(self_vote, prior, iterations):
    kernel = Kernel(temperature=0.1, prior_temperature=prior, label_ratio=5.0, self_vote=self_vote)
    points = rows(40, 2)
    found = pool_posterior(points, SUPPORT, LABELS, kernel, iterations=iterations, tolerance=1e-12)
    expected = eq.ropaws_posterior(
        points,
        SUPPORT,
        LABELS,
        temperature=0.1,
        prior_temperature=prior,
        label_ratio=5.0,
        self_vote=self_vote,
        iterations=iterations,
    )
    torch.testing.assert_close(found.probs, expected.probs)
    torch.testing.assert_close(found.in_domain, expected.in_domain)


@pytest.mark.parametrize("temperature", [0.05, 0.1])
@pytest.mark.parametrize("prior", [None, 0.1, 1.0])
def test_the_fixed_point_is_met_with_the_default_tolerance(temperature, prior):
    """Also where two of four clusters have no label, and without a prior hardly hear of the others'."""
    points, cluster = blobs(30, 4, seed=9, spread=0.05)
    points = points.double()
    support = points[[0, 1, 30, 31]]
    labels = F.one_hot(cluster[[0, 1, 30, 31]], 2).double()
    kernel = Kernel(temperature=temperature, prior_temperature=prior)
    found = pool_posterior(points, support, labels, kernel)
    expected = eq.ropaws_posterior(points, support, labels, temperature=temperature, prior_temperature=prior)
    torch.testing.assert_close(found.probs, expected.probs, atol=2e-4, rtol=0)
    torch.testing.assert_close(found.in_domain, expected.in_domain, atol=3e-4, rtol=0)


def test_blocks_change_nothing_and_are_as_small_as_the_memory(monkeypatch):
    points = rows(200, 2)
    whole = pool_posterior(points, SUPPORT, LABELS, KERNEL)
    sizes = []
    real = eq.neighbor_weights

    def watched(*args, **kwargs):
        votes = real(*args, **kwargs)
        sizes.append(len(votes[0]))
        return votes

    monkeypatch.setattr(propagation.eq, "neighbor_weights", watched)
    few = pool_posterior(points, SUPPORT, LABELS, KERNEL, memory=16 * 209 * 20)
    torch.testing.assert_close(whole.probs, few.probs)
    assert max(sizes) == 20
    assert len(sizes) > 20  # votes do not fit and are computed anew each time


def test_points_that_do_not_vote_ask_those_that_do():
    """Against the formula for one query, written out."""
    points = rows(30, 3)
    voters = solve_voters(points[:20], SUPPORT, LABELS, KERNEL, tolerance=1e-12)
    found = ask_voters(points[20:], SUPPORT, LABELS, voters, KERNEL)
    closed = eq.propagate(
        *(
            eq.in_domain_prior(points[:20], SUPPORT, temperature=0.3)[:, None] * votes
            for votes in eq.neighbor_weights(points[:20], SUPPORT, temperature=0.1, label_ratio=5.0)
        ),
        LABELS,
    )
    for query, mass in zip(points[20:].numpy(), found.numpy(), strict=True):
        kernel_l = [5 * 20 / 9 * np.exp(query @ z / 0.1) for z in SUPPORT.numpy()]
        kernel_u = [np.exp(query @ z / 0.1) for z in points[:20].numpy()]
        total = sum(kernel_l) + sum(kernel_u)
        expected = sum(k * p for k, p in zip(kernel_l, LABELS.numpy(), strict=True))
        expected = expected + sum(k * q for k, q in zip(kernel_u, closed.numpy(), strict=True))
        prior = max(np.exp((query @ z - 1) / 0.3) for z in SUPPORT.numpy())
        np.testing.assert_allclose(mass, prior * expected / total, rtol=1e-7)


def test_few_voters_estimate_what_all_say():
    points, truth = blobs(200, 4, seed=0)
    support, labels = points[::50], F.one_hot(truth[::50], 4).float()
    everyone = pool_posterior(points, support, labels, KERNEL, voters=None)
    some = pool_posterior(points, support, labels, KERNEL, voters=200)
    assert (some.probs - everyone.probs).abs().mean() < 0.02
    assert (some.probs.argmax(1) == truth).float().mean() > 0.99
    assert not torch.equal(some.probs, everyone.probs)


def test_a_voter_has_no_say_on_itself_when_others_ask_it():
    points = rows(60, 10)
    chosen = choose_voters(60, 25, seed=4)
    found = pool_posterior(points, SUPPORT, LABELS, KERNEL, voters=25, seed=4)
    solved = solve_voters(points[chosen], SUPPORT, LABELS, KERNEL)
    torch.testing.assert_close(found.probs[chosen], eq.complete_posterior(solved.mass).probs)
    asked = eq.complete_posterior(ask_voters(points[chosen], SUPPORT, LABELS, solved, KERNEL)).probs
    assert (asked - found.probs[chosen]).abs().max() > 1e-3  # it would make a difference


def test_iteration_stops_where_the_rest_of_the_way_is_short_not_where_a_step_is(monkeypatch):
    monkeypatch.setattr(propagation, "SOLVED", 0)
    points, cluster = blobs(30, 4, seed=9, spread=0.05)
    points, tolerance = points.double(), 1e-2
    support, labels = points[[0, 30]], F.one_hot(cluster[[0, 30]], 2).double()
    kernel = Kernel(temperature=0.2, prior_temperature=None, label_ratio=0.2)
    found = solve_voters(points, support, labels, kernel, tolerance=tolerance).mass
    exact = solve_voters(points, support, labels, kernel, tolerance=1e-12, most=100_000).mass
    assert (found - exact).abs().max() <= tolerance


def test_voters_are_drawn_from_the_seed_and_bounded():
    assert torch.equal(choose_voters(5, None), torch.arange(5))
    assert torch.equal(choose_voters(5, 9), torch.arange(5))
    drawn = choose_voters(1000, 100, seed=3)
    assert torch.equal(drawn, choose_voters(1000, 100, seed=3))
    assert len(drawn.unique()) == 100
    assert torch.equal(drawn, drawn.sort().values)
    with pytest.raises(ValueError, match="voters must be None"):
        choose_voters(5, 0)
    with pytest.raises(ValueError, match="iterations must be None"):
        solve_voters(rows(3, 0), SUPPORT, LABELS, KERNEL, iterations=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 99), st.sampled_from([0.02, 0.1, 1.0]))
def test_posteriors_are_probabilities_whatever_comes_in(n, supports, seed, temperature):
    kernel = Kernel(temperature=temperature, prior_temperature=temperature)
    labels = F.one_hot(torch.arange(supports) % 2, 2).float()
    points, support = rows(n, seed, dtype=torch.float32), rows(supports, seed + 1, dtype=torch.float32)
    found = pool_posterior(points, support, labels, kernel, voters=max(1, n // 2))
    torch.testing.assert_close(found.probs.sum(dim=1), torch.ones(n))
    assert ((found.in_domain > 0) & (found.in_domain <= 1)).all()


def test_nearest_neighbors_in_blocks(monkeypatch):
    queries, points = rows(17, 4), rows(11, 5)
    whole = nearest(queries, points, 3)
    monkeypatch.setattr("ropaws.evaluation.neighbors.BLOCK_BYTES", 100)
    blocks = nearest(queries, points, 3)
    assert torch.equal(whole.position, blocks.position)
    similarity = (queries @ points.T).numpy()
    assert np.array_equal(whole.position.numpy(), np.argsort(-similarity, axis=1)[:, :3])
    assert nearest(queries, points, 50).position.shape == (17, 11)


def test_leave_one_out_is_the_loop_over_the_others(monkeypatch):
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    support = rows(7, 6)
    expected = slow_leave_one_out(support.numpy(), labels.tolist(), 3, 0.1)
    np.testing.assert_allclose(leave_one_out(support, labels, classes=3, temperature=0.1), expected)
    monkeypatch.setattr("ropaws.evaluation.neighbors.BLOCK_BYTES", 60)
    np.testing.assert_allclose(leave_one_out(support, labels, classes=3, temperature=0.1), expected)
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(support[:1], labels[:1], classes=3, temperature=0.1)


def test_flipped_labels_are_found_and_ranked_first():
    points, labels = blobs(20, 5, seed=1)
    assert doubtful_labels(points, labels, classes=5, temperature=0.1) == []
    flipped = torch.tensor([3, 27, 55, 99])
    wrong = labels.clone()
    wrong[flipped] = (labels[flipped] + 1) % 5
    doubts = doubtful_labels(points, wrong, classes=5, temperature=0.1)
    assert {doubt.position for doubt in doubts} == set(flipped.tolist())
    for doubt in doubts:
        assert doubt.label == wrong[doubt.position]
        assert doubt.suspected == labels[doubt.position]
        assert doubt.other > 0.5 > doubt.own
    gaps = [doubt.other - doubt.own for doubt in doubts]
    assert gaps == sorted(gaps, reverse=True)


def test_a_lone_label_is_not_doubted():
    points, labels = blobs(5, 2, seed=2)
    lone = torch.tensor([2])
    doubts = doubtful_labels(
        torch.cat([points, points[:1]]), torch.cat([labels, lone]), classes=3, temperature=0.1
    )
    assert 10 not in {doubt.position for doubt in doubts}
    assert doubtful_labels(points[:1], labels[:1], classes=2, temperature=0.1) == []


def test_sskde_is_the_loop():
    points, labels = rows(9, 7).numpy(), [0, 1, 2]
    expected = slow_sskde(points, labels, 3, 0.9, 5, 0.7, points[-1])
    density = fit_sskde(
        torch.tensor(points[:3]),
        torch.tensor(labels),
        torch.tensor(points[3:]),
        classes=3,
        iterations=5,
        gamma=0.7,
    )
    np.testing.assert_allclose(density(torch.tensor(points[-1:]))[0], expected, rtol=1e-10)


def test_sskde_does_not_depend_on_what_is_kept(monkeypatch):
    points, labels = rows(40, 8), torch.tensor([0, 1, 2])
    whole = fit_sskde(points[:3], labels, points[3:], classes=3)(points)
    monkeypatch.setattr("ropaws.evaluation.sskde.KERNEL_BYTES", 8 * 40 * 7)
    torch.testing.assert_close(fit_sskde(points[:3], labels, points[3:], classes=3)(points), whole)
    torch.testing.assert_close(whole.sum(dim=1), torch.ones(40, dtype=torch.float64))


def test_sskde_with_its_flat_kernel_still_tells_clusters_apart():
    points, truth = blobs(100, 4, seed=3)
    density = fit_sskde(points[::50], truth[::50], points, classes=4)  # gamma = 1 / d
    assert (density(points).argmax(dim=1) == truth).double().mean() > 0.95


@pytest.mark.parametrize("rival", [knn_predictions, logistic_predictions])
def test_rivals_learn_clusters_from_a_few_labels_or_one(rival):
    points, truth = blobs(30, 3, seed=4)
    for every in (5, 30):  # six labels a class, and one
        found = rival(points[::every], truth[::every], points)
        assert (found == truth.numpy()).mean() > 0.95


def test_detection_figures_are_those_of_the_definitions():
    random = np.random.default_rng(0)
    scores = np.concatenate([random.normal(0.4, 0.2, 300), random.normal(0.1, 0.2, 200)]).clip(-1, 1)
    inside = np.arange(500) < 300
    found = detection(torch.tensor(scores), torch.tensor(inside))
    pairs = scores[inside][:, None] - scores[~inside]
    assert found.auroc == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-6)
    # The highest threshold that lets 95 % of the in-class ones through.
    threshold = np.sort(scores[inside])[::-1][int(np.ceil(0.95 * 300)) - 1]
    assert found.fpr95 == pytest.approx((scores[~inside] >= threshold).mean(), abs=1e-6)
    for area, wanted, order in ((found.aupr_in, inside, -scores), (found.aupr_out, ~inside, scores)):
        ranked = wanted[np.argsort(order, kind="stable")]
        precision = np.cumsum(ranked) / np.arange(1, 501)
        assert area == pytest.approx(precision[ranked].mean(), abs=1e-3)


def test_reliability_bins_make_up_the_ece():
    random = np.random.default_rng(1)
    probs = torch.tensor(random.dirichlet([0.5, 0.5, 0.5], 400))
    truth = torch.tensor(random.integers(0, 3, 400))
    bins = reliability(probs, truth)
    assert len(bins) == 15
    assert sum(item.images for item in bins) == 400
    gap = sum(item.images * abs(item.confidence - item.accuracy) for item in bins) / 400
    assert gap == pytest.approx(expected_calibration_error(probs, truth), abs=1e-6)
    assert all(item.low <= item.confidence <= item.high for item in bins if item.images)


def test_confusion_counts_and_knows_empty_classes():
    matrix = confusion_matrix(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 0]), classes=3)
    assert matrix.tolist() == [[2, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert class_accuracy(matrix) == [2 / 3, 1.0, None]


def suggested(points, probs, in_domain, support, **kwargs):
    return suggest(points, probs, in_domain, support, threshold=0.5, width=0.1, **kwargs)


def test_a_suggestion_stands_for_doubt_that_no_label_explains():
    """Three clusters: one has a label, one is small and sure, one is large and in doubt."""
    points, cluster = blobs(40, 3, seed=5, spread=0.05)
    probs = torch.full((120, 2), 0.5)
    probs[cluster == 1] = torch.tensor([0.999, 0.001])
    probs[cluster == 0] = torch.tensor([0.001, 0.999])
    inside = torch.ones(120)
    first, *_ = suggested(points, probs, inside, points[:1], count=1)
    assert cluster[first.position] == 2
    assert first.kind == "doubtful"
    assert first.stands_for > 20


def test_suggestions_are_diverse():
    """One pick explains a large cluster; the next go to the small ones."""
    points, cluster = blobs(60, 4, seed=6, spread=0.04)
    kept = torch.cat(
        [torch.arange(0, 10), torch.arange(60, 120), torch.arange(120, 135), torch.arange(180, 195)]
    )
    points, cluster = points[kept], cluster[kept]
    even = torch.full((100, 4), 0.25)
    picks = suggested(points, even, torch.ones(100), points[:1], count=3)
    assert cluster[picks[0].position] == 1
    assert set(cluster[[pick.position for pick in picks]].tolist()) == {1, 2, 3}
    gains = [pick.gain for pick in picks]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("likely", [1, 2])
def test_what_is_likelier_in_class_is_suggested_first(likely):
    points, cluster = blobs(30, 3, seed=11, spread=0.05)
    inside = torch.where(cluster == likely, 0.95, 0.55)
    picks = suggested(points, torch.full((90, 2), 0.5), inside, points[:1], count=1)
    assert cluster[picks[0].position] == likely


def test_clusters_outside_are_likely_new_classes():
    points, cluster = blobs(60, 5, seed=7, spread=0.1)
    inside = (cluster < 3).float()
    probs = torch.full((300, 3), 1 / 3)
    picks = suggested(points, probs, inside, points[:1], count=10)
    new = [pick for pick in picks if pick.kind == "new class"]
    assert len(picks) == 10
    assert len({pick.position for pick in picks}) == 10
    assert {int(cluster[pick.position]) for pick in new} == {3, 4}
    assert any(pick.kind == "new class" for pick in picks[:5])  # near the top, not all at the end


def test_suggestions_when_all_is_outside_or_little_is_there():
    points, _ = blobs(3, 2, seed=8)
    probs = torch.full((6, 2), 0.5)
    picks = suggested(points, probs, torch.zeros(6), points[:1], count=4)
    assert len({pick.position for pick in picks}) == 4
    assert len(suggested(points, probs, torch.ones(6), points[:1], count=50)) == 6
    with pytest.raises(ValueError, match="count must be at least 1"):
        suggested(points, probs, torch.ones(6), points[:1], count=0)
