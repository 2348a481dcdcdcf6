"""RealMix and its MixUp: draws, the order of rows, masks, the loss."""

from dataclasses import replace

import pytest
import torch

from ropaws.methods.realmix import (
    Draw,
    RealMix,
    annealing_mask,
    confidence_mask,
    mix,
    mixed_batch,
    mixup_draw,
    steady_order,
)
from tests import oracles
from tests.methods.one_step import CLASSES, make_batch, make_model, touched
from tests.methods.test_ds3l import image_batch

ROLES = ("weak1", "weak2")


def model_and_batch(method, **batch):
    model = make_model(method, scale=1.5)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def test_draws_are_a_function_of_the_step():
    draw = mixup_draw(2000, 3, 0.75)
    assert torch.equal(draw.shares, mixup_draw(2000, 3, 0.75).shares)
    assert not torch.equal(draw.partners, mixup_draw(2000, 4, 0.75).partners)
    assert draw.partners.sort().values.tolist() == list(range(2000))
    assert 0.5 <= draw.shares.min() < 0.52
    torch.manual_seed(0)
    sample = torch.distributions.Beta(0.75, 0.75).sample((20_000,))
    expected = torch.maximum(sample, 1 - sample).mean().item()
    assert draw.shares.mean().item() == pytest.approx(expected, abs=0.02)


def test_rows_are_mixed_with_their_partners():
    rows, partners, shares = [[1.0, 2.0], [3.0, 5.0], [0.0, -1.0]], [2, 1, 0], [0.5, 0.7, 0.9]
    found = mix(torch.tensor(rows), Draw(torch.tensor(partners), torch.tensor(shares)))
    assert found.tolist() == [pytest.approx(row) for row in oracles.mixed_rows(rows, partners, shares)]


def test_the_order_of_labeled_rows_does_not_depend_on_how_they_come():
    """Four views of three images, two of which are mirror images of each other."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 9, (12, 3, 4, 4), generator=random).float()
    images[5] = images[1].flip(-1)
    identity = torch.tensor([7, 2, 7, 4, 4, 2, 2, 4, 7, 7, 2, 4])
    shuffled = torch.arange(12).flip(0)
    first = images[steady_order(images, identity)]
    second = images[shuffled][steady_order(images[shuffled], identity[shuffled])]
    assert torch.equal(first, second)
    assert identity[steady_order(images, identity)].tolist() == [2] * 4 + [4] * 4 + [7] * 4


def test_labels_are_mixed_as_the_rows_are():
    """Rows that say their label: after mixing they still do."""
    _, batch = model_and_batch(RealMix())
    guess = torch.rand(10, CLASSES, dtype=torch.float64).softmax(dim=1)
    labeled = batch.labeled._replace(images=batch.labeled.labels)
    mixed = mixed_batch(labeled, (guess, guess), guess, seed=4, alpha=0.75)
    torch.testing.assert_close(mixed.labeled, mixed.labels)
    for view, label in zip(mixed.unlabeled, mixed.guesses, strict=True):
        torch.testing.assert_close(view, label)
        torch.testing.assert_close(label.sum(dim=1), torch.ones(10).double())
    assert not torch.equal(mixed.guesses[0], mixed.guesses[1])  # each view has its own partner


def test_masks():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.2, 0.0]])
    assert annealing_mask(probs, labels, 0.4).tolist() == [0, 0]
    assert annealing_mask(probs, labels, 0.6).tolist() == [1, 1]  # 0.5 < 0.6 and 0.1 < 0.12
    confidence = torch.tensor([0.9, 0.4, 0.6, 0.8])
    assert confidence_mask(confidence, 0.5).tolist() == [1, 0, 0, 0]  # above the third of four
    assert confidence_mask(confidence, 0.0).tolist() == [1, 1, 1, 1]
    assert not confidence_mask(torch.full((4,), 0.5), 0.5).any()


@pytest.mark.parametrize("annealing", ["none", "linear"])
def test_the_loss(annealing):
    method = RealMix(outliers=0.3, unlabeled_weight=4.0, ramp=0.8, annealing=annealing)
    model, batch = model_and_batch(method, step=1)
    head = model.network.heads["classes"]
    with torch.no_grad():
        said = [[oracles.softmax(row) for row in head(batch.views[role]).tolist()] for role in ROLES]
    means = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in zip(*said, strict=True)]
    guesses = []
    for row in means:
        powers = [p**2 for p in row]
        guesses.append([p / sum(powers) for p in powers])
    order = steady_order(batch.labeled.images, batch.labeled.identity)
    rows = torch.cat([batch.labeled.images[order], *(batch.views[role] for role in ROLES)]).tolist()
    labels = [*batch.labeled.labels[order].tolist(), *guesses, *guesses]
    partners, shares = (part.tolist() for part in mixup_draw(26, batch.seed, 0.75))
    mixed, soft = (oracles.mixed_rows(values, partners, shares) for values in (rows, labels))
    with torch.no_grad():
        logits = head(torch.tensor(mixed, dtype=torch.float64)).tolist()
    eta = 1 / 3 + 0.1 * 2 / 3 if annealing == "linear" else 1e9
    known = oracles.realmix_labeled(soft[:6], logits[:6], eta)
    if annealing == "linear":
        assert known != oracles.realmix_labeled(soft[:6], logits[:6], 1e9)  # some row is left out
    distance, kept = oracles.realmix_unlabeled(soft[6:], logits[6:], 0.3)
    losses = method.step(model, batch)
    assert losses.parts["cross_entropy"].item() == pytest.approx(known, abs=1e-10)
    assert losses.total.item() == pytest.approx(known + 4 / 8 * distance, abs=1e-10)
    assert losses.selected.tolist() == [(a + b) / 2 for a, b in zip(kept[:10], kept[10:], strict=True)]


def test_nothing_flows_back_through_the_guesses():
    method = RealMix(outliers=0.0)
    model, batch = model_and_batch(method)
    mixed = mixed_batch(
        batch.labeled,
        tuple(batch.views.values()),
        method.guess(model.network, tuple(batch.views.values())),
        seed=batch.seed,
        alpha=0.75,
    )
    losses = method.step(model, batch)
    losses.total.backward()
    head = make_model(method, scale=1.5).network.heads["classes"]
    probs = torch.cat([head(view) for view in mixed.unlabeled]).softmax(dim=1)
    assert not mixed.guesses[0].requires_grad
    distance = (probs - torch.cat(mixed.guesses)).square().mean()
    known = method.labeled_loss(head(mixed.labeled), mixed.labels, batch)
    (known + 75 * distance).backward()
    torch.testing.assert_close(model.network.heads["classes"].weight.grad, head.weight.grad)
    assert touched(model) == {"network.heads.classes.weight", "network.heads.classes.bias"}


def test_batch_norm_remembers_the_mixed_batch_alone():
    method = RealMix()
    model, other, batch = make_model(method), make_model(method), image_batch()
    views = tuple(batch.views.values())
    before = other.network.encoder.backbone.norm.running_mean.clone()
    guess = method.guess(other.network, views)
    assert torch.equal(other.network.encoder.backbone.norm.running_mean, before)
    mixed = mixed_batch(batch.labeled, views, guess, seed=batch.seed, alpha=0.75)
    other.network.features(mixed.labeled, *mixed.unlabeled)
    method.step(model, batch)
    for (name, found), expected in zip(model.named_buffers(), other.buffers(), strict=True):
        if "num_batches" not in name:
            torch.testing.assert_close(found, expected, msg=name)


def test_all_labeled_rows_learned_and_no_row_kept():
    """Annealing leaves no labeled row at the start; equal confidences leave no unlabeled one."""
    method = RealMix()
    model, batch = model_and_batch(method, step=0)
    with torch.no_grad():
        for weight in model.network.heads.parameters():
            weight.zero_()
    losses = method.step(model, batch)
    losses.total.backward()
    assert not losses.selected.any()
    assert losses.parts["consistency"] == 0
    assert torch.isfinite(losses.total)


def test_settings_out_of_range_are_refused():
    for name in ("outliers", "ramp"):
        with pytest.raises(ValueError, match=f"method.{name} must be at least 0 and below 1, got 1.0"):
            replace(RealMix(), **{name: 1.0})
    for name in ("mixup", "temperature"):
        with pytest.raises(ValueError, match=f"method.{name} must be positive"):
            replace(RealMix(), **{name: 0.0})
    with pytest.raises(ValueError, match="unlabeled_weight must be at least 0"):
        RealMix(unlabeled_weight=-1.0)
    with pytest.raises(ValueError, match="annealing must be one of none, linear, exp, log, got cosine"):
        RealMix(annealing="cosine")
