"""Runs on networks of timm's: all or the last blocks are trained, and every kind is exported."""

import copy

import pytest
import torch
from safetensors.torch import save_file

import ropaws
from ropaws.cli.main import main
from ropaws.core.terminal import Terminal
from ropaws.embedding import timm_backbone
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.embedding.pretrained import timm_name
from ropaws.embedding.timm_backbone import TimmBackbone, before_last_blocks
from ropaws.explore.pool import pool_of_run
from ropaws.methods import encoder_of
from tests.embedding.conftest import needs_timm
from tests.photos import fails, make_photos

pytestmark = needs_timm
QUIET = Terminal(quiet=True)
VIT = {"embed_dim": 24, "depth": 2, "num_heads": 2}
SMALL = {  # the kinds of networks in the table, with few weights
    "dinov2-small": VIT,
    "clip-vit-b32": VIT,
    "siglip2-base": VIT,
    "tiny-vit": {"embed_dims": (8, 16, 16, 24), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 3)},
}


@pytest.fixture
def with_few_weights(monkeypatch):
    """timm makes the same kinds of networks, only smaller."""
    create = timm_backbone._create
    sizes = {timm_name(name): options for name, options in SMALL.items()}
    monkeypatch.setattr(
        timm_backbone, "_create", lambda name, **options: create(name, **options, **sizes[name])
    )


@pytest.mark.parametrize("blocks", [None, 1])
def test_the_whole_network_or_its_last_blocks_are_trained(tiny_vit, tmp_path, blocks):
    photos = make_photos(tmp_path)
    save_file(tiny_vit.state_dict(), tmp_path / "w.safetensors")
    options = ["--labeled", photos / "labeled", "--unlabeled", photos / "pool", "--out", tmp_path / "run"]
    options += ["--backbone", "tiny-dino", "--init", tmp_path / "w.safetensors", "--train-backbone"]
    options += ["--train.steps", "4", "--train.batch", "8", "--no-report", "--optim.start", "0.001"]
    main(["train", *map(str, options), *([] if blocks is None else ["--model.train-blocks", str(blocks)])])
    run = ropaws.Run(tmp_path / "run")
    assert run.config.model.train_blocks == blocks
    body = encoder_of(run.model).backbone.body
    before = tiny_vit.state_dict()
    changed = {name for name, value in body.state_dict().items() if not torch.equal(value, before[name])}
    assert any(name.startswith("blocks.1.") for name in changed)
    assert any(name.startswith("blocks.0.") for name in changed) == (blocks is None)
    assert ("cls_token" in changed) == (blocks is None)
    assert len(ropaws.predict(run, photos / "test")) == 18
    assert len(pool_of_run(run).points) == 45
    ropaws.finetune(run, rates=[0.01], epochs=[2], console=QUIET)
    tuned = encoder_of(ropaws.Run(tmp_path / "run/finetuned").model).backbone.body.state_dict()
    assert torch.equal(tuned["cls_token"], before["cls_token"]) == (blocks is not None)


def test_gradients_of_the_last_blocks_are_those_of_the_whole_network(tiny_vit):
    config = ModelConfig(backbone="tiny-dino", init=None)
    whole = build_encoder(config, channels=3)
    part = copy.deepcopy(whole)
    part.train_blocks = 1
    part.requires_grad_()
    images = torch.rand(4, 3, 28, 28)
    for encoder in (whole, part):
        encoder.features(images).square().sum().backward()
    pairs = zip(whole.named_parameters(), part.named_parameters(), strict=True)
    for (name, expected), (_, found) in pairs:
        fixed = name.startswith(
            tuple(f"backbone.body.{part}" for part in ("blocks.0.", "patch", "cls", "pos"))
        )
        assert (found.grad is None) == (fixed or expected.grad is None)
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)


def test_batch_norms_before_the_last_blocks_keep_their_statistics(with_few_weights):
    encoder = build_encoder(ModelConfig(backbone="tiny-vit", train_blocks=1), channels=3).train()
    weights, modules = before_last_blocks(encoder.backbone, 1)
    assert not any(weight.requires_grad for weight in weights)
    assert not any(part.training for module in modules for part in module.modules())
    assert encoder.backbone.body.stages[-1].training


def test_blocks_that_a_network_does_not_have_are_refused_first(tiny_vit, tmp_path, capsys):
    photos = make_photos(tmp_path)
    save_file(tiny_vit.state_dict(), tmp_path / "w.safetensors")
    own = ["--labeled", photos / "labeled", "--unlabeled", photos / "pool", "--out", tmp_path / "run"]
    init = ["--backbone", "tiny-dino", "--init", tmp_path / "w.safetensors"]
    words = "model.train_blocks=3: this backbone has 2 blocks; choose fewer"
    assert words in fails(capsys, "train", *own, *init, "--train-backbone", "--model.train-blocks", "3")
    assert not (tmp_path / "run/frozen/config.json").exists()
    assert "goes with --train-backbone" in fails(capsys, "train", *own, *init, "--model.train-blocks", "1")
    with pytest.raises(ValueError, match="none, being no transformer"):
        build_encoder(ModelConfig(backbone="resnet18", train_blocks=1), channels=3)


def check_export(backbone, tmp_path):
    """export compares what the file says with what the run says, and writes it only if they agree."""
    pytest.importorskip("onnxruntime")
    photos = make_photos(tmp_path)
    torch.manual_seed(0)
    body = TimmBackbone(timm_name(backbone), 3).body
    save_file({n: v.contiguous() for n, v in body.state_dict().items()}, tmp_path / "w.safetensors")
    options = ["--labeled", photos / "labeled", "--unlabeled", photos / "pool", "--out", tmp_path / "run"]
    options += ["--backbone", backbone, "--init", tmp_path / "w.safetensors", "--train.device", "cpu"]
    main(["train", *map(str, options), "--train.steps", "4", "--train.batch", "8", "--no-report"])
    found = ropaws.export(tmp_path / "run", tmp_path / "run.onnx")
    assert max(found.metadata["verification"]["differences"].values()) < 1e-3


@pytest.mark.parametrize("backbone", SMALL)
def test_every_kind_of_network_is_exported(with_few_weights, tmp_path, backbone):
    check_export(backbone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", SMALL)
def test_every_kind_of_network_is_exported_in_its_full_size(tmp_path, backbone):
    check_export(backbone, tmp_path)
