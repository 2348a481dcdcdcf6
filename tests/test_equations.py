"""Every equation against the oracle, its limits and its invariants."""

import inspect
import itertools
import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from ropaws import equations as eq
from tests import oracles


def unit_rows(n, d, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=random, dtype=dtype), dim=1)


def balanced(s, c, dtype=torch.float64):
    return F.one_hot(torch.arange(s) % c, c).to(dtype)


def soft_labels(s, c, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(s, c, generator=random, dtype=torch.float64).softmax(dim=1)


QUERIES, SUPPORT, LABELS = unit_rows(7, 5, seed=1), unit_rows(12, 5, seed=2), balanced(12, 3)
SOFT = soft_labels(12, 3)


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), **tolerance)


# --- against the oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("labels", [LABELS, SOFT], ids=["hard", "soft"])
def test_soft_nn_matches_the_paper(temperature, labels):
    expected = oracles.soft_nn(QUERIES.numpy(), SUPPORT.numpy(), labels.numpy(), temperature)
    close(eq.soft_nn(QUERIES, SUPPORT, labels, temperature=temperature), expected)


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_sharpen_matches_the_paper(temperature):
    close(eq.sharpen(SOFT, temperature=temperature), oracles.sharpen(SOFT.numpy(), temperature))


def test_densities_match_the_paper():
    for i, z in enumerate(QUERIES.numpy()):
        expected = math.log(oracles.density(z, SUPPORT.numpy(), 0.1))
        close(eq.log_density(QUERIES, SUPPORT, temperature=0.1)[i], expected)
        for y in range(3):
            hard = oracles.class_density(z, SUPPORT.numpy(), LABELS.numpy(), y, 0.1)
            soft = oracles.soft_class_density(z, SUPPORT.numpy(), SOFT.numpy(), y, 0.1)
            close(eq.class_log_density(QUERIES, SUPPORT, LABELS, temperature=0.1)[i, y], math.log(hard))
            close(eq.class_log_density(QUERIES, SUPPORT, SOFT, temperature=0.1)[i, y], math.log(soft))


def test_semi_supervised_density_matches_the_paper():
    unlabeled, probs = unit_rows(4, 5, seed=3), soft_labels(4, 3, seed=4)
    actual = eq.semi_class_log_density(
        QUERIES, SUPPORT, SOFT, unlabeled, probs, temperature=0.1, label_ratio=5.0
    )
    for i, z in enumerate(QUERIES.numpy()):
        for y in range(3):
            expected = oracles.semi_class_density(
                z, SUPPORT.numpy(), SOFT.numpy(), unlabeled.numpy(), probs.numpy(), y, 0.1, 5.0
            )
            close(actual[i, y], math.log(expected))


@pytest.mark.parametrize("self_vote", [False, True])
@pytest.mark.parametrize("ratio", [1e-3, 1.0, 5.0, 1e3])
def test_neighbor_weights_match_the_paper(self_vote, ratio):
    expected = oracles.neighbor_weights(QUERIES.numpy(), SUPPORT.numpy(), 0.1, ratio, self_vote)
    actual = eq.neighbor_weights(QUERIES, SUPPORT, temperature=0.1, label_ratio=ratio, self_vote=self_vote)
    for a, e in zip(actual, expected, strict=True):
        close(a, e)


@pytest.mark.parametrize("self_vote", [False, True])
@pytest.mark.parametrize("prior_temperature", [None, 0.1, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_posterior_matches_the_paper(self_vote, prior_temperature, dtype):
    probs, in_domain = oracles.posterior(
        QUERIES.numpy(), SUPPORT.numpy(), SOFT.numpy(), 0.1, prior_temperature, 5.0, self_vote
    )
    actual = eq.ropaws_posterior(
        QUERIES.to(dtype),
        SUPPORT.to(dtype),
        SOFT.to(dtype),
        prior_temperature=prior_temperature,
        self_vote=self_vote,
    )
    close(actual.probs, probs, rtol=1e-5, atol=1e-6)
    close(actual.in_domain, in_domain, rtol=1e-5, atol=1e-6)


def test_prior_matches_the_paper():
    close(
        eq.in_domain_prior(QUERIES, SUPPORT, temperature=0.1),
        oracles.in_domain_prior(QUERIES.numpy(), SUPPORT.numpy(), 0.1),
    )


@pytest.mark.parametrize("crops", [0, 3])
def test_paws_loss_matches_the_paper(crops):
    anchors = torch.stack([soft_labels(6, 4, seed) for seed in range(2 + crops)])
    targets = torch.stack([soft_labels(6, 4, seed) for seed in (10, 11)]) ** 6  # some tiny targets
    targets /= targets.sum(dim=-1, keepdim=True)
    losses = eq.paws_loss(anchors, targets)
    close(losses.total, oracles.paws_loss(anchors.numpy(), targets.numpy(), 0.25))
    close(losses.parts["consistency"] - losses.parts["mean_entropy"], losses.total)


@pytest.mark.parametrize("reweight_entropy", [False, True])
@pytest.mark.parametrize("power", [0.0, 1.0, 3.0])
def test_ropaws_loss_matches_the_paper(power, reweight_entropy):
    anchors = torch.stack([soft_labels(6, 4, seed) for seed in range(5)])
    targets = torch.stack([soft_labels(6, 4, seed) for seed in (10, 11)])
    in_domain = torch.stack([soft_labels(6, 4, seed)[:, 0] for seed in (20, 21)])
    weights = np.array([((a + b) / 2) ** power for a, b in in_domain.T.tolist()])
    losses = eq.ropaws_loss(
        anchors, targets, in_domain, reweight_power=power, reweight_entropy=reweight_entropy
    )
    expected = oracles.paws_loss(
        anchors.numpy(), targets.numpy(), 0.25, weights, weights if reweight_entropy else None
    )
    close(losses.total, expected)
    close(losses.parts["weight"], np.mean(weights))


PRIOR = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
EVEN = torch.full((4,), 0.25, dtype=torch.float64)


@pytest.mark.parametrize("reweight_entropy", [False, True])
def test_me_max_draws_to_the_class_prior(reweight_entropy):
    anchors = torch.stack([soft_labels(6, 4, seed) for seed in range(3)])
    targets = torch.stack([soft_labels(6, 4, seed) for seed in (10, 11)])
    in_domain = torch.stack([soft_labels(6, 4, seed)[:, 0] for seed in (20, 21)])
    weights = np.array([(a + b) / 2 for a, b in in_domain.T.tolist()])
    sharp = np.concatenate([oracles.sharpen(view.numpy(), 0.25) for view in anchors])
    shares = np.tile(weights if reweight_entropy else np.ones(6), 3)
    mean = (shares[:, None] * sharp).sum(axis=0) / shares.sum()
    losses = eq.ropaws_loss(anchors, targets, in_domain, reweight_entropy=reweight_entropy, class_prior=PRIOR)
    close(losses.parts["mean_entropy"], oracles.closeness(mean, PRIOR.numpy()))
    plain = eq.ropaws_loss(anchors, targets, in_domain, reweight_entropy=reweight_entropy)
    close(losses.parts["consistency"], plain.parts["consistency"])
    even = eq.ropaws_loss(anchors, targets, in_domain, reweight_entropy=reweight_entropy, class_prior=EVEN)
    close(even.total, plain.total)
    part = eq.ropaws_loss(anchors, targets, in_domain, mean=torch.from_numpy(mean), class_prior=PRIOR)
    close(part.parts["mean_entropy"], losses.parts["mean_entropy"])


def test_me_max_of_paws_draws_to_the_class_prior():
    anchors = torch.stack([soft_labels(6, 4, seed) for seed in range(3)])
    targets = torch.stack([soft_labels(6, 4, seed) for seed in (10, 11)])
    mean = np.concatenate([oracles.sharpen(view.numpy(), 0.25) for view in anchors]).mean(axis=0)
    losses = eq.paws_loss(anchors, targets, class_prior=PRIOR)
    close(losses.parts["mean_entropy"], oracles.closeness(mean, PRIOR.numpy()))
    close(eq.paws_loss(anchors, targets, class_prior=EVEN).total, eq.paws_loss(anchors, targets).total)
    close(eq.closeness(PRIOR, PRIOR), math.log(4))  # at its largest
    assert float(eq.closeness(EVEN, PRIOR)) < math.log(4)


def test_a_posterior_of_equal_classes_becomes_that_of_unequal_ones():
    mass = soft_labels(6, 4) * torch.linspace(0.1, 1, 6, dtype=torch.float64)[:, None]
    found = eq.with_class_prior(mass, PRIOR)
    close(found, oracles.with_class_prior(mass.numpy(), PRIOR.numpy()))
    close(found.sum(dim=1), mass.sum(dim=1))  # the in-domain mass stays
    close(eq.with_class_prior(mass, EVEN), mass)


def test_one_hot_labels_may_be_whole_numbers():
    whole = LABELS.long()
    votes = eq.neighbor_weights(QUERIES, SUPPORT, temperature=0.1, label_ratio=5.0)
    for function, arguments in (
        (eq.soft_nn, {}),
        (eq.ropaws_posterior, {}),
        (eq.class_log_density, {"temperature": 0.1}),
    ):
        actual, expected = (function(QUERIES, SUPPORT, labels, **arguments) for labels in (whole, LABELS))
        torch.testing.assert_close(actual, expected)
    close(eq.propagate(*votes, whole), eq.propagate(*votes, LABELS))
    close(eq.propagate(*votes, whole, iterations=3), eq.propagate(*votes, LABELS, iterations=3))


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [LABELS, SOFT], ids=["Eq. 4", "Eq. 6"])
def test_bayes_rule_on_the_densities_is_soft_nn(labels):
    densities = eq.class_log_density(QUERIES, SUPPORT, labels, temperature=0.1)
    expected = eq.soft_nn(QUERIES, SUPPORT, labels, temperature=0.1)
    close(eq.bayes_rule(densities), expected)
    # The same with the marginal of Eq. (3) in the denominator, which the rule of total probability gives.
    marginal = eq.log_density(QUERIES, SUPPORT, temperature=0.1)[:, None]
    close((densities - math.log(3) - marginal).exp(), expected)


def test_bayes_rule_on_the_semi_supervised_densities_is_one_propagation_step():
    probs = soft_labels(7, 3, seed=4)
    densities = eq.semi_class_log_density(
        QUERIES, SUPPORT, SOFT, QUERIES, probs, temperature=0.1, label_ratio=5.0
    )
    votes = eq.neighbor_weights(QUERIES, SUPPORT, temperature=0.1, label_ratio=5.0, self_vote=True)
    close(eq.bayes_rule(densities), eq.propagation_step(*votes, SOFT, probs))


def test_without_unlabeled_neighbors_and_prior_ropaws_is_paws():
    paws = eq.soft_nn(QUERIES, SUPPORT, SOFT, temperature=0.1)
    # A single point that may not vote for itself has no unlabeled neighbor.
    alone = [eq.ropaws_posterior(q[None], SUPPORT, SOFT, prior_temperature=None) for q in QUERIES]
    close(torch.cat([posterior.probs for posterior in alone]), paws)
    close(torch.cat([posterior.in_domain for posterior in alone]), torch.ones(7))
    # The other way to silence them: labels that outweigh them without limit.
    loud = eq.ropaws_posterior(QUERIES, SUPPORT, SOFT, prior_temperature=None, label_ratio=1e12)
    close(loud.probs, paws)


def test_closed_form_is_the_fixed_point_at_a_geometric_rate():
    to_support, to_unlabeled = eq.neighbor_weights(QUERIES, SUPPORT, temperature=0.3, label_ratio=0.5)
    exact = eq.propagate(to_support, to_unlabeled, SOFT)
    close(eq.propagation_step(to_support, to_unlabeled, SOFT, exact), exact)
    close(eq.propagate(to_support, to_unlabeled, SOFT, iterations=500), exact)
    rate = float(to_unlabeled.sum(dim=1).max())
    errors = [
        float((eq.propagate(to_support, to_unlabeled, SOFT, iterations=k) - exact).abs().max())
        for k in range(12)
    ]
    assert rate < 1
    assert all(after <= rate * before * (1 + 1e-9) for before, after in itertools.pairwise(errors))
    assert errors[-1] < errors[0] * rate**11 * (1 + 1e-6)


def test_zero_iterations_know_nothing():
    posterior = eq.ropaws_posterior(QUERIES, SUPPORT, SOFT, iterations=0)
    close(posterior.probs, torch.full((7, 3), 1 / 3))


def test_a_support_is_in_domain():
    close(eq.in_domain_prior(SUPPORT, SUPPORT, temperature=0.01), torch.ones(12))


def test_collapsed_embeddings_predict_uniformly_yet_have_a_gradient():
    """Appendix B: equal embeddings give uniform predictions; a target that is not pulls them apart."""
    point = unit_rows(1, 5)
    queries, support = point.repeat(8, 1).requires_grad_(), point.repeat(9, 1).requires_grad_()
    labels = balanced(9, 3)
    uniform = torch.full((8, 3), 1 / 3)
    close(eq.soft_nn(queries, support, labels), uniform)
    for prior_temperature in (None, 0.1):
        close(
            eq.ropaws_posterior(queries, support, labels, prior_temperature=prior_temperature).probs, uniform
        )
    target = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64).expand(2, 4, 3)
    anchors = eq.soft_nn(queries, support, labels).unflatten(0, (2, 4))
    for losses in (eq.paws_loss(anchors, target), eq.ropaws_loss(anchors, target, torch.ones(2, 4))):
        (gradient,) = torch.autograd.grad(losses.total, support, retain_graph=True)
        # Supports of the favored class are drawn to the point, the others are pushed off it.
        pull = -gradient @ point[0]
        assert (pull[labels[:, 0] == 1] > 0.01).all()
        assert (pull[labels[:, 0] == 0] < -0.01).all()


def test_a_sharpened_target_pulls_a_uniform_prediction_away():
    anchors = torch.full((2, 1, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[[0.4, 0.3, 0.3]], [[0.4, 0.3, 0.3]]], dtype=torch.float64)
    eq.paws_loss(anchors, targets).total.backward()
    towards = -anchors.grad[0, 0]
    assert towards[0] > towards[1]


# --- invariants, on wild inputs -------------------------------------------------------------------


@st.composite
def problems(draw):
    """Points in any position (repeated, opposite, clustered), any temperatures and ratios."""
    u, s, c, d = (draw(st.integers(1, high)) for high in (6, 7, 4, 4))
    seed = draw(st.integers(0, 10_000))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    queries, support = unit_rows(u, d, seed, dtype), unit_rows(s, d, seed + 1, dtype)
    match draw(st.sampled_from(["random", "identical", "opposite", "on the support"])):
        case "identical":
            queries, support = queries[:1].expand(u, d), queries[:1].expand(s, d)
        case "opposite":
            queries, support = queries[:1].expand(u, d), -queries[:1].expand(s, d)
        case "on the support":
            queries = support[torch.arange(u) % s]
    labels = balanced(s, c, dtype)  # with s < c, some classes have no mass
    return queries, support, labels


temperatures = st.sampled_from([0.01, 0.02, 0.1, 1.0, 3.0])
ratios = st.sampled_from([1e-3, 0.1, 1.0, 5.0, 1e3])


@settings(deadline=None, max_examples=200)
@given(problems(), temperatures, st.one_of(st.none(), temperatures), ratios, st.booleans())
def test_posterior_is_a_distribution_everywhere(problem, temperature, prior_temperature, ratio, self_vote):
    queries, support, labels = problem
    posterior = eq.ropaws_posterior(
        queries,
        support,
        labels,
        temperature=temperature,
        prior_temperature=prior_temperature,
        label_ratio=ratio,
        self_vote=self_vote,
    )
    close(posterior.probs.sum(dim=1), torch.ones(len(queries)), rtol=0, atol=1e-5)
    assert (posterior.probs >= 0).all()
    assert (posterior.in_domain > 0).all()
    assert (posterior.in_domain <= 1).all()


@settings(deadline=None, max_examples=200)
@given(problems(), temperatures, ratios)
def test_values_and_gradients_are_finite_everywhere(problem, temperature, ratio):
    queries, support, labels = problem
    queries, support = queries.clone().requires_grad_(), support.clone().requires_grad_()
    anchors = eq.soft_nn(queries, support, labels, temperature=temperature)[None].expand(2, -1, -1)
    with torch.no_grad():
        posterior = eq.ropaws_posterior(queries, support, labels, temperature=temperature, label_ratio=ratio)
    targets = posterior.probs[None].expand(2, -1, -1)
    values = [
        eq.paws_loss(anchors, anchors).total,
        eq.ropaws_loss(anchors, targets, posterior.in_domain[None].expand(2, -1)).total,
        eq.sharpen(anchors, temperature=0.01).square().sum(),
        eq.in_domain_prior(queries, support, temperature=temperature).sum(),
        eq.log_density(queries, support, temperature=temperature).sum(),
        eq.class_log_density(queries, support, labels, temperature=temperature).sum(),
        eq.ropaws_posterior(queries, support, labels, temperature=temperature, label_ratio=ratio).probs[0, 0],
    ]
    for value in values:
        assert value.isfinite()
        for gradient in torch.autograd.grad(value, [queries, support], retain_graph=True, allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(0, 1000))
def test_the_order_of_points_does_not_matter(problem, seed):
    queries, support, labels = (x.double() for x in problem)
    random = torch.Generator().manual_seed(seed)
    rows, others = (
        torch.randperm(len(queries), generator=random),
        torch.randperm(len(support), generator=random),
    )
    original = eq.ropaws_posterior(queries, support, labels, temperature=0.2)
    moved = eq.ropaws_posterior(queries[rows], support[others], labels[others], temperature=0.2)
    close(moved.probs, original.probs[rows])
    close(moved.in_domain, original.in_domain[rows])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda p: sum(p) > 1e-3),
    st.floats(0.01, 1.0),
)
def test_sharpening_keeps_the_arg_max(values, temperature):
    probs = torch.tensor([values], dtype=torch.float64)
    probs /= probs.sum()
    sharp = eq.sharpen(probs, temperature=temperature)
    close(sharp.sum(), 1.0)
    assert sharp[0, probs.argmax()] == sharp.max()
    assert sharp.max() >= probs.max() - 1e-9


def test_half_precision_is_computed_in_float32():
    support, labels = SUPPORT.bfloat16(), SOFT.bfloat16()
    exact = eq.ropaws_posterior(QUERIES.bfloat16().float(), support.float(), labels.float())
    half = eq.ropaws_posterior(QUERIES.bfloat16(), support, labels)
    assert half.probs.dtype == torch.float32
    close(half.probs, exact.probs, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = eq.ropaws_posterior(QUERIES.float(), SUPPORT.float(), SOFT.float())
    close(
        inside.probs,
        eq.ropaws_posterior(QUERIES.float(), SUPPORT.float(), SOFT.float()).probs,
        rtol=0,
        atol=0,
    )


def test_cross_entropy_is_finite_where_a_prediction_is_zero():
    probs = torch.tensor([0.0, 1.0], requires_grad=True)
    loss = eq.cross_entropy(torch.tensor([0.0, 1.0]), probs) + eq.cross_entropy(
        torch.tensor([1.0, 0.0]), probs
    )
    loss.backward()
    assert loss.isfinite()
    assert probs.grad.isfinite().all()


def test_entropy_is_finite_where_every_weight_vanishes():
    anchors = torch.stack([soft_labels(4, 3, seed).float() for seed in range(2)]).requires_grad_()
    nowhere = torch.full((2, 4), 1e-30)
    losses = eq.ropaws_loss(anchors, anchors.detach(), nowhere, reweight_power=2.0, reweight_entropy=True)
    losses.total.backward()
    assert losses.total.isfinite()
    assert anchors.grad.isfinite().all()


def test_targets_and_weights_get_no_gradient():
    anchors = torch.stack([soft_labels(4, 3, seed) for seed in range(2)])
    targets = torch.stack([soft_labels(4, 3, seed) for seed in (5, 6)]).requires_grad_()
    in_domain = torch.full((2, 4), 0.5, dtype=torch.float64, requires_grad=True)
    eq.ropaws_loss(anchors.requires_grad_(), targets, in_domain).total.backward()
    assert targets.grad is None
    assert in_domain.grad is None


# --- the file itself ------------------------------------------------------------------------------


def test_every_equation_is_tagged_once_and_in_order():
    source = inspect.getsource(eq).split("ICLR 2023")[1].split('"""', 1)[1]  # without the header's example
    numbers = [int(n) for n in re.findall(r"\[Eq\. \((\d+)\)\]", source)]
    assert sorted(numbers) == list(range(1, 15))
    leading = [
        int(tags[0])
        for _, function in inspect.getmembers(eq, inspect.isfunction)
        if (tags := re.findall(r"\[Eq\. \((\d+)\)\]", function.__doc__ or ""))
    ]
    assert len(leading) == 12  # (6) shares a function with (4), (7) with (5)
    in_file = [n for n in numbers if n in leading]
    assert in_file == sorted(in_file)
    for tag in ("[Appendix C.1, sharpening]", "[Appendix A, propagation]", "[Appendix A, completion]"):
        assert source.count(tag) == 1


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: eq.soft_nn(QUERIES, SUPPORT, LABELS, temperature=0), "temperature must be a positive"),
        (
            lambda: eq.soft_nn(QUERIES, SUPPORT, LABELS, temperature=math.nan),
            "temperature must be a positive",
        ),
        (lambda: eq.soft_nn(QUERIES, SUPPORT, LABELS[:5]), "5 rows for 12 supports"),
        (lambda: eq.soft_nn(QUERIES, SUPPORT, torch.zeros(12)), "labels must be a matrix"),
        (lambda: eq.soft_nn(QUERIES[:, :3], SUPPORT, LABELS), "3 and 5 dimensions"),
        (lambda: eq.soft_nn(QUERIES[0], SUPPORT, LABELS), "queries must be a matrix"),
        (lambda: eq.soft_nn(QUERIES, SUPPORT[:0], LABELS[:0]), "support must be a matrix"),
        (lambda: eq.sharpen(SOFT, temperature=-1), "temperature must be a positive"),
        (lambda: eq.mean_entropy(SOFT[0]), "probs must be a matrix"),
        (lambda: eq.closeness(SOFT[0], PRIOR), "class_prior must have one value per class, 3"),
        (lambda: eq.with_class_prior(SOFT, PRIOR), "class_prior must have one value per class, 3"),
        (lambda: eq.log_density(QUERIES, SUPPORT, temperature=0), "temperature"),
        (lambda: eq.in_domain_prior(QUERIES, SUPPORT, temperature=-0.1), "temperature"),
        (lambda: eq.ropaws_posterior(QUERIES, SUPPORT, LABELS, label_ratio=0), "label_ratio"),
        (lambda: eq.ropaws_posterior(QUERIES, SUPPORT, LABELS, prior_temperature=0), "temperature"),
        (lambda: eq.ropaws_posterior(QUERIES, SUPPORT, LABELS, iterations=-1), "iterations must be"),
        (
            lambda: eq.propagate(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 2)),
            "to_unlabeled must have",
        ),
        (lambda: eq.propagate(torch.ones(3, 2), torch.ones(3, 3), torch.ones(3, 2)), "one row per column"),
        (lambda: eq.paws_loss(torch.ones(1, 4, 3), torch.ones(2, 4, 3)), "anchors must have shape"),
        (lambda: eq.paws_loss(torch.ones(2, 4, 3), torch.ones(3, 4, 3)), "targets must have shape"),
        (
            lambda: eq.ropaws_loss(torch.ones(2, 4, 3), torch.ones(2, 4, 3), torch.ones(4)),
            "in_domain must have",
        ),
        (
            lambda: eq.ropaws_loss(
                torch.ones(2, 4, 3), torch.ones(2, 4, 3), torch.ones(2, 4), reweight_power=-1
            ),
            "reweight_power",
        ),
        (
            lambda: eq.semi_class_log_density(
                QUERIES, SUPPORT, LABELS, QUERIES, SOFT, temperature=0.1, label_ratio=1.0
            ),
            "probs must have shape",
        ),
    ],
)
def test_wrong_shapes_and_ranges_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def some_votes(seed=0, u=12, s=9, c=3):
    random = torch.Generator().manual_seed(seed)
    queries, support = (
        torch.nn.functional.normalize(torch.randn(n, 5, generator=random, dtype=torch.float64), dim=1)
        for n in (u, s)
    )
    labels = torch.nn.functional.one_hot(torch.arange(s) % c, c).double()
    weights = eq.neighbor_weights(queries, support, temperature=0.3, label_ratio=2.0)
    return queries, support, labels, weights


def test_the_iteration_stops_within_its_stated_error_of_the_closed_form():
    *_, labels, (to_support, to_unlabeled) = some_votes()
    exact = eq.propagate(to_support, to_unlabeled, labels)
    rho = float(to_unlabeled.sum(dim=1).max())
    errors = []
    for tolerance in (1e-2, 1e-4, 1e-8):
        found, movement = eq.propagate_until(to_support, to_unlabeled, labels, tolerance=tolerance)
        assert float(movement) <= tolerance
        errors.append(float((found - exact).abs().max()))
        assert errors[-1] <= float(movement) * rho / (1 - rho) + 1e-12
    assert errors[0] > errors[1] > errors[2]
    short, movement = eq.propagate_until(to_support, to_unlabeled, labels, tolerance=1e-12, most=2)
    close(
        short, eq.propagate(to_support, to_unlabeled, labels, iterations=3)
    )  # it starts at S p, the first step
    assert float(movement) > 1e-12
    with pytest.raises(ValueError, match="tolerance must be a positive"):
        eq.propagate_until(to_support, to_unlabeled, labels, tolerance=0.0)


@pytest.mark.parametrize("self_vote", [False, True])
def test_votes_of_some_rows_are_rows_of_all_votes(self_vote):
    queries, support, *_ = some_votes()
    settings = {"temperature": 0.3, "label_ratio": 2.0, "self_vote": self_vote}
    whole = eq.neighbor_weights(queries, support, **settings)
    for rows in (slice(0, 5), slice(5, 12), slice(3, 4)):
        part = eq.neighbor_weights(queries, support, rows=rows, **settings)
        for mine, all_of_them in zip(part, whole, strict=True):
            close(mine, all_of_them[rows])


def test_a_batch_in_parts_has_the_mean_prediction_of_the_whole():
    random = torch.Generator().manual_seed(0)
    anchors = torch.rand(4, 10, 3, generator=random, dtype=torch.float64).softmax(dim=2)
    targets = torch.rand(2, 10, 3, generator=random, dtype=torch.float64).softmax(dim=2)
    in_domain = torch.rand(2, 10, generator=random, dtype=torch.float64)
    for power, entropy in ((0.0, False), (1.5, True)):
        weights = eq.sample_weights(in_domain, power=power) if entropy else None
        parts = [
            eq.prediction_sum(anchors[:, rows], None if weights is None else weights[rows])
            for rows in (slice(0, 3), slice(3, 10))
        ]
        mean = sum(total for total, _ in parts) / sum(weight for _, weight in parts)
        whole = eq.ropaws_loss(anchors, targets, in_domain, reweight_power=power, reweight_entropy=entropy)
        given = eq.ropaws_loss(
            anchors, targets, in_domain, reweight_power=power, reweight_entropy=entropy, mean=mean
        )
        close(given.total, whole.total)
    mean = torch.stack([total for total, _ in [eq.prediction_sum(anchors)]])[0] / 40
    close(eq.paws_loss(anchors, targets, mean=mean).total, eq.paws_loss(anchors, targets).total)
