"""What every method promises: it learns, its numbers repeat, a killed run resumes to the bit.

That two processes equal one is tested in tests/test_distributed.py, for the same table of methods.
"""

import itertools
from dataclasses import replace

import pytest
import torch

import ropaws
from ropaws.methods import METHODS, make_method, method_name
from ropaws.run.config import with_method
from tests import tiny
from tests.methods.rivals import RIVALS
from tests.training.test_train import assert_same_run, losses

OTHERS = {"fine-tune", "paws", "ropaws", "supervised"}  # older than this table, tested elsewhere
NAMES = list(RIVALS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def teachers(data, tmp_path_factory):
    """Runs that others start from, trained once each."""
    made = {}

    def teacher(method):
        if method is None:
            return None
        if method not in made:
            folder = tmp_path_factory.mktemp("teacher") / "run"
            config = with_method(tiny.config(data, steps=30, batch=16), method)
            made[method] = ropaws.train(config, folder) / "model.safetensors"
        return made[method]

    return teacher


def config_of(name, data, teachers, **train):
    rival = RIVALS[name]
    config = with_method(tiny.config(data, **train), rival.method)
    model = replace(config.model, init=teachers(rival.teacher))
    return replace(config, model=model, optim=replace(config.optim, **rival.optim))


def test_every_method_is_in_the_table():
    assert set(RIVALS) | OTHERS == set(METHODS)
    for name, rival in RIVALS.items():
        assert method_name(rival.method) == name
        assert make_method(name.replace("-", "_")) == METHODS[name]()


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name, data, teachers, tmp_path):
    """Chance is a third. Weights, outputs and parts of the loss are finite and in their ranges."""
    config = config_of(name, data, teachers, steps=RIVALS[name].steps, batch=16)
    run = ropaws.Run(ropaws.train(config, tmp_path / "run"))
    figures = run.evaluate(only=["soft-nn"])
    assert figures["accuracy"] > 0.6
    outputs = run.test.outputs
    torch.testing.assert_close(outputs.probs.sum(dim=1), torch.ones(len(outputs.probs)))
    assert 0 <= outputs.in_domain.min() <= outputs.in_domain.max() <= 1
    assert 0 <= run.threshold <= 1


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_numbers_also_when_killed_and_resumed(name, data, teachers, tmp_path, monkeypatch):
    """40 images in batches of 8: an epoch has 5 steps. The killed run resumes with a new epoch."""
    config = config_of(name, data, teachers, steps=7, checkpoint_every=5)
    whole = ropaws.train(config, tmp_path / "whole")
    kind = METHODS[name]
    with monkeypatch.context() as patch:
        real, calls = kind.step, itertools.count()

        def interrupted(*args):
            if next(calls) == 6:
                raise OSError("power cut")
            return real(*args)

        patch.setattr(kind, "step", interrupted)
        with pytest.raises(OSError, match="power cut"):
            ropaws.train(config, tmp_path / "part")
    assert len(losses(tmp_path / "part")) == 6
    ropaws.resume(tmp_path / "part")
    assert_same_run(whole, tmp_path / "part")


@pytest.mark.parametrize("name", NAMES)
def test_one_label_per_class(name, data, teachers, tmp_path):
    config = config_of(name, data, teachers, steps=6, batch=16)
    config = replace(
        config,
        data=replace(config.data, labels_per_class=1),
        support=replace(config.support, images_per_class=1),
    )
    run = ropaws.train(config, tmp_path / "run")
    assert torch.isfinite(torch.tensor(losses(run))).all()


@pytest.mark.parametrize("name", NAMES)
def test_its_docstring_names_paper_and_deviations(name):
    """The file of a method says where it comes from and what is different here."""
    module = __import__(METHODS[name].__module__, fromlist=["__doc__"])
    assert "et al." in module.__doc__ or "Lee" in module.__doc__
    assert "Deviation" in module.__doc__
    assert "L = " in module.__doc__
