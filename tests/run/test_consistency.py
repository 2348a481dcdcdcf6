"""A run stays consistent: with edited settings, snapshots, other devices' arguments, strangers' settings."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import ropaws
from ropaws.cli.main import main
from ropaws.core.randomness import SupportConfig, steps_per_epoch, support_indices
from ropaws.methods import PAWS, encoder_of
from ropaws.methods.classifier import EMA
from ropaws.pool.corpus import Corpus
from ropaws.run.config import read_config, with_method
from ropaws.run.finetune import finetune
from ropaws.run.run import Run
from ropaws.training.checkpoint import snapshots
from tests import tiny


@dataclass(frozen=True, kw_only=True)
class Averaged(PAWS):
    """PAWS with an average of its weights, and optimizer settings of its own."""

    optim: ClassVar = {"name": "sgd", "peak": 0.03}

    def build(self, encoder, *, classes, pool):
        encoder.average = EMA(encoder)
        return encoder


@dataclass(frozen=True, kw_only=True)
class Long(PAWS):
    """Its embeddings do not have unit length."""

    def embed(self, model, images):
        return 3 * super().embed(model, images)


@dataclass(frozen=True, kw_only=True)
class Listed(PAWS):
    """A setting that config.json cannot give back."""

    amounts: frozenset = frozenset()


def test_kept_outputs_belong_to_the_settings_that_made_them(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    before = Run(run).test.outputs.probs
    config = json.loads((run / "config.json").read_text())
    config["method"]["temperature"] = 1.0
    (run / "config.json").write_text(json.dumps(config))
    assert (Run(run).test.outputs.probs - before).abs().max() > 1e-3


def test_a_snapshot_speaks_for_itself_and_leaves_the_folder_alone(tmp_path):
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), keep_every=3)
    run = Run(ropaws.train(config, tmp_path / "run"))
    final = run.test.outputs.embedding
    kept = (run.path / "embeddings.safetensors").read_bytes()
    earlier = run.at_snapshot(snapshots(run.path)[3])
    assert (earlier.test.outputs.embedding - final).abs().max() > 1e-4
    assert (earlier.support.embeddings - run.support.embeddings).abs().max() > 1e-4
    assert (run.path / "embeddings.safetensors").read_bytes() == kept


def test_a_method_copies_weights_after_they_were_loaded(tmp_path):
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)
    first = ropaws.train(replace(config, method=PAWS()), tmp_path / "first")
    second = replace(
        config,
        method=Averaged(),
        model=replace(config.model, init=first / "model.safetensors"),
        optim=replace(config.optim, peak=1e-12, start=0.0, end=0.0),
    )
    model = Run(ropaws.train(second, tmp_path / "second")).model
    loaded = Run(first).model.backbone.stem.weight
    torch.testing.assert_close(model.average.module.backbone.stem.weight, loaded)
    torch.testing.assert_close(encoder_of(model).backbone.stem.weight, loaded)


def test_optimizer_settings_of_a_method_fit_its_peak(tmp_path):
    config = with_method(tiny.config(tmp_path / "x.npz"), Averaged())
    assert (config.optim.start, config.optim.peak, config.optim.end, config.optim.warmup) == (
        0.03,
        0.03,
        0,
        0,
    )

    class Mistyped(Averaged):
        optim: ClassVar = {"lr": 0.1}

    with pytest.raises(ValueError, match="optim has no setting 'lr'"):
        with_method(config, Mistyped())


def test_what_cannot_be_read_back_is_refused_before_training(tmp_path):
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)

    @dataclass(frozen=True, kw_only=True)
    class Local(PAWS):
        pass

    for method in (Listed(), Local()):
        with pytest.raises(ValueError, match=r"cannot be written to config\.json"):
            ropaws.train(replace(config, method=method), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_embeddings_that_are_not_unit_rows_name_the_method(tmp_path):
    config = replace(tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1), method=Long())
    with pytest.raises(ValueError, match=r"Long\.embed gives rows longer than 1"):
        ropaws.train(config, tmp_path / "run")


def test_a_fine_tuned_run_sees_images_as_its_base_does_and_failure_keeps_the_last_one(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    facts = json.loads((run / "data.json").read_text())
    facts["normalization"] = {"mean": [0.25], "std": [0.75]}  # as pretrained weights may ask for
    (run / "data.json").write_text(json.dumps(facts))
    finetune(run, rates=(0.05,), epochs=(2,))
    tuned = json.loads((run / "finetuned" / "data.json").read_text())
    assert tuned["normalization"] == facts["normalization"]
    assert read_config(run / "finetuned" / "config.json").model.init == run / "model.safetensors"
    before = (run / "finetuned" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="batch must be at least 2"):
        finetune(run, rates=(0.05,), epochs=(2,), batch=1)
    assert (run / "finetuned" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="needs no supervised baseline"):
        ropaws.evaluate(run / "finetuned", only=["supervised"])


@pytest.mark.parametrize(("labels", "batch"), [(9, 4), (4000, 1024), (3, 2), (5, 100), (2, 2)])
def test_an_epoch_of_fine_tuning_uses_every_label_once(labels, batch):
    config = SupportConfig(images_per_step=batch, views=1)
    steps = steps_per_epoch(labels, batch)
    classes = torch.zeros(labels, dtype=torch.long)
    parts = [support_indices(step, classes, config, seed=0)[0] for step in range(steps)]
    assert sorted(torch.cat(parts).tolist()) == list(range(labels))
    assert all(2 <= len(part) <= max(batch, 3) for part in parts)


def test_a_run_is_used_as_it_is(tiny_run, tmp_path):
    run = Run(tiny.copy(tiny_run, tmp_path / "run"), device="cpu")
    loaded = run.model
    images = run.corpus.test_images[:2].expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    ropaws.predict(run, list(images))
    ropaws.evaluate(run, only=["soft-nn"])
    ropaws.suggest(run, n=1)
    assert run.model is loaded


def test_evaluate_sees_a_test_set_that_has_changed(tiny_run, tmp_path):
    run = Run(tiny.copy(tiny_run, tmp_path / "run"))
    corpus: Corpus = run.corpus
    before = run.evaluate()["accuracy"]
    changed = corpus._replace(test_labels=(corpus.test_labels + 1) % 3)
    other = Run(run.path, corpus=changed)
    assert other.evaluate()["accuracy"] != before


def test_a_strangers_settings_write_nowhere(trained, tmp_path, capsys):
    run, _photos = trained
    copied = tiny.copy(run, tmp_path / "run")
    config = json.loads((copied / "config.json").read_text())
    config["data"]["cache"] = str(tmp_path / "elsewhere")
    (copied / "config.json").write_text(json.dumps(config))
    for name in ("embeddings.safetensors", "evaluation.json", "gallery.json"):
        (copied / name).unlink(missing_ok=True)
    main(["evaluate", str(copied)])
    assert not (tmp_path / "elsewhere").exists()


def test_options_that_do_nothing_are_errors(tiny_run, tmp_path, capsys):
    for arguments, words in (
        (["predict", str(tiny_run), "--out", str(tmp_path / "a.csv")], "name the images to label"),
        (["evaluate", str(tiny_run), "--method", "paws"], "was trained with ropaws"),
        (["evaluate", str(tiny_run), "--method", "no_such_module:X"], "cannot be imported"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "a.csv").exists()
