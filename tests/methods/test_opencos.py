"""OpenCoS: the split of the pool, its loss, the second set of batch norms, and what it refuses."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ropaws
from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import FixMatch, OpenCoS, SimCLR
from ropaws.methods.opencos import (
    fit_probe,
    held_out_scores,
    probe_probabilities,
    prototypes,
    score_threshold,
    top_pseudo_labels,
)
from ropaws.pool.augment import Normalization
from ropaws.run.config import with_method
from ropaws.training.loaders import PoolPass, TrainingData
from tests import oracles, tiny

CLASSES, POOL = 3, 12
METHOD = OpenCoS(confidence=0.4, top_share=0.3)
CONFIG = ModelConfig(backbone="small-8", projection_hidden=8, projection_dims=8)


def make_model(method=METHOD, config=CONFIG):
    torch.manual_seed(0)
    model = method.build(build_encoder(config, channels=3), classes=CLASSES, pool=POOL).train()
    model.in_class[:] = torch.arange(POOL) % 3 > 0
    model.pseudo[::4] = 2
    model.soft.copy_(torch.rand(POOL, CLASSES).softmax(dim=1))
    return model


def make_batch(index=range(8), shape=(3, 12, 12)):
    random = torch.Generator().manual_seed(1)
    index = torch.tensor(list(index))
    weak, strong = (torch.randn(len(index), *shape, generator=random) for _ in range(2))
    classes = torch.tensor([0, 1, 2, 0])
    labeled = Support(torch.randn(4, *shape, generator=random), F.one_hot(classes, 3), classes, classes)
    return Batch(2, 10, {"weak": weak, "strong": strong}, index, labeled)


# The split


def test_held_out_scores_are_those_of_prototypes_without_the_image():
    random = np.random.default_rng(0)
    embedded, labels = oracles.unit(random.normal(size=(9, 4))), np.array([0, 1, 1, 2, 2, 2, 3, 0, 0])
    found = held_out_scores(torch.from_numpy(embedded), torch.from_numpy(labels), 5)  # the last has no label
    np.testing.assert_allclose(found.numpy(), oracles.held_out_prototype_scores(embedded, labels, 5))


def test_prototypes_with_the_image_itself_would_set_a_higher_threshold():
    embedded = F.normalize(torch.randn(12, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = torch.arange(12) % 3
    with_itself = (embedded @ prototypes(embedded, labels, 3).T).amax(dim=1)
    assert (with_itself > held_out_scores(embedded, labels, 3)).all()


def test_the_threshold():
    assert score_threshold(torch.tensor([0.5, 0.9]), 2.0) == pytest.approx(0.7 - 2 * 0.2)
    assert score_threshold(torch.tensor([0.5, 0.9, -math.inf]), 1.0) == pytest.approx(0.5)
    assert score_threshold(torch.tensor([0.5]), 2.0) == 0.5


def test_one_image_in_one_class_has_no_threshold():
    scores = held_out_scores(torch.eye(2)[:1], torch.tensor([0]), 1)
    assert score_threshold(scores, 2.0) == -1


def test_one_label_per_class_compares_with_the_other_classes():
    embedded = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    half = math.sqrt(0.5)
    torch.testing.assert_close(held_out_scores(embedded, torch.arange(3), 3), torch.full((3,), half))


def test_the_probe_is_where_its_loss_is_flat():
    """Mean over rows of (p - label) x, and penalty times the weights, cancel each other."""
    random = torch.Generator().manual_seed(0)
    features, labels = torch.randn(12, 4, generator=random), torch.arange(12) % 3
    with torch.no_grad():
        weights = fit_probe(features, labels, 3, penalty=0.1)
    probs = probe_probabilities(features.double(), weights)
    rest = probs - F.one_hot(labels, 3)
    slope = features.double().T @ rest / 12 + 0.1 * weights[:-1]
    assert slope.abs().max() < 1e-5
    assert rest.mean(dim=0).abs().max() < 1e-5


def test_the_most_confident_eligible_rows_get_a_label():
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    eligible = torch.tensor([False, True, True, True, True])
    assert top_pseudo_labels(probs, eligible, 0.5).tolist() == [-1, 1, -1, 1, -1]
    assert top_pseudo_labels(probs, eligible, 0.0).tolist() == [-1] * 5
    assert top_pseudo_labels(probs, torch.zeros(5, dtype=torch.bool), 0.5).tolist() == [-1] * 5


def make_pool(images, labeled, labels, step=0):
    data = TrainingData(images, labeled, labels, Normalization((0.5,) * 3, (0.25,) * 3))
    return PoolPass(data, 12, step, torch.device("cpu"))


def test_the_pool_is_split_once_by_the_network_as_it_is():
    random = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (POOL, 3, 12, 12), dtype=torch.uint8, generator=random)
    labeled, labels = torch.tensor([0, 2, 4, 6, 8, 10]), torch.arange(6) % 3
    method = replace(METHOD, deviations=0.0)
    model = make_model(method).eval()
    with torch.no_grad():
        method.before_epoch(model, make_pool(images, labeled, labels))
        embedded = make_pool(images, labeled, labels).map(lambda views: model.encoder([views])[0].h)
    rows = embedded.double().numpy()
    means = oracles.unit([rows[labeled[labels == c]].mean(axis=0) for c in range(3)])
    held_out = oracles.held_out_prototype_scores(rows[labeled], labels.numpy(), 3)
    expected = (rows @ means.T).max(axis=1) > np.mean(held_out)
    expected[labeled] = True
    assert 6 < expected.sum() < POOL
    assert model.in_class.tolist() == expected.tolist()
    soft = oracles.sharpen(np.exp(rows @ means.T), 0.1)
    np.testing.assert_allclose(model.soft.numpy(), soft, rtol=1e-3, atol=1e-5)
    chosen = (model.pseudo >= 0).nonzero().flatten().tolist()
    assert len(chosen) == int(0.3 * (expected.sum() - 6))
    assert all(expected[row] and row not in labeled for row in chosen)
    before = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        method.before_epoch(model, make_pool(images.flip(0), labeled, labels, step=5))
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())


# The loss


def test_a_step_is_the_loss_of_the_formula():
    """Rows 0, 3 and 6 of the pool are outside; of the others 4 has a pseudo-label (8 is not in the batch)."""
    model, batch = make_model(), make_batch()
    before = copy.deepcopy(model)
    found = METHOD.step(model, batch)
    inside, outside = [1, 2, 4, 5, 7], [0, 3, 6]
    weak, strong = batch.views["weak"], batch.views["strong"]
    main = torch.cat([batch.labeled.images, weak[inside], strong[inside]])
    network, second = before.network, copy.deepcopy(before.network)  # norms start as copies

    def probs(net, images):
        return net.logits(net(images)).softmax(dim=1).detach().double().numpy()

    labeled, sure, learner = np.split(probs(network, main), [4, 9])
    out = probs(second, weak[outside])
    known = [-math.log(labeled[i, c]) for i, c in enumerate([0, 1, 2, 0])] + [-math.log(sure[2, 2])]
    consistency = [-math.log(learner[i, sure[i].argmax()]) if sure[i].max() >= 0.4 else 0.0 for i in range(5)]
    soft = [oracles.cross_entropy(p, model.soft[row].tolist()) for p, row in zip(out, outside, strict=True)]
    parts = [np.mean(known), np.mean(consistency), np.mean(soft)]
    assert [float(value) for value in found.parts.values()] == pytest.approx(parts, rel=1e-4)
    assert float(found.total.detach()) == pytest.approx(parts[0] + parts[1] + 0.5 * parts[2], rel=1e-4)
    selected = np.zeros(8)
    selected[inside] = [sure[i].max() >= 0.4 or i == 2 for i in range(5)]
    assert found.selected.tolist() == selected.tolist()


def test_outside_rows_train_their_own_norms_and_leave_the_others_alone():
    model = make_model()
    loss = METHOD.outside_loss(model, make_batch().views["weak"], model.soft[:8])
    loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.auxiliary.parameters())
    norms = [module for module in model.network.encoder.backbone.modules() if hasattr(module, "running_mean")]
    assert len(norms) == len(model.auxiliary.norms) > 0
    assert all(norm.weight.grad is None and norm.running_mean.abs().max() == 0 for norm in norms)
    assert all(norm.running_mean.abs().max() > 0 for norm in model.auxiliary.norms.values())
    assert model.network.encoder.backbone.stem.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["all inside", "all outside", "one outside"])
def test_special_batches(kind):
    model, batch = make_model(), make_batch()
    model.in_class[:] = kind != "all outside"
    if kind == "one outside":
        model.in_class[0] = False
    found = METHOD.step(model, batch)
    found.total.backward()
    assert found.total.isfinite()
    assert (found.parts["soft_label"] > 0) == (kind == "all outside")
    assert (found.parts["pseudo_label"] == 0) == (kind == "all outside")
    assert all(w.grad is None or w.grad.isfinite().all() for w in model.parameters())


@pytest.mark.parametrize(("head", "norms"), [("mlp", 2), ("linear", 0)])
def test_on_features_the_norms_of_the_head_are_doubled(head, norms):
    model = make_model(config=replace(CONFIG, backbone="features", frozen=True, head=head))
    assert len(model.auxiliary.norms) == norms
    METHOD.step(model, make_batch(shape=(3,))).total.backward()
    assert model.encoder.projection[0].weight.grad.abs().sum() > 0


def test_a_step_in_a_copy_is_the_same():
    model, batch = make_model(), make_batch()
    twin = copy.deepcopy(model)
    assert torch.equal(METHOD.step(model, batch).total, METHOD.step(twin, batch).total)
    for (name, one), (_, two) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(one, two), name


# What it refuses


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.config(tiny.write_data(tmp_path_factory.mktemp("data") / "data.npz"), steps=1)


def test_it_starts_from_another_run_only(base, tmp_path):
    with pytest.raises(ValueError, match="opencos needs the encoder of a SimCLR run"):
        ropaws.train(with_method(base, METHOD), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_other_run_needs_a_projection_head(base, tmp_path):
    backbone = build_encoder(base.model, channels=1).backbone
    torch.save(backbone.state_dict(), tmp_path / "backbone.pth")
    config = with_method(base, METHOD)
    config = replace(config, model=replace(config.model, init=tmp_path / "backbone.pth"))
    with pytest.raises(ValueError, match="no projection head; train one with --method simclr"):
        ropaws.train(config, tmp_path / "run")


def test_it_starts_from_the_projection_head_of_any_method(base, tmp_path):
    for method in (SimCLR(), FixMatch()):
        folder = ropaws.train(with_method(base, method), tmp_path / type(method).__name__)
        config = with_method(base, METHOD)
        config = replace(config, model=replace(config.model, init=folder / "model.safetensors"))
        run = ropaws.Run(ropaws.train(config, folder / "second"))
        first = ropaws.Run(folder).model
        head = getattr(first, "encoder", first).projection
        torch.testing.assert_close(run.model.encoder.projection.state_dict(), head.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"confidence": 1.0}, "confidence must be at least 0 and below 1"),
        ({"top_share": -0.1}, "top_share must be at least 0"),
        ({"soft_weight": -1.0}, "soft_weight must be at least 0"),
        ({"soft_temperature": 0.0}, "soft_temperature must be positive"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        OpenCoS(**settings)
