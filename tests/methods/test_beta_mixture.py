"""The mixture of two Beta distributions: densities, moments, what belongs where."""

import math

import pytest
import torch

from ropaws.methods.prosub import BetaMixture, beta_density, beta_of_moments, inside_probability
from tests import oracles

SCORES = torch.tensor([0.05, 0.2, 0.31, 0.5, 0.77, 0.9, 0.95], dtype=torch.float64)
WEIGHTS = torch.tensor([0.1, 0.9, 0.4, 0.0, 1.0, 1.0, 0.3], dtype=torch.float64)


def test_densities_and_moments():
    found = beta_density(SCORES, torch.tensor([3.5, 0.8], dtype=torch.float64))
    assert found.tolist() == pytest.approx([oracles.beta_density(x, 3.5, 0.8) for x in SCORES.tolist()])
    expected = oracles.beta_of_moments(SCORES.tolist(), WEIGHTS.tolist())
    assert beta_of_moments(SCORES, WEIGHTS).tolist() == pytest.approx(expected)


def test_the_moments_of_a_sample_give_its_distribution_back():
    torch.manual_seed(0)
    sample = torch.distributions.Beta(6.0, 3.0).sample((50_000,)).double()
    assert beta_of_moments(sample, torch.ones_like(sample)).tolist() == pytest.approx([6, 3], rel=0.03)


def test_moments_of_nothing_and_of_a_single_value():
    assert beta_of_moments(SCORES, torch.zeros_like(SCORES)).tolist() == [1, 1]
    for value in (0.0, 0.4, 1.0):
        shape = beta_of_moments(torch.full((3,), value).double(), torch.ones(3).double())
        assert torch.isfinite(shape).all()
        assert (shape > 0).all()


def test_doubt_keeps_what_is_unlikely_anyway_small():
    inside, outside = torch.tensor([[30.0, 2.0], [2.0, 30.0]], dtype=torch.float64)
    plain = inside_probability(SCORES, inside, outside, prior=0.3)
    expected = []
    for x in SCORES.tolist():
        known = 0.3 * oracles.beta_density(x, 30, 2)
        expected.append(known / (known + 0.7 * oracles.beta_density(x, 2, 30) + 1e-8))
    assert plain.tolist() == pytest.approx(expected, abs=1e-6)
    doubtful = inside_probability(SCORES, inside, outside, prior=0.3, doubt=0.1)
    assert (doubtful < plain).all()
    middle = SCORES.tolist().index(0.77)  # far from both
    assert plain[middle] > 0.99
    assert doubtful[middle] < 0.6


def test_an_update_moves_towards_the_weighted_moments():
    mixture = BetaMixture(0.4).double()
    labeled = torch.tensor([0.8, 0.85, 0.99], dtype=torch.float64)
    probs = mixture(SCORES).tolist()
    inside = oracles.beta_of_moments([*labeled.tolist(), *SCORES.tolist()], [1, 1, 1, *probs])
    outside = oracles.beta_of_moments(SCORES.tolist(), [1 - p for p in probs])
    mixture.update(labeled, SCORES, 0.75)
    assert mixture.inside.tolist() == pytest.approx(
        [0.75 * a + 0.25 * b for a, b in zip((10, 2), inside, strict=True)]
    )
    assert mixture.outside.tolist() == pytest.approx(
        [0.75 * a + 0.25 * b for a, b in zip((2, 10), outside, strict=True)]
    )


def test_a_narrow_distribution_keeps_its_digits_in_float32():
    mixture = BetaMixture(0.5)
    mixture.inside.copy_(torch.tensor([180_000.0, 20_000.0]))  # 0.9, within a thousandth
    mixture.outside.copy_(torch.tensor([170_000.0, 30_000.0]))
    found = mixture(torch.tensor([0.9, 0.85, 0.875]), doubt=0.1)
    assert found[0] > 0.99
    assert found[1] < 0.01
    assert 0 <= found[2] < 0.01  # in between, where neither density is large
    x, a, b = 0.8975, 180_000, 20_000  # where the density is about as large as the doubt
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    density = math.exp(scale + (a - 1) * math.log(x) + (b - 1) * math.log(1 - x))
    assert 0.1 < density < 10
    found = mixture(torch.tensor([x], dtype=torch.float64), doubt=0.1)
    assert found.item() == pytest.approx(0.5 * density / (0.5 * density + 0.1), rel=1e-6)
