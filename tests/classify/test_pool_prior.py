"""The prior from the pool as a module, and RoPAWS with it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ropaws.classify.calibration import calibrated_temperature
from ropaws.classify.logistic import fit_balanced, held_out_accuracy
from ropaws.classify.pool_prior import PoolPrior, RowPass
from ropaws.core.features import FeatureRows
from ropaws.embedding.backbones import Encoder
from ropaws.embedding.encoder import KnownFeatures, linear_head
from ropaws.methods import LabeledEmbeddings, RoPAWS
from ropaws.methods.pool_calibration import pool_prior
from ropaws.pool.augment import Normalization
from ropaws.training.loaders import PoolPass, TrainingData
from tests.insight.test_pool import blobs


def pool_of(points, rows, labels):
    data = TrainingData(FeatureRows(points), rows, labels, Normalization((0.0,), (1.0,)))
    return PoolPass(data, 1, 0, torch.device("cpu"))


def encoder_for(dims=16):
    return Encoder(KnownFeatures(dims), linear_head(dims, dims), nn.Identity(), frozen=True).eval()


def mixture(inside, outside, *, classes=3, labels=10, seed=0, spread=0.25):
    """So many in-class rows per class, and rows of three more clusters.   ->  points, truth, labeled rows"""
    points, truth = blobs(max(inside, outside), classes + 3, seed=seed, spread=spread)
    kept = [
        (truth == c).nonzero().squeeze(1)[: inside if c < classes else outside] for c in range(classes + 3)
    ]
    points, truth = points[torch.cat(kept)], truth[torch.cat(kept)]
    rows = torch.cat([(truth == c).nonzero().squeeze(1)[:labels] for c in range(classes)])
    return points, truth, rows


@torch.no_grad()
def fitted(points, truth, rows, classes=3):
    prior = PoolPrior(points.shape[1], classes, len(points))
    prior.fit(RowPass(FeatureRows(points)), rows, truth[rows])
    return prior


def test_a_curated_pool_is_in_class():
    points, truth, rows = mixture(120, 0)
    prior = fitted(points, truth, rows)
    assert prior.estimated_share().estimate > 0.8  # with 30 labels, too low by chance
    assert prior.estimated_share().high > 0.97
    assert float(prior.prior.mean()) > 0.8


def test_junk_is_found_and_counted():
    points, truth, rows = mixture(40, 360)  # a tenth is in-class
    prior = fitted(points, truth, rows)
    share, inside = prior.estimated_share(), truth < 3
    assert share.low - 0.03 <= 0.1 <= share.high + 0.03
    assert share.estimate < 0.25
    assert float(prior.prior[inside].mean()) > 0.6
    assert float(prior.prior[~inside].mean()) < 0.1
    assert (prior.prior[rows] == 1).all()


@pytest.mark.parametrize(
    "case", ["one label per class", "equal labels", "tiny pool", "one class", "all labeled"]
)
def test_hard_cases_give_probabilities(case):
    points, truth, rows = mixture(60, 60)
    classes = 3
    if case == "one label per class":
        rows = torch.stack([(truth == c).nonzero()[0, 0] for c in range(3)])
    elif case == "equal labels":
        points[rows] = points[rows[0]].clone()
    elif case == "tiny pool":
        keep = torch.cat([rows[[0, 10, 20]], (truth == 4).nonzero().squeeze(1)[:2]])
        points, truth, rows = points[keep], truth[keep], torch.arange(3)
    elif case == "one class":
        rows, classes = rows[truth[rows] == 0], 1
    else:
        points, truth, rows = points[rows], truth[rows], torch.arange(len(rows))
    prior = fitted(points, truth, rows, classes)
    found = prior(points)
    for values in (found.in_domain, prior.prior):
        assert ((values >= 0) & (values <= 1)).all()
    assert torch.isfinite(found.score).all()
    torch.testing.assert_close(prior.log_probs(points).exp().sum(dim=1), torch.ones(len(points)))


def test_rows_that_were_not_there_are_judged_alike():
    points, truth, rows = mixture(200, 200)
    train = torch.arange(len(points)) % 2 == 0
    where = train[rows].nonzero().squeeze(1)
    number = train.cumsum(0) - 1
    prior = fitted(points[train], truth[train], number[rows[where]])
    seen, unseen = prior.prior, prior(points[~train]).in_domain
    inside = truth < 3
    for part in (inside, ~inside):
        assert float(unseen[part[~train]].mean()) == pytest.approx(float(seen[part[train]].mean()), abs=0.1)


def test_it_is_kept_with_the_model():
    points, truth, rows = mixture(30, 30)
    prior = fitted(points, truth, rows)
    again = PoolPrior(16, 3, len(points))
    again.load_state_dict(prior.state_dict())
    assert again.fitted
    for one, two in zip(prior(points), again(points), strict=True):
        assert torch.equal(one, two)


def test_in_features_that_were_fitted_to_the_labels_the_pool_looks_out_of_class():
    """Why the prior is fitted before training, and to frozen features."""
    points, truth, rows = mixture(100, 0, labels=5, spread=0.6)
    share = fitted(points, truth, rows).estimated_share().estimate
    centers = F.normalize(torch.randn(3, 16, generator=torch.Generator().manual_seed(5)), dim=1)
    trained = points.clone()
    trained[rows] = F.normalize(centers[truth[rows]] + 0.05 * points[rows], dim=1)  # labels have moved
    assert fitted(trained, truth, rows).estimated_share().estimate < 0.5 * share


def test_logistic_regression_is_scikit_learns_also_with_two_classes_and_gaps():
    from sklearn.linear_model import LogisticRegression

    points, truth = blobs(20, 2, seed=1, spread=0.6)
    weight, bias = fit_balanced(points, 2 * truth, 3)
    probs = F.linear(points, weight, bias).softmax(dim=1)
    model = LogisticRegression(C=10, class_weight="balanced", max_iter=1000).fit(points.double(), truth)
    torch.testing.assert_close(
        probs[:, [0, 2]].double(),
        torch.from_numpy(model.predict_proba(points.double())),
        rtol=1e-3,
        atol=1e-4,
    )
    assert (probs[:, 1] < 1e-6).all()  # a class without labels


def test_accuracy_on_held_out_labels():
    points, truth = blobs(12, 3, seed=2)
    assert held_out_accuracy(points, truth, 3) == 1
    mixed = truth[torch.randperm(36, generator=torch.Generator().manual_seed(0))]
    assert held_out_accuracy(points, mixed, 3) < 0.7
    assert math.isnan(held_out_accuracy(points[::12], truth[::12], 3))


def test_ropaws_fits_it_once_and_judges_by_it_where_the_backbone_is_frozen():
    points, truth, rows = mixture(60, 60)
    method, pool = RoPAWS(prior="pool"), pool_of(points, rows, truth[rows])
    encoder = encoder_for()
    encoder.projection[0].start(torch.zeros(16), torch.eye(16))
    model = method.build(encoder, classes=3, pool=len(points))
    support = LabeledEmbeddings(method.embed(model, points[rows]).detach(), truth[rows], 3)
    with torch.no_grad():
        plain = method.predict(model, points, support)  # nothing is fitted yet
        method.before_epoch(model, pool)
        before = {name: value.clone() for name, value in pool_prior(model).state_dict().items()}
        pool.data.images.center.add_(1)
        method.before_epoch(model, pool)  # a second epoch changes nothing
        pool.data.images.center.sub_(1)
        method.after_training(model, pool)
        judged = method.predict(model, points, support)
        encoder.frozen = False
        changed = method.predict(model, points, support)
    after = pool_prior(model).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "confidence")
    assert after["confidence"][1] != before["confidence"][1]
    torch.testing.assert_close(changed.in_domain, plain.in_domain)
    assert not torch.equal(judged.in_domain, plain.in_domain)
    assert method.in_class_share(model) == pool_prior(model).estimated_share()
    assert RoPAWS().in_class_share(encoder) is None
    assert method.threshold(support) == 0.5


def test_me_max_is_over_the_in_class_part_wherever_the_prior_is_estimated():
    assert RoPAWS(prior="pool").weighs_entropy
    assert not RoPAWS().weighs_entropy
    assert not RoPAWS(prior="pool", reweight_entropy=False).weighs_entropy


def test_a_temperature_of_many_classes_is_found_on_a_part_of_the_images(monkeypatch):
    random = torch.Generator().manual_seed(0)
    near, regression = ((3 * torch.randn(2000, 5, generator=random)).softmax(dim=1) for _ in range(2))
    weights, how = torch.rand(2000, generator=random), {"share": 0.5, "held_out": 0.6}
    third = calibrated_temperature(near[::3], regression[::3], weights[::3], **how)
    assert calibrated_temperature(near, regression, weights, **how) != third
    monkeypatch.setattr("ropaws.classify.calibration.CALIBRATION_ENTRIES", 4000)
    assert calibrated_temperature(near, regression, weights, **how) == third
