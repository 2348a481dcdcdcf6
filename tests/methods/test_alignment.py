"""Distribution alignment."""

import copy

import numpy as np
import torch

from ropaws.methods.iomatch import Alignment, aligned
from tests import oracles

CLASSES = 3


def batch(seed, *, towards=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, CLASSES, generator=random, dtype=torch.float64)
    logits[:, towards] += 2
    return logits.softmax(dim=1)


def test_the_mean_is_over_the_last_batches_also_before_there_are_enough():
    alignment = Alignment(CLASSES, length=3).double()
    batches = [batch(seed, towards=seed % 3) for seed in range(8)]
    for count, probs in enumerate(batches, start=1):
        found = alignment(probs)
        expected = oracles.aligned(probs.numpy(), [b.numpy() for b in batches[max(0, count - 3) : count]])
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        torch.testing.assert_close(found.sum(dim=1), torch.ones(6, dtype=torch.float64))


def test_a_class_that_is_named_too_often_loses():
    probs = torch.tensor([[0.6, 0.4]])
    assert aligned(probs, torch.tensor([0.9, 0.1])).argmax() == 1
    torch.testing.assert_close(aligned(probs, torch.tensor([0.5, 0.5])), probs)
    assert torch.isfinite(aligned(probs, torch.tensor([1.0, 0.0]))).all()


def test_nothing_flows_back_and_the_state_can_be_copied_and_saved():
    alignment = Alignment(CLASSES, length=2)
    assert not alignment(batch(0).float().requires_grad_()).requires_grad
    other = copy.deepcopy(alignment)
    assert torch.equal(other(batch(1).float()), alignment(batch(1).float()))
    third = Alignment(CLASSES, length=2)
    third.load_state_dict(alignment.state_dict())
    assert torch.equal(third(batch(2).float()), alignment(batch(2).float()))
