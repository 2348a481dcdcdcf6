"""OpenMatch: its losses, the choice of inliers, and what happens when there are none."""

import math
from dataclasses import replace

import pytest
import torch

from ropaws.core.features import FeatureRows
from ropaws.methods.openmatch import OpenMatch
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.training.loaders import PoolPass, TrainingData
from tests import oracles
from tests.methods.one_step import CLASSES, POOL, make_batch, make_model, touched

ROLES = ("weak1", "weak2", "strong")
SOME = [4, 5, 8, 12]  # positions in the pool; the batch shows 3 to 12


def model_and_batch(method, *, inliers=SOME, chosen_at=2, **batch):
    model = make_model(method, scale=2.0)
    model.inliers[inliers] = True
    model.chosen_at.fill_(chosen_at)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def pool_of(features, step):
    data = TrainingData(FeatureRows(features), torch.arange(1), torch.zeros(1), Normalization((0.0,), (1.0,)))
    return PoolPass(data, 8, step, torch.device("cpu"))


@pytest.mark.parametrize("confidence", [0.0, 0.8])
def test_every_part_of_the_loss(confidence):
    method = OpenMatch(
        confidence=confidence, unlabeled_weight=2.0, entropy_weight=0.3, consistency_weight=0.7
    )
    model, batch = model_and_batch(method)
    with torch.no_grad():
        classify, detect = (
            lambda x, head=model.network.heads[name]: head(x).tolist() for name in ("classes", "one_vs_all")
        )
        classes = batch.labeled.classes.tolist()
        logits, scores = classify(batch.labeled.images), detect(batch.labeled.images)
        first, second, strong = (batch.views[role] for role in ROLES)
        weak1, weak2, said, seen = detect(first), detect(second), classify(first), classify(strong)
    rows = range(10)
    chosen = [i for i in rows if i + 3 in SOME]
    sure = [i for i in chosen if max(oracles.softmax(said[i])) >= confidence]
    assert 0 < len(sure) <= len(chosen)
    assert (len(sure) < len(chosen)) == (confidence > 0)
    wrong = [-math.log(oracles.softmax(seen[i])[max(range(3), key=said[i].__getitem__)]) for i in sure]
    expected = {
        "cross_entropy": sum(-math.log(oracles.softmax(logits[i])[classes[i]]) for i in range(6)) / 6,
        "one_vs_all": sum(oracles.one_vs_all_loss(scores[i], classes[i]) for i in range(6)) / 6,
        "entropy": sum(map(oracles.one_vs_all_entropy, weak1 + weak2)) / 20,
        "consistency": sum(oracles.one_vs_all_distance(weak1[i], weak2[i]) for i in rows) / 10,
        "pseudo_label": sum(wrong) / len(chosen),  # unsure inliers count as zero, others do not count
        "inliers": len(SOME) / POOL,
    }
    losses = method.step(model, batch)
    assert {name: float(value) for name, value in losses.parts.items()} == pytest.approx(expected)
    weights = {"entropy": 0.3, "consistency": 0.7, "pseudo_label": 2.0, "inliers": 0.0}
    total = sum(weights.get(name, 1.0) * value for name, value in expected.items())
    assert float(losses.total.detach()) == pytest.approx(total)
    assert losses.selected.tolist() == [float(i in sure) for i in rows]


def test_only_inliers_are_looked_at_in_their_strong_view():
    method = OpenMatch(fixmatch_start=0.0)
    model, batch = model_and_batch(method)
    views = {role: view.clone().requires_grad_() for role, view in batch.views.items()}
    method.step(model, batch._replace(views=views)).total.backward()
    used = views["strong"].grad.abs().sum(dim=1) > 0
    assert [i + 3 for i in used.nonzero().squeeze(1).tolist()] == SOME
    assert (views["weak1"].grad.abs().sum(dim=1) > 0).all()  # by the detectors' entropy
    assert not touched(model.average)


def test_pseudo_labels_are_constants():
    """Without the losses of the detectors nothing flows back through a weak view."""
    method = OpenMatch(entropy_weight=0.0, consistency_weight=0.0, fixmatch_start=0.0)
    model, batch = model_and_batch(method)
    views = {role: view.clone().requires_grad_() for role, view in batch.views.items()}
    losses = method.step(model, batch._replace(views=views))
    assert losses.parts["pseudo_label"] > 0
    losses.total.backward()
    assert views["weak1"].grad.abs().sum() == 0


@pytest.mark.parametrize(("inliers", "chosen_at"), [([], 2), ([0, 1, 15], 2), (SOME, -1)])
def test_no_inlier_in_the_batch_or_none_chosen_yet(inliers, chosen_at):
    method = OpenMatch()
    model, batch = model_and_batch(method, inliers=inliers, chosen_at=chosen_at)
    losses = method.step(model, batch)
    assert float(losses.parts["pseudo_label"]) == 0
    assert losses.selected.tolist() == [0.0] * 10
    losses.total.backward()
    assert all(torch.isfinite(w.grad).all() for w in model.network.parameters() if w.grad is not None)


@pytest.mark.parametrize(("chosen_at", "begun"), [(1, False), (2, True), (3, True)])
def test_fixmatch_begins_with_the_first_choice_after_its_share_of_the_run(chosen_at, begun):
    method = OpenMatch(fixmatch_start=0.2)
    losses = method.step(*model_and_batch(method, chosen_at=chosen_at))
    assert (losses.parts["pseudo_label"] > 0) == begun
    assert losses.selected.sum() == (len(SOME) if begun else 0)


def test_the_average_chooses_by_the_detector_of_the_likeliest_class():
    method = OpenMatch()
    model, _ = model_and_batch(method, inliers=[], chosen_at=-1)
    features = torch.randn(POOL, model.encoder.feature_dims, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.network.heads["classes"].weight.neg_()  # the trained network would choose others
        heads = model.float().predictor.heads
        logits, scores = heads["classes"](features).tolist(), heads["one_vs_all"](features).tolist()
        method.before_epoch(model.eval(), pool_of(features, step=7))
    expected = [
        oracles.one_vs_all(row)[max(range(CLASSES), key=said.__getitem__)] > 0.5
        for said, row in zip(logits, scores, strict=True)
    ]
    assert model.inliers.tolist() == expected
    assert 0 < sum(expected) < POOL
    assert int(model.chosen_at) == 7
    outputs = method.predict(model, features, None)
    assert (outputs.in_domain > method.threshold(None)).tolist() == expected
    assert torch.equal(outputs.score, outputs.in_domain)


def test_two_weak_views_and_a_strong_one():
    views = OpenMatch().views(AugmentConfig(size=20))
    assert list(views) == list(ROLES)
    assert {view.size for view in views.values()} == {20}
    assert views["weak1"] == views["weak2"] != views["strong"]


@pytest.mark.parametrize(
    "setting",
    [
        {"confidence": 1.0},
        {"entropy_weight": -0.1},
        {"consistency_weight": math.inf},
        {"fixmatch_start": 1.0},
    ],
)
def test_settings_out_of_range(setting):
    with pytest.raises(ValueError, match=f"method.{next(iter(setting))} must be"):
        replace(OpenMatch(), **setting)
