"""SimCLR's loss, and what all pretraining promises: no labels, and an encoder that others take over."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ropaws
from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import BYOL, FixMatch, MoCoV2, SimCLR, SwAV
from ropaws.methods.simclr import follow, nt_xent, slow_copy
from ropaws.pool.augment import AugmentConfig
from ropaws.run.config import with_method
from tests import oracles, tiny

PRETRAINING = [SimCLR(), MoCoV2(queue=16), BYOL(predictor_hidden=8), SwAV(prototypes=6)]
CONFIG = ModelConfig(backbone="small-8", projection_hidden=8, projection_dims=8)


def make_batch(method, *, rows=6, step=5, shape=(3, 12, 12)):
    random = torch.Generator().manual_seed(step)
    roles = method.views(AugmentConfig(small_crops=1))
    views = {role: torch.randn(rows, *shape, generator=random) for role in roles}
    classes = torch.tensor([0, 1])
    labeled = Support(torch.full((2, *shape), torch.nan), torch.eye(2), classes, classes)
    return Batch(step, 10, views, torch.arange(rows), labeled)


def make_model(method, config=CONFIG):
    torch.manual_seed(0)
    return method.build(build_encoder(config, channels=3), classes=2, pool=6).train()


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_the_loss_is_that_of_the_formula(temperature):
    random = np.random.default_rng(0)
    first, second = (oracles.unit(random.normal(size=(5, 3))) for _ in range(2))
    found = nt_xent(torch.from_numpy(first), torch.from_numpy(second), temperature=temperature)
    assert float(found) == pytest.approx(oracles.nt_xent(first, second, temperature), abs=1e-12)


def test_two_images_by_hand():
    """Views agree, images are orthogonal: -log e^2 / (e^2 + 1 + 1) with temperature 1/2."""
    rows = torch.eye(2, dtype=torch.float64)
    expected = -np.log(np.exp(2) / (np.exp(2) + 2))
    assert float(nt_xent(rows, rows, temperature=0.5)) == pytest.approx(expected)


def test_one_image_has_nothing_to_tell_apart():
    row = F.normalize(torch.randn(1, 4), dim=1).requires_grad_()
    loss = nt_xent(row, row, temperature=0.5)
    loss.backward()
    assert float(loss.detach()) == 0
    assert row.grad.abs().max() == 0


@pytest.mark.parametrize("method", PRETRAINING, ids=lambda method: type(method).__name__)
def test_labels_are_not_looked_at_and_the_whole_encoder_learns(method):
    """Labeled images and their labels are not numbers here."""
    model = make_model(method)
    losses = method.step(model, make_batch(method))
    losses.total.backward()
    assert losses.total.isfinite()
    encoder = getattr(model, "encoder", model)
    for part in (encoder.backbone, encoder.projection):
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in part.parameters())
    assert not method.uses_labels
    frozen = [
        weight for name, weight in model.named_parameters() if name.split(".")[0] in ("target", "key_encoder")
    ]
    assert all(weight.grad is None and not weight.requires_grad for weight in frozen)


@pytest.mark.parametrize("method", PRETRAINING, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_on_features_the_head_is_trained(method, head):
    model = make_model(method, replace(CONFIG, backbone="features", frozen=True, head=head))
    batch = make_batch(method, shape=(3,))
    method.step(model, batch).total.backward()
    projection = getattr(model, "encoder", model).projection
    assert all(
        weight.grad.abs().sum() > 0 for name, weight in projection.named_parameters() if "weight" in name
    )
    with torch.no_grad():
        method.after_step(model, batch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.mark.parametrize("method", PRETRAINING, ids=lambda method: type(method).__name__)
def test_fixmatch_and_fine_tuning_start_from_a_run(method, data, tmp_path):
    """Step 0 of a FixMatch run has the backbone; fine-tuning also has the projection head."""
    base = tiny.config(data, steps=1)
    folder = ropaws.train(with_method(base, method), tmp_path / "first")
    trained = ropaws.Run(folder).model
    encoder = getattr(trained, "encoder", trained)
    still = {"peak": 1e-12, "start": 1e-12, "weight_decay": 0.0}
    config = with_method(base, FixMatch())
    config = replace(
        config,
        model=replace(config.model, init=folder / "model.safetensors"),
        optim=replace(config.optim, **still),
    )
    second = ropaws.Run(ropaws.train(config, tmp_path / "second"))
    for name, weight in second.model.network.encoder.backbone.named_parameters():
        torch.testing.assert_close(weight, encoder.backbone.get_parameter(name))
    ropaws.finetune(folder, rates=[1e-12], epochs=[1])
    tuned = ropaws.Run(folder / "finetuned").model.encoder
    for name, weight in tuned.named_parameters():
        torch.testing.assert_close(weight, encoder.get_parameter(name))


def test_the_view_is_simclrs_with_the_jitter_of_the_run():
    view = SimCLR(smallest_crop=0.2).views(AugmentConfig(size=20, jitter_strength=1.0, blur=0.5))["second"]
    assert (view.size, view.scale, view.jitter_strength, view.blur) == (20, (0.2, 1.0), 1.0, 0.5)
    assert (view.grayscale, view.solarize, view.equalize) == (0.2, 0.0, 0.0)


def test_a_slow_copy_follows_weights_with_the_exact_momentum_and_keeps_its_statistics():
    encoder = build_encoder(CONFIG, channels=3)
    slow = slow_copy(encoder)
    before = [weight.clone() for weight in slow.parameters()]
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(1.0)
    encoder.backbone.norm.running_mean.fill_(7.0)
    follow(slow, encoder, 0.9)
    for was, weight in zip(before, slow.parameters(), strict=True):
        torch.testing.assert_close(weight, was + 0.1)
        assert not weight.requires_grad
    assert slow.backbone.norm.running_mean.max() == 0
    slow.train()([torch.randn(4, 3, 12, 12)])
    assert slow.backbone.norm.running_mean.abs().max() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"smallest_crop": 0.0}, "smallest_crop must be above 0"),
        ({"smallest_crop": 1.5}, "smallest_crop must be above 0 and at most 1"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        SimCLR(**settings)
