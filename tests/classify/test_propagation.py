"""Label propagation over pools: blocks, voters, class balance, labels held out."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws import equations as eq
from ropaws.classify import propagation
from ropaws.classify.propagation import (
    Kernel,
    ask_voters,
    choose_voters,
    class_balance,
    held_out_mass,
    pool_posterior,
    solve_voters,
)
from tests import oracles
from tests.insight.test_pool import blobs, rows

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


def test_the_choice_of_voters_by_keys_does_not_depend_on_the_order():
    points, random = rows(60, 11), torch.Generator().manual_seed(0)
    keys, order = torch.rand(60, generator=random), torch.randperm(60, generator=random)
    chosen = choose_voters(60, 20, keys=keys)
    assert torch.equal(chosen, chosen.sort().values)
    assert len(chosen.unique()) == 20
    other = choose_voters(60, 20, keys=keys[order])
    assert torch.equal(order[other].sort().values, chosen)
    assert not torch.equal(order[choose_voters(60, 20, seed=0)].sort().values, choose_voters(60, 20, seed=0))
    whole = pool_posterior(points, SUPPORT, LABELS, KERNEL, voters=20, keys=keys)
    turned = pool_posterior(points[order], SUPPORT, LABELS, KERNEL, voters=20, keys=keys[order])
    torch.testing.assert_close(turned.probs, whole.probs[order])
    torch.testing.assert_close(turned.in_domain, whole.in_domain[order])


# Classes with unequal numbers of labels

UNEQUAL = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 0])


def test_class_balance_gives_every_class_the_same_weight():
    labels = F.one_hot(UNEQUAL, 4).double()  # the last class has no label
    weights = class_balance(labels)
    np.testing.assert_allclose(weights, oracles.class_weights(labels.numpy()))
    assert float(weights.mean()) == pytest.approx(1)
    torch.testing.assert_close(weights @ labels, torch.tensor([3.0, 3.0, 3.0, 0.0]).double())
    torch.testing.assert_close(class_balance(LABELS), torch.ones(9).double())
    smooth = 0.8 * labels + 0.05
    assert float(class_balance(smooth).mean()) == pytest.approx(1)


@pytest.mark.parametrize("prior", [None, 0.3])
@pytest.mark.parametrize("self_vote", [False, True])
def test_a_pool_with_unequal_classes_is_the_weighted_closed_form(prior, self_vote):
    kernel = Kernel(temperature=0.1, prior_temperature=prior, label_ratio=2.0, self_vote=self_vote)
    points, labels = rows(25, 2), F.one_hot(UNEQUAL, 3).double()
    weights = oracles.class_weights(labels.numpy())
    probs, in_domain = oracles.posterior(
        points.numpy(), SUPPORT.numpy(), labels.numpy(), 0.1, prior, 2.0, self_vote, weights
    )
    found = pool_posterior(points, SUPPORT, labels, kernel, tolerance=1e-12)
    np.testing.assert_allclose(found.probs, probs, rtol=1e-6)
    np.testing.assert_allclose(found.in_domain, in_domain, rtol=1e-6)


@pytest.mark.parametrize("voters", [None, 12])
def test_labels_that_are_given_again_change_nothing(voters):
    """Three times the labels of one class: the same densities, and so the same posterior."""
    points = rows(30, 12)
    again = torch.cat([torch.arange(9), *[(LABELS[:, 1] == 1).nonzero().squeeze(1)] * 2])
    once = pool_posterior(points, SUPPORT, LABELS, KERNEL, voters=voters, tolerance=1e-12)
    thrice = pool_posterior(points, SUPPORT[again], LABELS[again], KERNEL, voters=voters, tolerance=1e-12)
    torch.testing.assert_close(thrice.probs, once.probs)
    torch.testing.assert_close(thrice.in_domain, once.in_domain)


# Labels held out


def test_held_out_labels_are_judged_by_a_pool_that_never_saw_them():
    """Against the loop over the labels; class 1 has a single label and is left out."""
    points = rows(25, 2)
    found = held_out_mass(points, SUPPORT, UNEQUAL, KERNEL, voters=None).mass.sum(dim=1)
    expected = oracles.held_out_in_domain(points.numpy(), SUPPORT.numpy(), UNEQUAL.tolist(), 0.1, 0.3, 5.0)
    assert len(found) == 8
    np.testing.assert_allclose(found, expected, atol=3e-4)  # the pool is solved up to 1e-4 per class


def test_labels_that_nobody_can_judge_give_nothing():
    assert len(held_out_mass(rows(10, 2), SUPPORT[:3], torch.arange(3), KERNEL).mass) == 0
    assert len(held_out_mass(rows(10, 2), SUPPORT[:1], torch.tensor([0]), KERNEL).mass) == 0


def test_many_labels_are_held_out_in_parts_that_cover_each_once(monkeypatch):
    support = rows(61, 13)
    labels = torch.tensor([0] * 25 + [1] * 20 + [2] * 15 + [3])[
        torch.randperm(61, generator=torch.Generator().manual_seed(0))
    ]
    asked = []
    real = propagation.ask_voters

    def watched(queries, others, *arguments):
        asked.append((queries, others))
        return real(queries, others, *arguments)

    monkeypatch.setattr(propagation, "ask_voters", watched)
    found = held_out_mass(rows(30, 14), support, labels, KERNEL).mass.sum(dim=1)
    position = {tuple(row.tolist()): index for index, row in enumerate(support)}
    held = [[position[tuple(row.tolist())] for row in queries] for queries, _ in asked]
    assert len(held) == propagation.FOLDS
    lone = int((labels == 3).nonzero())
    assert sorted(row for part in held for row in part) == [i for i in range(61) if i != lone]
    assert len(found) == 60
    for rows_held, (_, others) in zip(held, asked, strict=True):
        left = {position[tuple(row.tolist())] for row in others}
        assert not left & set(rows_held)
        assert left | set(rows_held) | {lone} == set(range(61))
        counts = labels[rows_held].bincount(minlength=4)
        assert (counts <= torch.tensor([2, 1, 1, 0])).all()  # an equal share of every class


def test_as_many_parts_as_labels_is_one_by_one(monkeypatch):
    points = rows(25, 2)
    alone = held_out_mass(points, SUPPORT, UNEQUAL, KERNEL).mass.sum(dim=1)
    monkeypatch.setattr(propagation, "ONE_BY_ONE", 0)
    monkeypatch.setattr(propagation, "FOLDS", len(UNEQUAL))
    parts = held_out_mass(points, SUPPORT, UNEQUAL, KERNEL).mass.sum(dim=1)
    torch.testing.assert_close(parts.sort().values, alone.sort().values)


def test_held_out_labels_do_not_depend_on_the_order_of_the_pool():
    points, random = rows(60, 11), torch.Generator().manual_seed(0)
    keys, order = torch.rand(60, generator=random), torch.randperm(60, generator=random)
    one, other = (
        held_out_mass(pool, SUPPORT, UNEQUAL, KERNEL, voters=20, keys=key).mass
        for pool, key in ((points, keys), (points[order], keys[order]))
    )
    torch.testing.assert_close(one, other)
