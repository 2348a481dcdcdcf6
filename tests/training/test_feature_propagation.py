"""Labels that propagate through feature rows: what is computed once, and what is not computed at all."""

import torch
import torch.nn.functional as F

from ropaws.classify import propagation as feature_propagation
from ropaws.classify.estimator import projection
from ropaws.classify.propagation import Kernel, Propagation
from ropaws.core.features import FeatureRows, principal_components, unit_mean
from ropaws.methods import LabeledEmbeddings
from tests.insight.test_pool import blobs


def solved():
    """Every third unlabeled row votes."""
    points, truth = blobs(40, 3, seed=4, spread=0.3)
    labeled = torch.arange(0, 120, 10)
    support = LabeledEmbeddings(points[labeled], truth[labeled], 3)
    kernel = Kernel(temperature=0.2, prior_temperature=0.3)
    rows = torch.arange(1, 120, 3)
    rows = rows[~torch.isin(rows, labeled)]
    return points, Propagation.solve(points[rows], rows, support, kernel, None)


def test_voters_are_not_asked_again_and_answer_what_they_would(monkeypatch):
    points, propagation = solved()
    rows = torch.arange(1, 120, 2)
    expected, voters = propagation.probs(points[rows]), propagation.probs(points[propagation.rows])
    asked = []
    real = feature_propagation.ask_voters

    def watched(queries, *arguments):
        asked.append(queries)
        return real(queries, *arguments)

    monkeypatch.setattr(feature_propagation, "ask_voters", watched)
    found = propagation.learned_probs(rows, lambda some: points[rows][some])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)  # the pool is solved up to 1e-4 per class
    assert torch.equal(torch.cat(asked), points[rows[~torch.isin(rows, propagation.rows)]])
    own = propagation.learned_probs(propagation.rows, lambda some: points[propagation.rows][some])
    torch.testing.assert_close(own, voters, atol=1e-3, rtol=0)
    assert len(asked) == 1


def test_what_a_voter_hears_is_its_mass_before_the_prior():
    _, propagation = solved()
    voters = propagation.voters
    prior = voters.mass.sum(dim=1) / voters.heard.sum(dim=1)
    torch.testing.assert_close(prior[:, None] * voters.heard, voters.mass)
    assert prior.max() <= 1
    assert prior.min() < 0.9


def test_directions_are_left_out_where_they_are_nothing_but_a_turn():
    random = torch.Generator().manual_seed(0)
    few, many = (FeatureRows(torch.randn(300, dims, generator=random)) for dims in (12, 260))
    assert projection(few, trained=False).components is None
    assert projection(few, trained=True).components.shape == (12, 12)
    assert projection(many, trained=False).components.shape == (256, 260)
    rows = few.center[:5]
    plain, turned = (projection(few, trained=trained)(rows) for trained in (False, True))
    torch.testing.assert_close(plain @ plain.T, turned @ turned.T, atol=1e-5, rtol=0)


def test_the_mean_of_unit_rows_is_that_of_the_main_directions():
    features = FeatureRows(3 * torch.randn(50, 7, generator=torch.Generator().manual_seed(1)) + 2)
    expected = F.normalize(features.center.double(), dim=1).mean(dim=0)
    torch.testing.assert_close(unit_mean(features, block=16), expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(principal_components(features, 2)[0], expected, atol=1e-7, rtol=0)
