"""Backbones that start from a weight file, and timm's."""

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ropaws
from ropaws.cli.main import main
from ropaws.embedding import timm_backbone as operators
from ropaws.embedding.backbones import ModelConfig, build_encoder, load_init, recognize_backbone
from ropaws.embedding.convnets import resnet18, resnet50
from ropaws.embedding.pretrained import weights_input
from ropaws.embedding.timm_backbone import TimmBackbone
from ropaws.embedding.weight_files import read_weights
from tests import tiny


def torchvision_weights(backbone):
    """As torchvision saves it: with the classifier."""
    width = backbone.features
    head = {"fc.weight": torch.randn(1000, width), "fc.bias": torch.randn(1000)}
    return {**backbone.state_dict(), **head}


def swav_weights(backbone):
    """As SwAV's trainer saves it: names with a prefix, a projection head and prototypes."""
    own = {f"module.{name}": value for name, value in backbone.state_dict().items()}
    heads = {
        "module.projection_head.0.weight": torch.randn(8, 8),
        "module.prototypes.weight": torch.randn(8, 8),
    }
    return {**own, **heads}


def started(path, backbone="resnet18"):
    config = ModelConfig(backbone=backbone, init=path)
    encoder = build_encoder(config, channels=3)
    return encoder, load_init(encoder, config, channels=3)


@pytest.mark.parametrize(
    "kind", ["torchvision", "swav", "moco", "safetensors", "wrapped", "without counters"]
)
def test_weight_files_of_all_kinds_start_a_backbone(tmp_path, kind):
    torch.manual_seed(3)
    source = resnet18()
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth.tar")
    if kind == "torchvision":
        torch.save(torchvision_weights(source), path)
    elif kind == "swav":
        torch.save(swav_weights(source), path)
    elif kind == "moco":
        weights = {f"module.encoder_q.{name}": value for name, value in source.state_dict().items()}
        torch.save({"state_dict": weights, "epoch": 200, "arch": "resnet18"}, path)
    elif kind == "safetensors":
        save_file(source.state_dict(), path)
    elif kind == "wrapped":
        torch.save({"model": {f"backbone.{n}": v for n, v in source.state_dict().items()}}, path)
    else:  # as old torch saved it
        kept = {n: v for n, v in source.state_dict().items() if not n.endswith("num_batches_tracked")}
        torch.save(kept, path)
    encoder, left = started(path)
    images = torch.rand(2, 3, 32, 32)
    source.eval()
    encoder.eval()
    torch.testing.assert_close(encoder.backbone(images), source(images))
    heads = {"torchvision": ["fc.weight", "fc.bias"],
             "swav": ["module.projection_head.0.weight", "module.prototypes.weight"]}  # fmt: skip
    assert left == heads.get(kind, [])


def test_a_file_that_does_not_fit_says_which_keys(tmp_path):
    path = tmp_path / "w.pth"
    torch.save(torchvision_weights(resnet18()), path)
    with pytest.raises(
        ValueError,
        match=r"not fit backbone resnet50: it looks like resnet18; use --backbone resnet18 \(it lacks layer1",
    ):
        started(path, "resnet50")
    wrong = resnet18().state_dict()
    wrong["conv1.weight"] = torch.zeros(64, 1, 7, 7)
    torch.save(wrong, path)
    with pytest.raises(
        ValueError, match=r"another shape: conv1\.weight \(has \(64, 1, 7, 7\), needs \(64, 3, 7, 7\)\)"
    ):
        started(path)
    torch.save({"something": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="it has instead something"):
        started(path)


def test_files_that_are_no_weights_are_refused(tmp_path):
    path = tmp_path / "w.pth"
    with pytest.raises(FileNotFoundError, match="no weight file at"):
        read_weights(path)
    for content in (b"", b"no weights"):
        for name in ("w.pth", "w.safetensors"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=r"model\.init: .*w\."):
                read_weights(tmp_path / name)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="has no tensors by name"):
        read_weights(path)
    torch.save({"model": nn.Linear(2, 2)}, path)  # a pickled module could run code
    with pytest.raises(ValueError, match="damaged or holds more than tensors"):
        read_weights(path)


def test_a_weight_file_tells_its_backbone(tmp_path):
    for name, make in (("resnet18", resnet18), ("resnet50", resnet50)):
        torch.save(torchvision_weights(make()), tmp_path / "w.pth")
        assert recognize_backbone(tmp_path / "w.pth") == name
    torch.save({"x": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"looks like no network for images.*name its --backbone"):
        recognize_backbone(tmp_path / "w.pth")


def test_training_starts_from_another_runs_network(tmp_path):
    data = tiny.write_data(tmp_path / "data.npz")
    first = ropaws.train(tiny.config(data), tmp_path / "first")
    config = tiny.config(data, steps=1)
    config = replace(config, model=replace(config.model, init=first / "model.safetensors"),
                     optim=replace(config.optim, start=1e-12, peak=1e-12, end=1e-12, warmup=0))  # fmt: skip
    second = ropaws.train(config, tmp_path / "second")
    old, new = (read_weights(run / "model.safetensors") for run in (first, second))
    names = [n for n in old if n.startswith("backbone.") and old[n].ndim > 1]
    assert names
    for name in names:
        torch.testing.assert_close(new[name], old[name])
    assert not torch.equal(old["projection.0.weight"], new["projection.0.weight"])
    assert "backbone starts from" in (second / "environment.json").read_text()
    (first / "model.safetensors").unlink()  # needed at the start only
    ropaws.resume(second)
    ropaws.evaluate(second)


def test_init_and_backbone_on_the_command_line(tmp_path, capsys):
    data = tiny.write_data(tmp_path / "data.npz")
    torch.save({"x": torch.zeros(1)}, tmp_path / "w.pth")
    arguments = ["train", "--recipe", "demo", "--data.source", str(data), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        main(
            [
                *arguments,
                "--data.labels-per-class",
                "2",
                "--train.batch",
                "8",
                "--init",
                str(tmp_path / "w.pth"),
            ]
        )
    assert (
        "does not fit backbone small: it looks like no network for images (it lacks"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main([*arguments, "--backbone", "resnet19"])
    assert "unknown backbone 'resnet19', did you mean 'resnet18'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--init", "pretrained"])
    assert "model.init=pretrained goes with dinov2-small, " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# timm: the real one is an extra that brings torchvision along; here a stand-in with its interface.


class FakeTimmModel(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3)
        self.num_features = 5
        self.head_hidden_size = 6
        self.fc = nn.Linear(6, classes) if classes else nn.Identity()

    def forward(self, images):
        if images.shape[2] % 4:
            raise AssertionError("Input height should be divisible by 4.")
        return self.fc(self.conv(images).mean(dim=(2, 3)))


@pytest.fixture
def timm(monkeypatch):
    module = types.ModuleType("timm")
    module.asked = []

    def create_model(name, *, pretrained, num_classes, in_chans, **options):
        module.asked.append((name, pretrained, options))
        if options:
            raise TypeError("unexpected keyword argument 'dynamic_img_size'")
        if pretrained and name == "other_net":
            raise RuntimeError("No pretrained weights exist for other_net.")
        model = FakeTimmModel(in_chans, num_classes)
        if pretrained:
            nn.init.constant_(model.conv.weight, 0.25)
        return model

    module.create_model = create_model
    tagged = ["fake_net.first", "fake_net.second"]
    module.list_models = lambda name="", pretrained=False: (
        [tag for tag in tagged if tag.startswith(name)] if pretrained else ["fake_net", "other_net"]
    )
    module.get_pretrained_cfg = lambda name: types.SimpleNamespace(
        mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), input_size=(3, 240, 240), interpolation="bicubic",
        hf_hub_id="timm/fake_net.first", url="",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "timm", module)
    monkeypatch.setattr(operators, "check_hub", lambda _name: None)  # the hub is not asked in tests
    return module


def test_timm_backbones(timm, tmp_path):
    config = ModelConfig(backbone="timm:fake_net")
    encoder = build_encoder(config, channels=3)
    assert encoder.backbone.features == 6
    (embedded,) = encoder.eval()([torch.rand(2, 3, 16, 16)])
    assert embedded.h.shape == (2, 128)
    with pytest.raises(ValueError, match="timm has no model 'fake_ned', did you mean 'fake_net'"):
        build_encoder(ModelConfig(backbone="timm:fake_ned"), channels=3)
    offered = ModelConfig(backbone="timm:fake_net", init=Path("pretrained"))
    load_init(encoder, offered, channels=3)
    assert encoder.backbone.body.conv.weight.unique().tolist() == [0.25]
    torch.save(FakeTimmModel(3, 10).state_dict(), tmp_path / "w.pth")
    from_file = ModelConfig(backbone="timm:fake_net", init=tmp_path / "w.pth")
    assert load_init(encoder, from_file, channels=3) == ["fc.weight", "fc.bias"]
    assert encoder.backbone.body.conv.weight.unique().numel() > 1


def test_a_run_with_a_timm_backbone(timm, tmp_path):
    data = tiny.write_data(tmp_path / "data.npz")
    config = tiny.config(data)
    config = replace(config, model=replace(config.model, backbone="timm:fake_net"))
    run = ropaws.train(config, tmp_path / "run")
    assert "accuracy" in ropaws.evaluate(run)
    assert not any(pretrained for _, pretrained, _ in timm.asked)
    assert "accuracy" in ropaws.finetune(run, rates=(0.05,), epochs=(1,))
    assert "accuracy" in ropaws.finetune(run / "finetuned", rates=(0.05,), epochs=(1,))


def test_pretrained_timm_weights_get_their_normalization(timm, tmp_path):
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)
    model = replace(config.model, backbone="timm:fake_net", init=Path("pretrained"))
    run = ropaws.train(replace(config, model=model), tmp_path / "run")
    normalize = ropaws.Run(run).facts.normalize
    assert (normalize.mean, normalize.std) == (pytest.approx((0.2,)), pytest.approx((0.5,)))  # grayscale


def test_what_timms_weights_expect_is_taken_from_timm(timm):
    assert weights_input("timm:fake_net")[:2] == (240, "bicubic")


def test_timm_names_may_have_a_tag(timm):
    build_encoder(ModelConfig(backbone="timm:fake_net.second"), channels=3)
    assert timm.asked[-1][0] == "fake_net.second"
    with pytest.raises(ValueError, match=r"no model 'fake_net\.secund', did you mean 'fake_net\.second'"):
        build_encoder(ModelConfig(backbone="timm:fake_net.secund"), channels=3)
    with pytest.raises(ValueError, match=r"no model 'fake_ned\.second', did you mean 'fake_net'"):
        build_encoder(ModelConfig(backbone="timm:fake_ned.second"), channels=3)


def test_weights_that_timm_does_not_have_and_sizes_that_it_refuses_are_one_line(timm):
    with pytest.raises(ValueError, match=r"timm gave no weights of other_net \(No pretrained weights exist"):
        TimmBackbone("other_net", 3, pretrained=True)
    backbone = TimmBackbone("fake_net", 3)
    with pytest.raises(ValueError, match=r"timm:fake_net refuses images of 18 x 18 .*choose another size"):
        backbone(torch.rand(1, 3, 18, 18))


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"pip install 'ropaws\[pretrained\]'"):
        build_encoder(ModelConfig(backbone="timm:fake_net"), channels=3)


def test_missing_operators_are_declared_only_where_torchvision_is_broken(monkeypatch):
    declared = []

    class Library:
        def __init__(self, *_arguments):
            pass

        def define(self, schema):
            declared.append(schema.split("(")[0])

    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(operators.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    operators.declare_missing_operators()
    assert declared == []
    monkeypatch.delitem(sys.modules, "torchvision")

    class Broken:
        def find_spec(self, name, *_rest):
            if name == "torchvision":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    operators.declare_missing_operators()
    assert declared == ["nms", "qnms"]
