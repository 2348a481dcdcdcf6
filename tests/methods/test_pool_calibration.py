"""Predictions that a PoolPrior judges, fitted to the features after training."""

import numpy as np
import pytest
import torch

from ropaws.classify.pool_prior import PoolPrior, RowPass
from ropaws.core.features import FeatureRows
from ropaws.insight.metrics import detection
from ropaws.methods import PAWS, LabeledEmbeddings, RoPAWS, Supervised
from ropaws.methods.pool_calibration import pool_prior
from tests.classify.test_pool_prior import encoder_for, mixture, pool_of

METHODS = [Supervised(judge="pool"), PAWS(judge="pool"), RoPAWS(judge="pool", regression_share=0.3)]


def make(method, rows, truth, points):
    """A model whose embedding is its features, and the labeled points in it."""
    encoder = encoder_for(points.shape[1])
    encoder.projection[0].start(torch.zeros(points.shape[1]), torch.eye(points.shape[1]))
    encoder.frozen = False  # its features may have changed in training
    model = method.build(encoder, classes=3, pool=len(points))
    return model, LabeledEmbeddings(method.embed(model, points[rows]).detach(), truth[rows], 3)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@torch.no_grad()
def test_the_judge_is_fitted_after_training_and_mixed_in(method):
    points, truth, rows = mixture(60, 60)
    model, support = make(method, rows, truth, points)
    pool, plain = pool_of(points, rows, truth[rows]), type(method)()
    before = method.predict(model, points, support)
    torch.testing.assert_close(before.probs, plain.classify(before.embedding, support).probs)
    assert method.in_class_share(model) is None

    method.after_training(model, pool)
    after = method.predict(model, points, support)
    alone = PoolPrior(points.shape[1], 3, len(points))
    alone.fit(RowPass(FeatureRows(points)), rows, truth[rows])
    judged = alone(points)
    torch.testing.assert_close(after.in_domain, judged.in_domain)
    torch.testing.assert_close(after.score, judged.score)
    share = 0.3 if isinstance(method, RoPAWS) else 0.5
    near, by_features = before.probs.double().numpy(), alone.log_probs(points).double().exp().numpy()
    mixed = near ** (1 - share) * by_features**share
    mixed = mixed ** (1 / pool_prior(model).confidence_temperature)
    np.testing.assert_allclose(after.probs.numpy(), mixed / mixed.sum(axis=1, keepdims=True), atol=1e-5)
    assert method.in_class_share(model) == alone.estimated_share()
    assert (method.threshold(support), plain.threshold(support) == 0.5) == (0.5, False)
    assert plain.in_class_share(model) is None

    again, _ = make(method, rows, truth, points)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(method.predict(again, points, support).probs, after.probs, rtol=0, atol=0)


@torch.no_grad()
def test_one_odd_label_does_not_let_a_foreign_cluster_in():
    """The failure of a demo run: a label among out-of-class images, which are then nearest to a label."""
    points, truth, rows = mixture(60, 60, labels=4)
    odd = (truth == 3).nonzero().squeeze(1)[0]
    points[rows[0]] = points[odd] + 0.01
    scores = []
    for method in (RoPAWS(), RoPAWS(judge="pool")):
        model, support = make(method, rows, truth, points)
        method.after_training(model, pool_of(points, rows, truth[rows]))
        scores.append(method.predict(model, points, support).score)
    near, judged = (detection(score, truth < 3).auroc for score in scores)
    assert judged > near + 0.05


def test_the_judge_is_not_for_the_prior_of_the_start():
    with pytest.raises(ValueError, match=r"method\.judge 'pool' goes with prior 'distance'"):
        RoPAWS(prior="pool", judge="pool")
