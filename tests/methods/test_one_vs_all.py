"""One-vs-all detectors against loops over rows and classes."""

import math

import numpy as np
import pytest
import torch

from ropaws.methods.openmatch import (
    decision_distance,
    decision_entropy,
    inside_probs,
    one_vs_all_head,
    one_vs_all_loss,
)
from tests import oracles

ROWS, CLASSES = 7, 4


def scores(seed=0):
    random = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(ROWS, 2 * CLASSES, generator=random, dtype=torch.float64)


def test_probabilities_loss_entropy_and_distance():
    one, other = scores(), scores(1)
    classes = torch.tensor([0, 1, 2, 3, 3, 0, 2])
    expected = [oracles.one_vs_all(row) for row in one.tolist()]
    np.testing.assert_allclose(inside_probs(one), expected)
    expected = [
        oracles.one_vs_all_loss(row, y) for row, y in zip(one.tolist(), classes.tolist(), strict=True)
    ]
    np.testing.assert_allclose(one_vs_all_loss(one, classes), expected)
    expected = [oracles.one_vs_all_entropy(row) for row in one.tolist()]
    np.testing.assert_allclose(decision_entropy(one), expected)
    expected = [oracles.one_vs_all_distance(a, b) for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    np.testing.assert_allclose(decision_distance(one, other), expected)


def test_only_the_own_class_and_the_hardest_other_get_a_gradient():
    """Scores: "not in class k" of all classes, then "in class k" of all."""
    row = torch.tensor([[0.0, 0, 0, 0, 1, 2, 0.5, -1]], requires_grad=True)
    one_vs_all_loss(row, torch.tensor([1])).sum().backward()
    assert row.grad.squeeze().nonzero().squeeze(1).tolist() == [0, 1, 4, 5]  # class 1, and class 0 against it
    assert row.grad[0, 5] < 0 < row.grad[0, 4]


def test_one_class_alone_has_no_negative():
    loss = one_vs_all_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    assert float(loss) == pytest.approx(math.log(2))


def test_very_sure_scores_stay_finite():
    sure = torch.tensor([[200.0, -200, -200, 200]], requires_grad=True)
    total = one_vs_all_loss(sure, torch.tensor([0])).sum() + decision_entropy(sure).sum()
    assert float(total.detach()) == pytest.approx(800)
    total.backward()
    assert torch.isfinite(sure.grad).all()


def test_the_head_has_two_outputs_for_each_class_and_no_bias():
    head = one_vs_all_head(5, CLASSES)
    assert head.weight.shape == (2 * CLASSES, 5)
    assert head.bias is None
