import math

import pytest
import torch
import torch.nn.functional as F

from ropaws import equations as eq
from ropaws.classify.soft_nn import auto_prior_temperature, may_vote, nearest_gap, smooth
from ropaws.core.records import Batch, Embeddings, Support
from ropaws.methods import PAWS, RoPAWS, Supervised
from ropaws.methods.ropaws import GAP, update_running_gap
from ropaws.pool.augment import AugmentConfig
from tests import oracles


class Table(torch.nn.Module):
    """A network that looks its answers up: images are row numbers, h and z are free parameters."""

    def __init__(self, rows=40, dims=6, seed=0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.h = torch.randn(rows, dims, generator=random, dtype=torch.float64).requires_grad_()
        self.z = torch.randn(rows, dims, generator=random, dtype=torch.float64).requires_grad_()
        self.calls = 0

    def forward(self, batches):
        self.calls += 1
        return [Embeddings(F.normalize(self.h[b], dim=1), F.normalize(self.z[b], dim=1)) for b in batches]


def make_support(classes=3, images=2, views=2):
    identity = torch.arange(classes * images).repeat(views)
    labels = F.one_hot(identity // images, classes).double()
    return Support(torch.arange(classes * images * views), labels, identity, identity // images)


def make_batch(support, views):
    rows = len(next(iter(views.values()), ()))
    return Batch(step=0, steps=1, views=views, pool_index=torch.arange(rows), labeled=support)


def step(method, model, batch):
    """One step of the model that the method makes of a network."""
    return method.step(method.build(model, classes=3, pool=40), batch)


SUPPORT = make_support()
VIEWS = {
    "large1": torch.arange(12, 17),
    "large2": torch.arange(17, 22),
    "small1": torch.arange(22, 27),
    "small2": torch.arange(27, 32),
}
BATCH = make_batch(SUPPORT, VIEWS)
METHODS = [PAWS(), RoPAWS(), RoPAWS(prior_temperature="auto")]


def test_paws_is_the_equations_on_z_and_h():
    model = Table()
    losses = step(PAWS(), model, BATCH)
    labels = smooth(SUPPORT.labels, 0.1)
    s, first, second, *crops = model([SUPPORT.images, *VIEWS.values()])
    anchors = torch.stack([eq.soft_nn(v.z, s.z, labels) for v in (first, second, *crops)])
    targets = torch.stack([eq.soft_nn(v.h, s.h, labels) for v in (first, second)])
    torch.testing.assert_close(losses.total, eq.paws_loss(anchors, targets).total)


def test_ropaws_is_the_equations_on_z_and_h():
    model = Table()
    method = RoPAWS(prior_temperature=0.3, label_ratio=2.0, reweight_power=2.0)
    losses = step(method, model, BATCH)
    labels = smooth(SUPPORT.labels, 0.1)
    s, first, second, *crops = model([SUPPORT.images, *VIEWS.values()])
    anchors = torch.stack([eq.soft_nn(v.z, s.z, labels) for v in (first, second, *crops)])
    q = [
        eq.ropaws_posterior(v.h, s.h, labels, prior_temperature=0.3, label_ratio=2.0) for v in (first, second)
    ]
    expected = eq.ropaws_loss(
        anchors, torch.stack([p.probs for p in q]), torch.stack([p.in_domain for p in q]), reweight_power=2.0
    )
    torch.testing.assert_close(losses.total, expected.total)
    assert float(losses.parts["prior_temperature"]) == pytest.approx(0.3)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_goes_through_anchors_of_views_and_supports_not_through_targets(method):
    model = Table()
    step(method, model, BATCH).total.backward()
    assert model.calls == 1
    assert model.h.grad is None
    touched = model.z.grad.abs().sum(dim=1) > 0
    assert touched.tolist() == [True] * 32 + [False] * 8


@pytest.mark.parametrize("kind", [PAWS, RoPAWS])
def test_contrast_is_a_weighted_term_on_z_of_the_large_views(kind):
    model = Table()
    plain, beside = (
        step(kind(contrast_weight=weight, contrast_temperature=0.3), model, BATCH) for weight in (0.0, 0.7)
    )
    first, second = (
        F.normalize(model.z[VIEWS[role]], dim=1).detach().numpy() for role in ("large1", "large2")
    )
    expected = oracles.nt_xent(first, second, 0.3)
    assert float(beside.parts["contrast"]) == pytest.approx(expected)
    term = (beside.total - plain.total) / 0.7
    assert float(term.detach()) == pytest.approx(expected)
    assert "contrast" not in plain.parts
    assert (beside.selected is None) == (plain.selected is None)
    term.backward()
    assert model.h.grad is None
    large = [12 <= row < 22 for row in range(40)]
    assert (model.z.grad.abs().sum(dim=1) > 1e-9).tolist() == large


@pytest.mark.parametrize("kind", [PAWS, RoPAWS])
def test_supervision_is_the_weighted_loss_of_the_baseline_on_the_supports(kind):
    model = Table()
    plain, beside = (step(kind(supervised_weight=weight), model, BATCH) for weight in (0.0, 0.7))
    baseline = step(Supervised(), model, BATCH).total
    assert float(beside.parts["cross_entropy"]) == pytest.approx(float(baseline.detach()))
    assert "cross_entropy" not in plain.parts
    term = (beside.total - plain.total) / 0.7
    assert float(term.detach()) == pytest.approx(float(baseline.detach()))
    assert (beside.selected is None) == (plain.selected is None)
    term.backward()
    assert (model.z.grad.abs().sum(dim=1) > 1e-9).tolist() == [row < 12 for row in range(40)]


def test_with_all_switches_off_ropaws_is_paws():
    off = RoPAWS(semi_supervised_density=False, in_domain_prior=False, reweighting=False)
    losses, paws = (step(method, Table(), BATCH) for method in (off, PAWS()))
    torch.testing.assert_close(losses.total, paws.total)


@pytest.mark.parametrize("switch", ["semi_supervised_density", "in_domain_prior", "reweighting"])
def test_each_switch_alone_changes_the_loss(switch):
    on, off = (RoPAWS(prior_temperature=2.0, label_ratio=0.5, **{switch: value}) for value in (True, False))
    one, other = (step(method, Table(), BATCH) for method in (on, off))
    assert abs(float((one.total - other.total).detach())) > 1e-4
    if switch == "reweighting":
        assert float(other.parts["weight"]) == 1.0


def test_prior_without_density_is_paws_shrunk_towards_uniform():
    queries, support = (
        F.normalize(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), dim=1),
        torch.eye(5)[:3],
    )
    labels = torch.eye(3)
    posterior, _ = RoPAWS(semi_supervised_density=False).posterior(queries, support, labels, 0.5)
    prior = eq.in_domain_prior(queries, support, temperature=0.5)[:, None]
    expected = prior * eq.soft_nn(queries, support, labels) + (1 - prior) / 3
    torch.testing.assert_close(posterior.probs, expected)
    torch.testing.assert_close(posterior.in_domain, prior[:, 0])


def test_supervised_ignores_the_pool_and_classifies_by_other_images():
    model = Table()
    assert Supervised().views(AugmentConfig()) == {}
    losses = step(Supervised(), model, make_batch(SUPPORT, {}))
    z = F.normalize(model.z.detach()[SUPPORT.images], dim=1)
    labels = smooth(SUPPORT.labels, 0.1)
    total = 0.0
    for i in range(12):
        others = [j for j in range(12) if SUPPORT.identity[j] != SUPPORT.identity[i]]
        probs = eq.soft_nn(z[i : i + 1], z[others], labels[others])
        total += float(eq.cross_entropy(labels[i : i + 1], probs)) / 12
    assert float(losses.total.detach()) == pytest.approx(total)
    losses.total.backward()
    assert (model.z.grad[:12].abs().sum(dim=1) > 0).all()
    assert (model.z.grad[12:] == 0).all()


def test_an_image_alone_in_its_class_may_be_judged_by_its_other_views():
    numbers = torch.tensor([0, 1, 0, 1])
    alone = Support(torch.arange(4), torch.eye(2)[numbers], numbers, numbers)
    expected = ~torch.eye(4, dtype=torch.bool)
    assert torch.equal(may_vote(alone), expected)
    # Two images of the class: views of the same one must be silent.
    assert not may_vote(SUPPORT)[0, 6]
    assert may_vote(SUPPORT)[0, 1]


def test_smoothing_keeps_rows_at_one():
    smoothed = smooth(torch.eye(4), 0.1)
    torch.testing.assert_close(smoothed.sum(dim=1), torch.ones(4))
    torch.testing.assert_close(smoothed[0], torch.tensor([0.925, 0.025, 0.025, 0.025]))


def test_gap_is_the_distance_to_the_nearest_other_image_of_the_class():
    classes = torch.tensor([0, 0, 1, 1])
    support = Support(torch.arange(4), torch.eye(2)[classes], torch.arange(4), classes)
    angles = torch.tensor([0.0, 0.5, 0.1, 1.1])
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    expected = 1 - (math.cos(0.5) + math.cos(1.0)) / 2
    assert float(nearest_gap(points, support)) == pytest.approx(expected, rel=1e-5)


def test_gap_is_unknown_where_no_class_has_two_rows():
    support = Support(torch.arange(2), torch.eye(2), torch.arange(2), torch.arange(2))
    assert nearest_gap(torch.eye(2), support).isnan()


def test_running_gap_starts_at_the_first_value_and_skips_missing_ones():
    average = RoPAWS().build(Table(), classes=3, pool=40).get_buffer(GAP)
    assert average.isnan()
    for gap, expected in ((math.nan, math.nan), (0.4, 0.4), (0.8, 0.44), (math.nan, 0.44)):
        update_running_gap(average, torch.tensor(gap))
        assert float(average) == pytest.approx(expected, nan_ok=True)


def test_auto_temperature_gives_the_typical_prior_at_the_gap():
    assert math.exp(-0.3 / auto_prior_temperature(0.3, 0.7)) == pytest.approx(0.7)
    assert auto_prior_temperature(math.nan, 0.7) == 0.1
    assert auto_prior_temperature(0.0, 0.7) == 0.01


def test_auto_is_logged_and_follows_the_supports():
    model = Table()
    losses = step(RoPAWS(prior_temperature="auto"), model, BATCH)
    gap = nearest_gap(F.normalize(model.h.detach()[SUPPORT.images], dim=1), SUPPORT)
    expected = auto_prior_temperature(float(gap), 0.7)
    assert float(losses.parts["prior_temperature"]) == pytest.approx(expected, rel=1e-5)


def test_one_label_a_class_trains():
    support = make_support(classes=3, images=1, views=2)
    for method in (*METHODS, Supervised()):
        model = Table()
        losses = step(method, model, make_batch(support, VIEWS))
        losses.total.backward()
        assert losses.total.isfinite()
        assert model.z.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (PAWS, {"temperature": 0}, r"method\.temperature must be positive, got 0"),
        (PAWS, {"label_smoothing": 1.0}, r"method\.label_smoothing must be at least 0 and below 1"),
        (RoPAWS, {"prior_temperature": -0.1}, r"method\.prior_temperature must be positive"),
        (RoPAWS, {"label_ratio": 0}, r"method\.label_ratio must be positive"),
        (RoPAWS, {"reweight_power": -1}, r"method\.reweight_power must be at least 0"),
        (RoPAWS, {"supervised_weight": -0.1}, r"method\.supervised_weight must be at least 0, got -0\.1"),
        (PAWS, {"contrast_weight": -0.1}, r"method\.contrast_weight must be at least 0, got -0\.1"),
        (RoPAWS, {"contrast_weight": math.nan}, r"method\.contrast_weight must be at least 0, got nan"),
        (RoPAWS, {"contrast_temperature": 0}, r"method\.contrast_temperature must be positive, got 0"),
        (RoPAWS, {"typical_prior": 1.0}, r"method\.typical_prior must be"),
        (Supervised, {"temperature": -1}, r"method\.temperature must be positive"),
    ],
)
def test_bad_settings_are_named(kind, settings, words):
    with pytest.raises(ValueError, match=words):
        kind(**settings)
