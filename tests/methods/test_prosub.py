"""ProSub: subspace score, the loss with its draw, statistics, predictions."""

from dataclasses import replace

import pytest
import torch

from ropaws.methods.prosub import ProSub, averaged_prototypes, id_draw, subspace_basis, subspace_scores
from tests import oracles
from tests.methods.one_step import CLASSES, make_batch, make_model, touched

ROLES = ("weak", "strong")


def model_and_batch(method, **batch):
    """A model that has seen the classes; features are taken as they are."""
    model = make_model(method, scale=1.5)
    batch = make_batch(ROLES, dims=model.encoder.feature_dims, **batch)
    torch.manual_seed(3)
    model.prototypes.normal_()
    model.mixture.inside.copy_(torch.tensor([4.0, 3.0]))
    model.mixture.outside.copy_(torch.tensor([3.0, 4.0]))
    return model, batch


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_score_is_the_cosine_with_the_nearest_point_of_the_subspace():
    prototypes, features = random(3, 7), random(7, 7)
    found = subspace_scores(features, subspace_basis(prototypes))
    expected = [oracles.subspace_score(row, prototypes.numpy()) for row in features.numpy()]
    assert found.tolist() == pytest.approx(expected)
    inside = subspace_scores(torch.rand(4, 3).double() @ prototypes, subspace_basis(prototypes))
    assert inside.tolist() == pytest.approx([1] * 4)


def test_prototypes_that_do_not_exist_yet_span_nothing():
    prototypes, features = random(3, 7), random(5, 7)
    prototypes[1] = 0
    found = subspace_scores(features, subspace_basis(prototypes))
    torch.testing.assert_close(found, subspace_scores(features, subspace_basis(prototypes[[0, 2]])))
    assert not subspace_scores(features, subspace_basis(torch.zeros(3, 7).double())).any()


def test_prototypes_follow_the_classes_that_are_there():
    prototypes, features = random(3, 4), random(5, 4) + 2
    found = averaged_prototypes(prototypes, features, torch.tensor([0, 2, 2, 0, 2]), 0.9)
    torch.testing.assert_close(found[0], 0.9 * prototypes[0] + 0.1 * features[[0, 3]].mean(dim=0))
    torch.testing.assert_close(found[2], 0.9 * prototypes[2] + 0.1 * features[[1, 2, 4]].mean(dim=0))
    assert torch.equal(found[1], prototypes[1])


def test_the_draw_is_a_function_of_the_step_with_the_right_share():
    probs = torch.tensor([0.0, 0.2, 0.9, 1.0]).repeat_interleave(1000)
    drawn = id_draw(probs, 7)
    assert torch.equal(drawn, id_draw(probs, 7))
    assert not torch.equal(drawn, id_draw(probs, 8))
    shares = drawn.view(4, 1000).mean(dim=1)
    assert shares.tolist() == pytest.approx([0, 0.2, 0.9, 1], abs=0.04)


def test_the_loss():
    method = ProSub(confidence=0.55, pseudo_weight=0.7, subspace_weight=0.5, self_weight=3.0)
    model, batch = model_and_batch(method, unlabeled=16)
    heads, prototypes = model.network.heads, model.prototypes.clone().numpy()
    rows = {role: view.numpy() for role, view in batch.views.items()}
    with torch.no_grad():
        labeled = heads["classes"](batch.labeled.images).tolist()
        weak, strong = (heads["classes"](batch.views[role]).tolist() for role in ROLES)
        projected = heads["self"](batch.views["strong"]).numpy()
    scores = [oracles.subspace_score(row, prototypes) for row in rows["weak"]]
    uniform = torch.rand(16, generator=torch.Generator().manual_seed(batch.seed)).tolist()
    inside = []
    for x, drawn in zip(scores, uniform, strict=True):
        known, other = 0.5 * oracles.beta_density(x, 4, 3), 0.5 * oracles.beta_density(x, 3, 4)
        inside.append(drawn <= known / (known + other + 0.1))
    pseudo, subspace, learned = oracles.prosub_unlabeled(weak, strong, scores, inside, 0.55)
    assert 0 < sum(learned) < sum(inside) < 16
    own = sum(1 - oracles.cosine(a, b) for a, b in zip(projected, rows["weak"], strict=True)) / 16
    known = oracles.labeled_loss(labeled, batch.labeled.classes.tolist())
    losses = method.step(model, batch)
    assert losses.selected.tolist() == learned
    expected = known + 0.7 * pseudo + 0.5 * subspace + 3 * own
    assert losses.total.item() == pytest.approx(expected, abs=1e-10)


def test_statistics_follow_the_batch_after_it_was_judged_by_the_old_ones():
    method = ProSub(statistics=0.6)
    model, batch = model_and_batch(method, step=100)  # the decay is past its warm-up
    before = model.prototypes.clone()
    shown = batch.labeled.images.numpy()
    labeled = torch.tensor([oracles.subspace_score(row, before.numpy()) for row in shown])
    pool = torch.tensor([oracles.subspace_score(row, before.numpy()) for row in batch.views["weak"].numpy()])
    expected = make_model(method).mixture
    expected.load_state_dict(model.mixture.state_dict())
    expected.update(labeled, pool, 0.6)
    method.step(model, batch)
    torch.testing.assert_close(model.mixture.inside, expected.inside)
    torch.testing.assert_close(model.mixture.outside, expected.outside)
    moved = averaged_prototypes(before, batch.labeled.images, batch.labeled.classes, 0.6)
    torch.testing.assert_close(model.prototypes, moved)


def test_pretraining_has_neither_pseudo_labels_nor_subspace():
    method = ProSub(pretraining=0.6, confidence=0.1)
    model, batch = model_and_batch(method, step=5)
    losses = method.step(model, batch)
    parts = losses.parts
    assert losses.total.item() == pytest.approx(float(parts["cross_entropy"] + 10 * parts["self_supervised"]))
    assert not losses.selected.any()
    assert model_and_batch(method)[0].prototypes.ne(model.prototypes).any()  # statistics are learned
    started = method.step(*model_and_batch(method, step=6))
    assert started.selected.any()


def test_gradient_of_the_self_supervised_loss_flows_through_the_strong_view_alone():
    method = ProSub(subspace_weight=0.0, confidence=0.2)
    model, batch = model_and_batch(method)
    for view in batch.views.values():
        view.requires_grad_()
    method.step(model, batch).total.backward()
    assert float(batch.views["weak"].grad.abs().sum()) == 0  # the subspace score has no weight
    assert float(batch.views["strong"].grad.abs().sum()) > 0
    heads = {
        f"network.heads.{name}" for name in ("classes.weight", "classes.bias", "self.weight", "self.bias")
    }
    assert touched(model) == heads


def test_the_subspace_loss_pulls_known_images_in_and_pushes_others_out():
    method = ProSub(self_weight=0.0, pseudo_weight=0.0, subspace_weight=1.0)
    model, batch = model_and_batch(method)
    basis = subspace_basis(model.prototypes)
    weak = batch.views["weak"].requires_grad_()
    scores = subspace_scores(weak.detach(), basis)
    inside = id_draw(model.mixture(scores, doubt=0.1), batch.seed).bool()
    assert 0 < inside.sum() < len(inside)
    method.step(model, batch).total.backward()
    moved = subspace_scores((weak - 0.01 * weak.grad).detach(), basis)
    assert (moved > scores)[inside].all()
    assert (moved < scores)[~inside].all()


def test_everything_rejected():
    method = ProSub(known_share=0.0)
    model, batch = model_and_batch(method)
    losses = method.step(model, batch)
    losses.total.backward()
    assert not losses.selected.any()
    assert float(losses.parts["pseudo_label"]) == 0
    assert all(torch.isfinite(w.grad).all() for w in model.parameters() if w.grad is not None)


def test_the_first_step_knows_no_subspace():
    model = make_model(ProSub(pretraining=0.0))
    batch = make_batch(ROLES, dims=model.encoder.feature_dims, step=0)
    losses = ProSub(pretraining=0.0).step(model, batch)
    losses.total.backward()
    assert torch.isfinite(losses.total)
    assert all(torch.isfinite(w.grad).all() for w in model.parameters() if w.grad is not None)
    assert (model.prototypes.norm(dim=1) > 0).all()
    assert model.mixture.inside.tolist() == [10, 2]
    assert model.mixture.outside.tolist() == [2, 10]


def test_predictions_rank_by_the_subspace_score():
    method = ProSub()
    model, batch = model_and_batch(method)
    with torch.no_grad():
        outputs = method.predict(model.eval(), batch.views["weak"], None)
    assert outputs.probs.shape == (10, CLASSES)
    expected = [oracles.subspace_score(row, model.prototypes.numpy()) for row in batch.views["weak"].numpy()]
    assert outputs.score.tolist() == pytest.approx(expected)
    assert ((outputs.in_domain > 0) & (outputs.in_domain < 1)).all()


@pytest.mark.parametrize("name", ["known_share", "confidence", "pretraining", "statistics"])
def test_shares_out_of_range_are_refused(name):
    for value in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"method.{name} must be at least 0 and below 1"):
            replace(ProSub(), **{name: value})


@pytest.mark.parametrize("name", ["pseudo_weight", "subspace_weight", "self_weight"])
def test_negative_weights_are_refused(name):
    with pytest.raises(ValueError, match=f"method.{name} must be at least 0, got -1"):
        replace(ProSub(), **{name: -1.0})
