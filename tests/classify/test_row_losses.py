"""Losses of rows, and means over rows that are shared out among processes."""

import torch

from ropaws.core.distributed import Rank
from ropaws.methods import classifier as row_losses
from ropaws.methods.classifier import kept_mean, kl_divergence
from tests import oracles


def test_divergence_of_rows_and_its_gradient():
    random = torch.Generator().manual_seed(0)
    target, logits = torch.randn(2, 4, 3, generator=random, dtype=torch.float64)
    target.requires_grad_()
    logits.requires_grad_()
    found = kl_divergence(target, logits)
    rows = zip(target.tolist(), logits.tolist(), strict=True)
    expected = [oracles.divergence(oracles.softmax(t), oracles.softmax(row)) for t, row in rows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    found.sum().backward()
    assert target.grad is None
    torch.testing.assert_close(logits.grad, (logits.softmax(dim=1) - target.softmax(dim=1)).detach())
    assert not kl_divergence(logits, logits).any()


def test_divergence_of_sure_targets_is_finite():
    sure = torch.tensor([[0.0, 1000.0, 0.0]])
    torch.testing.assert_close(kl_divergence(sure, torch.zeros(1, 3)), torch.tensor([3.0]).log())


def test_mean_over_kept_rows():
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    assert kept_mean(values, torch.tensor([1.0, 0.0, 1.0])).item() == 2.5
    nothing = kept_mean(values, torch.zeros(3))
    assert nothing.item() == 0
    nothing.backward()
    assert values.grad.tolist() == [0, 0, 0]


def test_processes_weigh_every_kept_row_alike(monkeypatch):
    """Three rows are kept in the first process, none in the second: the mean of both is that of all."""
    parts = [(torch.tensor([1.0, 2.0, 6.0]), torch.ones(3)), (torch.tensor([9.0]), torch.zeros(1))]
    kept = sum(mask.sum() for _, mask in parts)
    monkeypatch.setattr(row_losses, "place", lambda: Rank(0, 2))
    monkeypatch.setattr(row_losses, "sum_constants", lambda value: kept.clone())
    found = [float(kept_mean(values, mask)) for values, mask in parts]
    assert sum(found) / 2 == 3
