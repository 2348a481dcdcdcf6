"""Runs on frozen features: the backbone stays, heads train; resumed, shared out and repeated alike."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import ropaws
import ropaws.run.train as training
from ropaws import Run
from ropaws.core.features import FeatureRows, SeveralKinds
from ropaws.core.files import write_json
from ropaws.core.optimizers import OptimConfig
from ropaws.core.terminal import Terminal
from ropaws.embedding import frozen_features as embedding
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.embedding.convnets import pretrained_weights
from ropaws.methods import FixMatch, RoPAWS, encoder_of
from ropaws.pool.augment import kind_of
from ropaws.pool.corpus import EmbeddedImages
from ropaws.pool.rand_augment import StrongView, WeakView
from ropaws.run.config import embedder_of, to_json
from tests import tiny
from tests.test_distributed import run_worker

ADAM = OptimConfig(name="adam", peak=1e-3, start=1e-3, end=0.0, warmup=0, weight_decay=0.0)


def frozen(config, **model):
    """The same run on frozen features; of a small network with random weights unless others are named."""
    settings = {
        "backbone": "small-8",
        "frozen": True,
        "frozen_views": 2,
        "head": "linear",
        "projection_dims": 16,
    }
    method = RoPAWS(prior="pool", sharpen_temperature=0.5)
    return replace(config, model=ModelConfig(**{**settings, **model}), optim=ADAM, method=method)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of the small backbone, with batch statistics that are not the start's."""
    torch.manual_seed(0)
    backbone = build_encoder(ModelConfig(backbone="small-8"), channels=1).backbone
    for _ in range(3):
        backbone(torch.randn(16, 1, 12, 12) * 2 + 1)
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file({name: value.contiguous() for name, value in backbone.state_dict().items()}, path)
    return path


@pytest.fixture
def config(tmp_path, weights):
    base = tiny.config(tiny.write_data(tmp_path / "data.npz"))
    base = replace(base, data=replace(base.data, feature_cache=tmp_path / "cache"))
    return frozen(base, init=weights)


def same(one, other):
    first, second = (load_file(run / "model.safetensors") for run in (one, other))
    return first.keys() == second.keys() and all(
        first[name].numpy().tobytes() == second[name].numpy().tobytes() for name in first
    )


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_backbone_stays_and_the_head_learns(config, tmp_path, weights):
    run = ropaws.train(config, tmp_path / "run")
    model, start = load_file(run / "model.safetensors"), load_file(weights)
    for name, value in start.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(model[f"backbone.{name}"], value), name
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    assert checkpoint["model"].keys() == model.keys()  # whole, so that it predicts on images
    assert len(checkpoint["optimizer"]["state"]) == 2  # weight and bias of the head
    other = ropaws.train(replace(config, train=replace(config.train, steps=1)), tmp_path / "short")
    assert not torch.equal(
        load_file(other / "model.safetensors")["projection.0.weight"], model["projection.0.weight"]
    )


def test_step_zero_is_the_nearest_neighbor_of_centered_features(config, tmp_path):
    still = replace(
        config, optim=replace(ADAM, peak=1e-30, start=1e-30), train=replace(config.train, steps=1)
    )
    still = replace(still, model=replace(still.model, projection_dims=32))  # as many as there are features
    run = Run(ropaws.train(still, tmp_path / "run"))
    features = run.features(run.corpus.train_images)
    rows = F.normalize(features, dim=1)
    centered = F.normalize(rows - rows.mean(dim=0), dim=1)
    embedded = run.embed(run.corpus.train_images)
    torch.testing.assert_close(embedded @ embedded.T, centered @ centered.T, atol=1e-4, rtol=1e-4)


def test_images_and_cached_features_get_the_same_answer(config, tmp_path):
    run = Run(ropaws.train(config, tmp_path / "run"))
    cached = run.outputs(run.corpus.train_images)
    pixels = run.corpus.train_images[torch.arange(40)].clone()  # not the run's own: the backbone looks
    torch.testing.assert_close(run.outputs(pixels).probs, cached.probs, atol=2e-3, rtol=2e-3)


def test_the_backbone_sees_each_image_once(config, tmp_path, monkeypatch):
    seen = []
    real = embedding._describe
    monkeypatch.setattr(
        embedding, "_describe", lambda net, views: seen.append(len(views)) or real(net, views)
    )
    run = ropaws.train(config, tmp_path / "run")
    assert sum(seen) == 40 * 3
    seen.clear()
    results = ropaws.evaluate(run)
    assert sum(seen) == 20  # test images, in the center view
    assert results["accuracy"] >= 0
    seen.clear()
    ropaws.evaluate(run)
    assert same(run, ropaws.train(config, tmp_path / "again"))
    assert seen == []


def test_killed_and_resumed_it_is_the_same_to_the_bit(config, tmp_path, monkeypatch):
    whole = ropaws.train(config, tmp_path / "whole")
    real = training._row

    def stop(taken, *rest):
        if taken.step == 3:
            raise KeyboardInterrupt
        return real(taken, *rest)

    monkeypatch.setattr(training, "_row", stop)
    with pytest.raises(KeyboardInterrupt):
        ropaws.train(config, tmp_path / "run")
    monkeypatch.setattr(training, "_row", real)
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        path.unlink()  # the features are computed again, by the backbone of the checkpoint
    config.model.init.rename(tmp_path / "gone")
    try:
        ropaws.resume(tmp_path / "run")
    finally:
        (tmp_path / "gone").rename(config.model.init)
    assert same(whole, tmp_path / "run")
    assert losses(whole) == losses(tmp_path / "run")


def last_checkpoint_lost(run, copy):
    shutil.copytree(run, copy)
    (copy / "model.safetensors").unlink()
    (copy / "checkpoint.previous.pt").replace(copy / "checkpoint.pt")
    return copy


def test_two_processes_embed_train_and_resume_as_one(config, tmp_path):
    """From one to two and from two to one: the norms of the backbone are no business of the optimizer."""
    write_json(tmp_path / "config.json", to_json(config))
    one, two = ropaws.train(config, tmp_path / "one"), tmp_path / "two"
    by_two = last_checkpoint_lost(one, tmp_path / "resumed")
    run_worker(tmp_path, 2, "frozen")
    by_one = last_checkpoint_lost(two, tmp_path / "resumed-alone")
    ropaws.resume(by_one)
    expected = load_file(one / "model.safetensors")
    for run in (two, by_two, by_one):
        found = load_file(run / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, equal_nan=True)
    segments = [len(list((tmp_path / name).rglob("*.safetensors"))) for name in ("cache", "b")]
    assert segments == [1, 2]  # each process has written its part


def test_a_frozen_run_can_be_fine_tuned_reported_and_asked(config, tmp_path):
    run = ropaws.train(config, tmp_path / "run")
    results = ropaws.finetune(run, rates=(0.05, 0.1), epochs=(4,))
    assert "accuracy" in results
    tuned, start = load_file(run / "finetuned/model.safetensors"), load_file(run / "model.safetensors")
    assert torch.equal(tuned["encoder.backbone.stem.weight"], start["backbone.stem.weight"])
    assert not torch.equal(tuned["encoder.projection.0.weight"], start["projection.0.weight"])
    assert ropaws.finetune(run, linear=True, rates=(0.1,), epochs=(1,))["accuracy"] >= 0
    assert "<html" in Run(run).report().read_text()
    assert len(ropaws.suggest(run, n=2)) == 2
    images = np.load(config.data.source)["test_images"][:4]
    assert len(ropaws.predict(run, list(images), propagate=True)) == 4


def test_the_whole_network_goes_on_from_a_frozen_run(config, tmp_path):
    first = ropaws.train(config, tmp_path / "first")
    model = replace(config.model, frozen=False, init=first / "model.safetensors", init_projection=True)
    slow = replace(ADAM, peak=1e-9, start=1e-9)
    whole = ropaws.train(replace(config, model=model, optim=slow), tmp_path / "whole")
    start, end = (load_file(run / "model.safetensors") for run in (first, whole))
    for name in ("backbone.stem.weight", "projection.0.weight"):
        torch.testing.assert_close(end[name], start[name], atol=1e-6, rtol=0)
        assert not torch.equal(end[name], start[name])
    assert not isinstance(Run(whole).corpus.train_images, EmbeddedImages)


def test_pretrained_weights_one_label_per_class(tmp_path):
    """The real network, on a pool of forty images with one label per class."""
    base = tiny.config(tiny.write_data(tmp_path / "data.npz"))
    base = replace(
        base,
        data=replace(base.data, labels_per_class=1, feature_cache=tmp_path / "cache"),
        augment=replace(base.augment, size=32),
        train=replace(base.train, steps=20),
    )
    config = frozen(base, backbone="efficientnet-lite0", init=Path("pretrained"), frozen_views=1)
    run = Run(ropaws.train(config, tmp_path / "run"))
    weight = encoder_of(run.model).backbone.state_dict()["_conv_head.weight"]
    assert torch.equal(weight, pretrained_weights()["_conv_head.weight"])
    assert run.facts.normalize.mean == pytest.approx((127 / 255,))
    assert run.evaluate()["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"backbone": "small", "frozen": True}, "model.frozen needs weights that the backbone keeps"),
        ({"frozen_views": -1}, "model.frozen_views must be from 0 to 64, got -1"),
        ({"init_projection": True}, "model.init_projection needs the weights of another run"),
    ],
)
def test_settings_that_make_no_sense_get_one_line(model, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**model)


def test_features_and_images_go_with_different_backbones(config, tmp_path):
    with pytest.raises(
        ValueError, match=r"model\.backbone=features goes with data that are features, got images"
    ):
        ropaws.train(replace(config, model=ModelConfig(backbone="features")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weak_and_strong_views_have_caches_of_their_own(config, tmp_path, monkeypatch):
    """FixMatch on features: each role is drawn from views of its own kind, and resumes to the bit."""
    settings = replace(config, method=FixMatch(confidence=0.5), train=replace(config.train, steps=5))
    seen = {}
    real = FixMatch.step

    def watched(self, model, batch):
        seen.setdefault(batch.step, {role: view.clone() for role, view in batch.views.items()})
        seen[batch.step]["rows"] = batch.pool_index.clone()
        return real(self, model, batch)

    monkeypatch.setattr(FixMatch, "step", watched)
    run = ropaws.train(settings, tmp_path / "run")
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 2  # weak and strong; the labeled images have weak views
    corpus = training.load_corpus(settings.data)
    encoder = encoder_of(Run(run).model)
    for kind, role in ((WeakView(size=12), "weak"), (StrongView(size=12), "strong")):
        embedder = embedder_of(settings, encoder, Run(run).facts.normalize, Terminal(quiet=True))
        bank = embedder.features(corpus.train_images, kind=kind).features
        assert (tmp_path / "cache" / bank.made_from) in folders
        head = encoder.projection[0]  # what a step sees is in its main directions already
        cached = head.directions(bank.views(seen[0]["rows"]), head.mean, head.components)  # (u, 2, d)
        match = torch.isclose(cached, seen[0][role][:, None], atol=1e-5).all(dim=2)
        assert match.any(dim=1).all(), role
        other = torch.isclose(cached, seen[0]["strong" if role == "weak" else "weak"][:, None]).all(dim=2)
        assert not other.any(dim=1).all()


def test_roles_of_one_kind_get_different_views():
    kinds = {
        None: FeatureRows(torch.zeros(4, 2), torch.zeros(4, 3, 2)),
        WeakView(): FeatureRows(torch.zeros(4, 2), torch.arange(24.0).view(4, 3, 2)),
    }
    features = SeveralKinds(kinds)
    assert features.shape == (4, 2)
    rows = torch.tensor([1, 3])
    assert torch.equal(features.views(rows, WeakView()), kinds[WeakView()].views(rows))
    assert kind_of(WeakView()) == WeakView()
    assert kind_of(ropaws.recipes.demo().augment) is None
    assert features.digest() != SeveralKinds(dict(reversed(kinds.items()))).digest()
