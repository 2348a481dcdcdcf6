"""What a method of a user's own may bring: heads, averages, a memory of the pool, views, settings."""

import csv
import itertools
import json
import signal
import sys
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file

import ropaws
from ropaws.cli.main import main
from ropaws.core.files import read_json, write_json
from ropaws.methods import import_method, make_method, method_name
from ropaws.run.config import read_config, to_json, with_method
from ropaws.run.train import TrainingStopped
from tests import tiny
from tests.methods.foreign import MemoryMethod
from tests.test_distributed import assert_close_runs, train_with
from tests.training.test_train import assert_same_run, losses

METHOD = "tests.methods.foreign:MemoryMethod"


def config(data, **train):
    """40 images in batches of 8: an epoch has 5 steps."""
    return with_method(tiny.config(data, **{"steps": 12, **train}), MemoryMethod())


@pytest.fixture
def data(tmp_path):
    return tiny.write_data(tmp_path / "data.npz")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trained by the command line, with a setting of the method's own."""
    folder = tmp_path_factory.mktemp("foreign")
    settings = tiny.config(tiny.write_data(folder / "data.npz"), steps=30, batch=16)
    write_json(folder / "config.json", to_json(settings))
    run = folder / "run"
    main(["train", str(folder / "config.json"), "--out", str(run), "--no-report",
          "--method", METHOD, "--method.decay", "0.7"])  # fmt: skip
    return run


@pytest.fixture
def run(trained, tmp_path):
    return tiny.copy(trained, tmp_path / "run")


def test_its_settings_and_those_of_its_optimizer_reach_the_run(trained):
    values = read_json(trained / "config.json")
    assert values["method"] == {"name": METHOD, "sure": 0.6, "decay": 0.7}
    chosen = {name: values["optim"][name] for name in MemoryMethod.optim}
    assert chosen == dict(MemoryMethod.optim)
    assert read_config(trained / "config.json").method == MemoryMethod(decay=0.7)
    assert method_name(make_method(METHOD)) == METHOD
    assert "temperature" not in {field.name for field in fields(MemoryMethod)}


def test_it_learns_and_its_state_is_saved(trained, tmp_path):
    state = load_file(trained / "model.safetensors")
    memory = state["memory"]
    assert memory.shape == (40, 3)
    torch.testing.assert_close(memory.sum(dim=1), torch.ones(40))
    assert memory.amax(dim=1).mean() > 0.5  # uniform before training
    assert int(state["average.n_averaged"]) == 30
    assert not torch.equal(state["average.module.head.weight"], state["head.weight"])
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert {"known", "pseudo"} <= set(rows[0])
    assert any(row["pseudo"] > 0 for row in rows)
    figures = ropaws.evaluate(tiny.copy(trained, tmp_path / "run"), only=["soft-nn"])
    assert figures["accuracy"] > 0.8  # chance is a third


def interrupt_at(monkeypatch, step, action):
    real, calls = MemoryMethod.step, itertools.count()

    def interrupted(*args):
        if next(calls) == step:
            action()
        return real(*args)

    monkeypatch.setattr(MemoryMethod, "step", interrupted)


def power_cut():
    raise OSError("power cut")


def stop():
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return ropaws.train(config(tiny.write_data(folder / "data.npz")), folder / "run")


@pytest.mark.parametrize(
    ("step", "action", "error"),
    [
        pytest.param(9, power_cut, OSError, id="killed within an epoch"),  # resumes at step 8
        pytest.param(11, power_cut, OSError, id="killed, resumes with a new epoch"),  # at step 10
        pytest.param(6, stop, TrainingStopped, id="stopped"),
    ],
)
def test_resumed_to_the_bit(whole, data, tmp_path, monkeypatch, step, action, error):
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, action)
        with pytest.raises(error):
            ropaws.train(config(data), tmp_path / "part")
    assert 0 < len(losses(tmp_path / "part")) < 12
    ropaws.resume(tmp_path / "part")
    assert_same_run(whole, tmp_path / "part")


def test_two_processes_train_it_as_one_does(data, tmp_path):
    """The module is imported in processes that have not seen it, because --method names it."""
    settings = replace(config(data, steps=6, batch=32), support=replace(tiny.config(data).support, views=4))
    write_json(tmp_path / "config.json", to_json(settings))
    one, two = ropaws.train(settings, tmp_path / "one"), tmp_path / "two"
    train_with(2, tmp_path, two, "--method", METHOD, "--no-report")
    assert_close_runs(one, two)
    torch.testing.assert_close(
        load_file(two / "model.safetensors")["memory"],
        load_file(one / "model.safetensors")["memory"],
        atol=0.03,
        rtol=0,
    )


def test_the_command_line_does_everything_with_it(run, tmp_path, capsys):
    """A method without a temperature: nothing outside of methods asks for one."""
    source, table = str(run.parent / "predict.npz"), tmp_path / "labels.csv"
    tiny.write_data(source)
    main(["evaluate", str(run), "--method", METHOD])
    figures = read_json(run / "evaluation.json")
    parts = {"accuracy", "reliability", "confusion", "propagation", "baselines", "pool", "label_errors"}
    assert parts <= set(figures)
    assert figures["pool"]["threshold"] == 0.5  # its own
    assert "left out" not in capsys.readouterr().err

    main(["predict", str(run), source, "--out", str(table), "--method", METHOD])
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    for row in rows:
        probs = [float(row[f"p({name})"]) for name in ("rows", "columns", "block")]
        assert float(row["confidence"]) == pytest.approx(max(probs), abs=1e-5)
        assert row["in_domain"] == row["confidence"]  # what its own predict says
    main(["predict", str(run), source, "--out", str(table), "--method", METHOD, "--propagate"])

    main(["suggest", str(run), "--n", "3", "--out", str(tmp_path / "next.json"), "--method", METHOD])
    assert len(read_json(tmp_path / "next.json")) == 3

    main(["report", str(run), "--method", METHOD])
    assert METHOD in (run / "report.html").read_text()

    main(["finetune", str(run), "--rates", "0.05", "--epochs", "2", "--method", METHOD])
    assert 0 <= read_json(run / "finetune.json")["accuracy"] <= 1


def test_a_report_of_a_run_that_was_not_evaluated(run, capsys):
    main(["report", str(run), "--method", METHOD])
    assert "Not evaluated" not in capsys.readouterr().err
    assert (run / "evaluation.json").exists()
    assert (run / "report.html").exists()


@pytest.fixture
def planted(run, tmp_path, monkeypatch):
    """A run of a stranger that names a module in the current folder, which leaves a trace if it is run."""
    code = (
        "from pathlib import Path\n"
        "Path(__file__).with_name('trace').touch()\n"
        "from tests.methods.foreign import MemoryMethod\n"
        "class Planted(MemoryMethod):\n"
        "    pass\n"
    )
    (tmp_path / "planted.py").write_text(code)
    values = read_json(run / "config.json")
    values["method"]["name"] = "planted:Planted"
    write_json(run / "config.json", values)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield run
    sys.modules.pop("planted", None)


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "RUN"],
        ["predict", "RUN", "data.npz", "--out", "labels.csv"],
        ["suggest", "RUN"],
        ["finetune", "RUN"],
        ["train", "--resume", "RUN"],
        ["train", "RUN/config.json", "--out", "again"],
    ],
    ids=" ".join,
)
def test_a_run_folder_cannot_have_a_module_imported(planted, data, tmp_path, capsys, command):
    with pytest.raises(SystemExit) as end:
        main([word.replace("RUN", str(planted)) for word in command])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "method 'planted:Planted' is not part of ropaws" in line
    assert "--method planted:Planted" in line
    assert not (tmp_path / "trace").exists()
    assert "planted" not in sys.modules


def test_a_report_of_such_a_folder_says_so_and_imports_nothing(planted, tmp_path, capsys):
    main(["report", str(planted)])
    said = capsys.readouterr().err
    assert said.startswith("Not evaluated: ")
    assert "--method planted:Planted" in said
    assert not (tmp_path / "trace").exists()


def test_a_method_is_looked_for_in_the_current_folder_when_a_person_names_it(planted, tmp_path, capsys):
    main(["evaluate", str(planted), "--only", "soft-nn", "--method", "planted:Planted"])
    assert (tmp_path / "trace").exists()
    assert "accuracy" in capsys.readouterr().out


def test_what_is_no_method_is_refused(tmp_path, monkeypatch):
    for name in ("json:loads", "os:system", "ropaws.methods.method:Method", "tests.methods.foreign:Network"):
        with pytest.raises(ValueError, match="has no dataclass"):
            make_method(name)
    with pytest.raises(ValueError, match="did you mean 'ropaws'"):
        make_method("ropawz")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(ValueError, match="no_such_module cannot be imported"):
        import_method("no_such_module:Method")
    assert sys.path == before
