"""Several backbones together: features side by side, each part cached by itself, and whole runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import ropaws
from ropaws.core.terminal import Terminal
from ropaws.embedding import frozen_features
from ropaws.embedding.backbones import ModelConfig, init_files, view_sizes
from ropaws.embedding.convnets import resnet18
from ropaws.explore.pool import pool_of_run
from ropaws.run.config import from_json, to_json, with_absolute_paths
from tests.embedding.conftest import needs_timm
from tests.photos import fails, make_photos

QUIET = Terminal(quiet=True)
PAIR = "tiny-dino+resnet18"
pytestmark = needs_timm


@pytest.fixture
def init(tiny_vit, tmp_path):
    """The weight files of both, as one setting."""
    save_file(tiny_vit.state_dict(), tmp_path / "vit.safetensors")
    torch.save(resnet18().state_dict(), tmp_path / "resnet.pth")
    return Path(f"{tmp_path / 'vit.safetensors'}+{tmp_path / 'resnet.pth'}")


def embedded(photos, cache, backbone, init, views=0):
    return ropaws.embed(
        photos / "pool", backbone=backbone, init=init, views=views, cache=cache, console=QUIET
    )


def test_features_stand_side_by_side_each_of_length_one(init, tmp_path):
    photos = make_photos(tmp_path)
    both = embedded(photos, tmp_path / "c", PAIR, init, views=1)
    files = init_files(init)
    alone = [
        embedded(photos, tmp_path / "other", name, file, views=1)
        for name, file in zip(PAIR.split("+"), files, strict=True)
    ]
    assert both.facts["view_sizes"] == [one.facts["size"] for one in alone] == [28, 96]
    for kind in ("features", "views"):
        unit = [F.normalize(torch.from_numpy(getattr(one, kind)), dim=-1) for one in alone]
        torch.testing.assert_close(
            torch.from_numpy(getattr(both, kind)), torch.cat(unit, dim=-1), atol=1e-3, rtol=0
        )


def test_each_part_is_cached_by_itself(init, tmp_path, monkeypatch):
    """After the pair either network alone finds its features; after one, the pair computes the other."""
    photos = make_photos(tmp_path)
    described = []
    describer = frozen_features._describer
    monkeypatch.setattr(
        frozen_features, "_describer", lambda wanted: described.append(wanted.backbone) or describer(wanted)
    )
    first, second = init_files(init)
    embedded(photos, tmp_path / "c", "resnet18", second)
    embedded(photos, tmp_path / "c", PAIR, init)
    embedded(photos, tmp_path / "c", "tiny-dino", first)
    assert described == ["resnet18", "tiny-dino"]


def test_a_run_on_two_networks_predicts_explores_and_is_finetuned(init, tmp_path, capsys):
    photos = make_photos(tmp_path)
    run = ropaws.train_on(
        photos / "labeled", photos / "pool", out=tmp_path / "run", backbone=PAIR, init=init, device="cpu"
    )
    config = json.loads((run / "config.json").read_text())["model"]
    assert (config["backbone"], config["view_sizes"]) == (PAIR, [28, 96])
    for file in init_files(init):
        file.unlink()  # a run carries its weights
    from_files = ropaws.predict(run, photos / "test")
    arrays = np.stack([np.asarray(ropaws.Pool.open(photos / "test").image(row)) for row in range(18)])
    from_memory = ropaws.predict(run, arrays)
    # Arrays of 36 px are decoded once for both networks, files for each: near-ties may differ.
    files, memory = (
        [[*found.probabilities, found.in_domain] for found in each] for each in (from_files, from_memory)
    )
    np.testing.assert_allclose(files, memory, atol=0.08)
    assert sum(max(found.probabilities) > 0.9 for found in from_files) >= 9
    assert len(pool_of_run(ropaws.Run(run)).points) == 45
    ropaws.finetune(run, linear=True, rates=[0.1], epochs=[2], console=QUIET)
    assert len(ropaws.predict(run / "linear", photos / "test")) == 18
    line = fails(capsys, "export", run, "--out", tmp_path / "run.onnx")
    assert "networks together are no single graph" in line


def test_what_networks_together_cannot_do_is_one_line(init, tmp_path, capsys):
    photos = make_photos(tmp_path)
    own = ["--labeled", photos / "labeled", "--unlabeled", photos / "pool", "--out", tmp_path / "run"]
    pair = ["train", *own, "--backbone", PAIR, "--init", init]
    assert "choose one of them" in fails(capsys, *pair, "--train-backbone")
    assert "is not the largest of model.view_sizes" in fails(capsys, *pair, "--augment.size", "128")
    assert "patches of 14 px, which do not divide 96" in fails(
        capsys, *pair, "--model.view-sizes", "96", "96", "--augment.size", "96"
    )
    one_file = init_files(init)[0]
    words = "takes 2 weight files, joined by \\+"
    three = Path(f"{one_file}+{one_file}+{one_file}")
    with pytest.raises(ValueError, match=words):
        ModelConfig(backbone=PAIR, init=three, frozen=True).parts  # noqa: B018
    for backbone in ("tiny-dino+tiny-dino", "tiny-dino+"):
        with pytest.raises(ValueError, match="join different networks"):
            ModelConfig(backbone=backbone, init=init, frozen=True)
    with pytest.raises(ValueError, match="a size for each of the 2 networks"):
        ModelConfig(backbone=PAIR, init=init, frozen=True, view_sizes=(28,))
    with pytest.raises(ValueError, match="goes with several networks"):
        ModelConfig(backbone="resnet18", view_sizes=(28,))
    with pytest.raises(ValueError, match="nothing is known of the input of small's weights"):
        view_sizes(ModelConfig(backbone="resnet18+small", init=init, frozen=True), 96)


def test_the_setting_survives_a_change_of_folder(init, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = Path("vit.safetensors+resnet.pth")
    config = ropaws.RunConfig(
        model=ModelConfig(backbone=PAIR, init=relative, frozen=True, view_sizes=(28, 96))
    )
    absolute = with_absolute_paths(config)
    assert init_files(absolute.model.init) == init_files(init)
    assert from_json(to_json(absolute)) == absolute
    (tmp_path / "a+b.pth").write_bytes(b"")
    assert init_files(tmp_path / "a+b.pth") == (tmp_path / "a+b.pth",)
