"""The command line as a user meets it."""

import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ropaws import recipes
from ropaws.classify.in_class_share import BORDER
from ropaws.cli.main import COMMANDS, main
from ropaws.methods import PAWS
from ropaws.run.config import read_config, to_json
from tests import tiny


def fails(capsys, *arguments):
    """Exit code 2 and one line on stderr; that line."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("ropaws: ")
    return said


@pytest.fixture
def base(tmp_path):
    """A config.json of a tiny run."""
    path = tmp_path / "base.json"
    path.write_text(json.dumps(to_json(tiny.config(tiny.write_data(tmp_path / "data.npz")))))
    return path


def test_help_names_every_command(capsys):
    main(["--help"])
    text = capsys.readouterr().out
    for command in ("demo", "train", "evaluate", "recipes"):
        assert f"  {command} " in text
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code in (0, None)
        assert f"usage: ropaws {command}" in capsys.readouterr().out
    main(["--version"])
    assert capsys.readouterr().out.startswith("ropaws 0.")


def test_the_help_of_predict_and_the_docs_agree_on_the_threshold(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--help-all"])
    told = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    docs = " ".join((Path(__file__).parents[2] / "docs/own-data.md").read_text().split())
    assert BORDER == 0.5
    for text in (told, docs):
        assert "one half" in text
        assert "95 % of the labeled images reach" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_screen_with_every_option_of_a_command(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    short = capsys.readouterr().out
    assert short.count("\n") <= 40
    assert f"`ropaws {command} --help-all`" in short
    with pytest.raises(SystemExit) as end:
        main([command, "--help-all"])
    assert end.value.code == 0
    every = set(re.findall(r"^[│ ] (--[\w.-]+)", capsys.readouterr().out, re.MULTILINE))
    shown = set(re.findall(r"^  (--\S+)", short, re.MULTILINE))
    shown = {option.replace("[no-]", "") for option in shown}
    assert shown <= every
    if command != "train":
        assert shown == every


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("predict", "usage: ropaws predict RUN SOURCES ... [options]"),
        ("suggest", "usage: ropaws suggest [RUN] [options]"),
        ("demo", "usage: ropaws demo [options]"),
    ],
)
def test_the_usage_names_what_comes_without_a_flag(capsys, command, usage):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == usage
    assert not any(one == other == "" for one, other in itertools.pairwise(lines))


def test_help_of_train_begins_with_its_two_uses_and_has_groups(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [
        "  ropaws train --labeled photos/labeled --unlabeled photos/pool --out runs/mine",
        "  ropaws train --recipe cifar10-25 --out runs/cifar",
    ]
    places = [lines.index(heading) for heading in ("data", "what to train", "where results go", "how long")]
    assert places == sorted(places)
    assert "cifar10-25" in recipes.RECIPES


def test_the_whole_help_of_train_lists_every_field(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    text = capsys.readouterr().out
    for flag in (
        "--recipe",
        "--resume",
        "--method.prior-temperature",
        "--model.backbone",
        "--data.source",
        "--augment.small-crops",
        "--support.views",
        "--optim.peak",
        "--train.steps",
    ):
        assert flag in text


def test_recipes_are_listed_and_shown(capsys):
    main(["recipes"])
    text = capsys.readouterr().out
    assert all(name in text for name in recipes.RECIPES)
    main(["recipes", "cifar10-25"])
    assert json.loads(capsys.readouterr().out) == to_json(recipes.get("cifar10-25"))


def test_any_field_is_a_flag_and_a_config_repeats_the_run(base, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    main(
        ["train", str(base), "--method", "paws", "--method.temperature", "0.2", "--train.steps", "2",
         "--augment.scale", "0.5", "0.9", "--no-report", "--out", str(one)]
    )  # fmt: skip
    config = read_config(one / "config.json")
    assert config.method == PAWS(temperature=0.2)
    assert config.augment.scale == (0.5, 0.9)
    assert config.train.steps == 2
    main(["train", str(one / "config.json"), "--no-report", "--out", str(two)])
    assert read_config(two / "config.json") == config
    first, second = ((run / "metrics.jsonl").read_text().splitlines() for run in (one, two))
    assert [json.loads(line)["loss"] for line in first] == [json.loads(line)["loss"] for line in second]


def test_ablation_switches_are_flags(base, tmp_path):
    main(["train", str(base), "--method.no-reweighting", "--method.no-in-domain-prior", "--train.steps", "1",
          "--no-report", "--out", str(tmp_path / "run")])  # fmt: skip
    method = read_config(tmp_path / "run" / "config.json").method
    assert (method.reweighting, method.in_domain_prior, method.semi_supervised_density) == (
        False,
        False,
        True,
    )


def test_evaluate_prints_a_table_or_json(tiny_run, tmp_path, capsys):
    run = tiny.copy(tiny_run, tmp_path / "run")
    main(["evaluate", str(run)])
    assert "accuracy" in capsys.readouterr().out
    main(["evaluate", str(run), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((run / "evaluation.json").read_text())
    main(["evaluate", str(run), "--device", "cpu"])
    assert "device" in fails(capsys, "evaluate", str(run), "--device", "nonsense")


def test_a_finished_run_can_be_resumed_without_harm(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    before = (run / "metrics.jsonl").read_text()
    main(["train", "--resume", str(run), "--no-report"])
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "unknown command 'trian', did you mean 'train'?"),
        (["train"], "say what to train: --labeled FOLDER"),
        (["train", "--recipe", "dmeo"], "unknown recipe 'dmeo', did you mean 'demo'?"),
        (["train", "--recipe", "demo", "--method", "pawz"], "unknown method 'pawz', did you mean 'paws'?"),
        (
            ["train", "--recipe", "demo", "--method.prior-temprature", "1"],
            "unknown option --method.prior-temprature, did you mean --method.prior-temperature?",
        ),
        (["train", "--recipe", "demo", "--train.steps", "0"], "train.steps must be at least 1, got 0"),
        (["train", "--recipe", "demo", "--train.steps", "many"], "--train.steps"),
        (["train", "--recipe", "demo", "stray"], "stray argument 'stray'"),
        (["train", "--recipe", "demo", "--train.batch", "5001"], "use at most 5000"),
        (["train", "--recipe", "demo", "--data.labels-per-class", "101"], "ask for at most 100"),
        (["train", "--recipe", "demo", "--data.source", "x.npz"], "x.npz"),
        (["train", "--recipe", "demo", "--train.device", "cuda:99"], "cannot be used here"),
        (["train", "--recipe", "cifar10-4", "--data.no-download"], "no cifar10 below"),
        (["train", "nowhere.json"], "no file at nowhere.json"),
        (["train", "nowhere.json", "--recipe", "demo"], "not from both"),
        (["train", "--resume"], "Missing value for argument '--resume'"),
        (["train", "--recipe", "demo", "--train.batch", "1"], "train.batch must be at least 2, got 1"),
        (
            ["train", "--recipe", "demo", "--train.seed", str(1 << 65)],
            "train.seed must be at least 0 and below",
        ),
        (["train", "--recipe", "demo", "--method.temperature", "inf"], "method.temperature must be positive"),
        (["train", "--recipe", "demo", "--method.reweight-power", "inf"], "method.reweight_power must be"),
        (["train", "--recipe", "demo", "--optim.start", "nan"], "optim.start must be at least 0, got nan"),
        (["train", "--recipe", "demo", "--data.image-size", "20000"], "data.image_size must be from 8 to"),
        (["train", "--recipe", "demo", "--augment.size", "20000"], "augment.size must be from 1 to"),
        (["train", "--recipe", "demo", "--backbone", "wrn-28-100000"], "a width of at most 256"),
        (["train", "--recipe", "demo", "--backbone", "small-999999999"], "a width of at most 256"),
        (["train", "--recipe", "demo", "--backbone", "wrn-1000-256"], "weights, more than 2,147,483,648"),
        (["train", "--recipe", "demo", "--support.views", "1000000000"], "support.views must be at most"),
        (
            ["train", "--recipe", "demo", "--support.images-per-class", "1000000000"],
            "support.images_per_class must be at most",
        ),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["train", "--resume", "nowhere", "--train.steps", "3"], "takes no other option"),
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["evaluate"], "required"),
        (["export", "nowhere", "--format", "coreml"], "Expected one of ('onnx', 'torch', 'auto')."),
        (["demo", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["demo", "--labels-per-class", "0"], "--labels-per-class must be at least 1, got 0"),
        (["demo", "--labels-per-class", "101"], "ask for at most 100"),
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--sedes", "2"], "unknown option --sedes, did you mean --seeds?"),
        (["recipes", "cifar"], "unknown recipe 'cifar'"),
    ],
)
def test_bad_input_gets_one_line_and_writes_nothing(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "ascii"])
def test_messages_do_not_depend_on_the_terminal(encoding, capsys, monkeypatch):
    """The parser draws its boxes in the encoding of standard output."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert fails(capsys, "demo", "--sedes", "2") == "ropaws: unknown option --sedes, did you mean --seeds?\n"
    assert "invalid literal for int()" in fails(capsys, "demo", "--seeds", "x")
    assert fails(capsys, "recipes", "demo", "stray") == "ropaws: stray argument 'stray'\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8.00 GiB for an array with shape (1, 2)"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 9 bytes"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 8 GiB"),
    ],
    ids=lambda error: str(error)[:12],
)
def test_too_little_memory_is_one_line(error, capsys, monkeypatch):
    def full(arguments):
        raise error

    monkeypatch.setattr("ropaws.cli.bench.demo", full)
    said = fails(capsys, "demo")
    assert said.startswith("ropaws: not enough memory (")
    assert "use smaller images, batches or networks" in said


@pytest.fixture
def faulty(monkeypatch):
    def fail(arguments):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("ropaws.cli.bench.demo", fail)


def test_a_fault_of_our_own_is_one_line_and_a_file_for_a_report(faulty, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["demo"])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("ropaws: unexpected RuntimeError, a fault of ropaws; please open an issue")
    details = next(tmp_path.iterdir())
    assert str(details) in said
    assert details.stat().st_mode & 0o077 == 0  # for this user alone
    text = details.read_text()
    assert "Traceback" in text
    assert "mat1 and mat2" in text


def test_a_fault_without_room_for_a_file_is_shown_in_full(faulty, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit) as end:
        main(["demo"])
    assert end.value.code == 1
    assert "mat1 and mat2" in capsys.readouterr().err


def test_debugging_shows_the_traceback(faulty, monkeypatch):
    monkeypatch.setenv("ROPAWS_DEBUG", "1")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        main(["demo"])


def test_a_corrupt_config_and_a_corrupt_data_file_are_named(capsys, tmp_path, base):
    bad = tmp_path / "bad.json"
    bad.write_text('{"train": {"stepz": 3}}')
    assert "bad.json: unknown field 'train.stepz', did you mean 'steps'?" in fails(capsys, "train", str(bad))
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 broken")
    out = tmp_path / "run"
    assert "data.npz is not a readable .npz file" in fails(capsys, "train", str(base), "--out", str(out))
    assert not out.exists()


def test_an_existing_run_is_not_overwritten(capsys, base, tiny_run):
    assert "holds a run already" in fails(capsys, "train", str(base), "--out", str(tiny_run))


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "ropaws", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ropaws ")


def test_warm_up_keeps_its_share_of_another_number_of_steps(tmp_path):
    """A recipe of 250 steps with 25 of warm-up, for 20 steps; and what is set by hand is kept."""
    data = tiny.write_data(tmp_path / "data.npz")
    base = ["train", "--recipe", "demo", "--data.source", str(data), "--data.labels-per-class", "2",
            "--train.batch", "8", "--train.steps", "20"]  # fmt: skip
    for name, more, warmup in (("a", [], 2), ("b", ["--optim.warmup", "7"], 7)):
        main([*base, *more, "--no-report", "--out", str(tmp_path / name)])
        assert json.loads((tmp_path / name / "config.json").read_text())["optim"]["warmup"] == warmup


def test_a_budget_and_a_number_of_steps_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(
            [
                "train",
                "--recipe",
                "demo",
                "--budget",
                "5s",
                "--train.steps",
                "9",
                "--out",
                str(tmp_path / "x"),
            ]
        )
    assert "--budget works out the number of steps" in capsys.readouterr().err


def test_a_place_that_cannot_hold_a_run_is_found_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SystemExit):
            main(["train", "--recipe", "demo", "--out", str(out)])
        assert "is a file; a run is a folder" in capsys.readouterr().err


def test_ctrl_c_while_torch_is_loading_ends_quietly(monkeypatch, capsys):
    from ropaws import __main__ as entry

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("ropaws.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "ropaws: interrupted\n"
