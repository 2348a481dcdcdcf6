import pytest
import torch

from ropaws.core.records import Embeddings
from ropaws.embedding.backbones import BACKBONES, FEATURES, ModelConfig, build_encoder
from ropaws.embedding.convnets import SmallConvNet, WideResNet, resnet18, resnet50
from ropaws.embedding.encoder import prediction_head, projection_head


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_sizes_are_those_of_the_published_networks():
    """Known parameter counts: WRN-28-2 1.467 M, torchvision's ResNets without fc."""
    assert WideResNet(28, 2).features == 128
    assert count(WideResNet(28, 2)) == 1_467_610 - (128 * 10 + 10)  # the usual count has a 10-class layer
    assert count(resnet18()) == 11_689_512 - (512 * 1000 + 1000)
    assert count(resnet50()) == 25_557_032 - (2048 * 1000 + 1000)
    assert WideResNet(16, 4).features == 256


def test_resnet_has_torchvisions_parameter_names():
    names = set(resnet50().state_dict())
    for name in (
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv3.weight",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.bias",
        "layer4.2.bn3.weight",
    ):
        assert name in names
    assert "layer1.1.downsample.0.weight" not in names
    assert not any(name.startswith("fc") for name in names)
    assert "layer2.0.downsample.0.weight" in resnet18().state_dict()
    assert "layer1.0.downsample.0.weight" not in resnet18().state_dict()


@pytest.mark.parametrize("name", [*sorted(BACKBONES.keys() - {FEATURES}), "wrn-10-1", "small-8"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_backbone_embeds_gray_and_color(name, channels):
    model = build_encoder(ModelConfig(backbone=name, projection_dims=16), channels=channels)
    out = model([torch.rand(3, channels, 28, 28)])
    assert out[0].h.shape == (3, 16)
    out[0].h.sum().backward()
    torch.testing.assert_close(out[0].h.norm(dim=1), torch.ones(3))


def test_batch_norm_uses_the_usual_momentum():
    for module in (WideResNet(10, 1), SmallConvNet()):
        norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        assert norms
        assert {m.momentum for m in norms} == {0.1}


def test_heads_have_the_papers_layers():
    kinds = [type(layer).__name__ for layer in projection_head(8, 16, 4)]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear"]
    kinds = [type(layer).__name__ for layer in prediction_head(8, 4)]
    assert kinds == ["BatchNorm1d", "Linear", "BatchNorm1d", "ReLU", "Linear"]


def test_without_prediction_head_z_is_h_and_with_one_it_is_not():
    images = torch.rand(4, 1, 16, 16)
    (plain,) = build_encoder(ModelConfig(backbone="small"), channels=1)([images])
    torch.testing.assert_close(plain.h, plain.z)
    (predicted,) = build_encoder(ModelConfig(backbone="small", prediction_hidden=8), channels=1)([images])
    assert (predicted.h - predicted.z).abs().max() > 0.01


def test_h_is_the_projection_and_z_the_prediction_of_it():
    model = build_encoder(ModelConfig(backbone="small", prediction_hidden=8), channels=1).eval()
    images = torch.rand(4, 1, 16, 16)
    (out,) = model([images])
    raw = model.projection(model.backbone(images))
    torch.testing.assert_close(out.h, torch.nn.functional.normalize(raw, dim=1))
    torch.testing.assert_close(out.z, torch.nn.functional.normalize(model.prediction(raw), dim=1))


def test_crops_of_one_size_go_through_as_one_batch():
    model = build_encoder(ModelConfig(backbone="small", projection_dims=8), channels=1)
    passes = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: passes.append(tuple(inputs[0].shape)))
    batches = [torch.rand(n, 1, size, size) for n, size in ((5, 20), (3, 12), (2, 20), (3, 12))]
    outputs = model(batches)
    assert passes == [(7, 1, 20, 20), (6, 1, 12, 12)]
    assert [len(out.h) for out in outputs] == [5, 3, 2, 3]
    # Rows come back to the batch they came from.
    model.eval()
    for batch, out in zip(batches, model(batches), strict=True):
        torch.testing.assert_close(out.h, model([batch])[0].h)
        assert isinstance(out, Embeddings)


def test_bf16_answers_in_float32_close_to_float32():
    torch.manual_seed(0)
    model = build_encoder(ModelConfig(backbone="small"), channels=1).eval()
    images = torch.rand(8, 1, 28, 28)
    exact = model([images])[0].h
    model.autocast = torch.bfloat16
    half = model([images])[0].h
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    assert (half * exact).sum(dim=1).min() > 0.99


def test_features_are_the_backbones_for_heads_of_a_methods_own():
    torch.manual_seed(0)
    model = build_encoder(ModelConfig(backbone="small"), channels=1).eval()
    images = torch.rand(4, 1, 16, 16)
    exact = model.features(images)
    torch.testing.assert_close(exact, model.backbone(images))
    assert exact.shape == (4, model.feature_dims) == (4, model.projection[0].in_features)
    model.autocast = torch.bfloat16
    half = model.features(images)
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backbone": "resnet5"}, r"unknown backbone 'resnet5', did you mean 'resnet50'\?"),
        ({"projection_dims": 0}, r"model\.projection_dims must be from 1 to 65536, got 0"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**settings)


def test_a_wide_resnet_of_impossible_depth_is_refused():
    with pytest.raises(ValueError, match="depth 6 n"):
        build_encoder(ModelConfig(backbone="wrn-27-2"), channels=3)


def test_a_linear_head_without_known_features_starts_with_random_directions_and_learns():
    model = build_encoder(ModelConfig(backbone="small-8", head="linear", projection_dims=8), channels=1)
    embedded = model([torch.randn(6, 1, 12, 12)])[0].h
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(6))
    (embedded @ torch.randn(8)).sum().backward()
    assert all(
        weight.grad.abs().sum() > 0 for weight in (model.projection[0].weight, next(model.parameters()))
    )
