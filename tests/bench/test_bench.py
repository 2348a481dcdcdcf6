"""`ropaws bench`: cells on equal terms, resumable, a failure is a row."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ropaws.bench import bench as bench_module
from ropaws.bench.bench import Bench, run_bench
from ropaws.bench.cells import FEATURES_RATE, Budget, Cell, images_per_step, phase_config, steps_for
from ropaws.bench.entries import JUDGES, Data, Network, base_config, check_entries, known_entries, phases_of
from ropaws.bench.results import paired_difference, summarize
from ropaws.bench.workers import WorkResult, _attempt, run_all
from ropaws.cli.main import main
from ropaws.core.files import read_json
from ropaws.core.records import Losses
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.pretrained import LITE, NETWORKS
from ropaws.methods import FixMatch, Supervised
from ropaws.report.bench_page import _control_cells, _verdict, write_bench_page
from tests import tiny
from tests.bench.worker_tasks import answer, interrupted

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    random = np.random.default_rng(0)
    np.savez(folder / "others.npz", images=random.integers(0, 256, (8, 12, 12), dtype=np.uint8))
    return tiny.write_data(folder / "stripes.npz")


def at_once(work, items, *, workers, started):
    """Instead of worker processes."""
    for number, item in enumerate(items):
        started(number)
        yield WorkResult(number, *_attempt(work, item))


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """A bench of two methods with a curve, unseen outliers, and one that cannot run here."""
    out = tmp_path_factory.mktemp("out") / "bench"
    options = Bench(
        methods=("supervised", "fixmatch", "ropaws"), data=(str(data),), labels=(2,), seeds=2, steps=8,
        unseen=(data.parent / "others.npz",), workers=1, out=out, curve=2,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "run_all", at_once)
        return options, run_bench(options, QUIET)


def test_all_figures_are_there(done):
    options, content = done
    (table,) = content["tables"]
    assert [row["method"] for row in table["rows"]] == list(options.methods)
    for row in table["rows"]:
        assert row["seeds"] == [0, 1]
        assert set(row["figures"]) >= {
            "accuracy", "balanced_accuracy", "auroc", "auroc_unseen", "fpr95", "ece", "confidence_in",
            "confidence_out",
        }  # fmt: skip
        assert ("selected" in row["figures"]) == (row["method"] != "supervised")
        assert row["figures"]["accuracy"]["deviation"] is not None
        assert len(row["curve"]) == 2
        assert row["seconds"] > 0
    chosen = {row["method"]: row["selection"] for row in table["rows"]}
    assert not chosen["supervised"]
    assert all(0 <= share <= 1 for _, share, _ in chosen["fixmatch"])
    assert any(purity is not None for _, _, purity in chosen["ropaws"])  # class -1 of a file is out-of-class
    assert content["data"]["stripes"] == {
        "classes": 3, "in_class": 30, "out_of_class": 10, "tests": 15, "out_tests": 5, "unseen_tests": 8,
    }  # fmt: skip


def test_all_methods_have_the_same_labels_and_see_as_many_images(done):
    options, content = done
    splits, digests = {}, set()
    for seed, method in itertools.product(range(2), options.methods):
        cell = Cell(Data(options.data[0]), 2, seed, method)
        (run,) = cell.folder(options.out).glob("1-*")
        splits.setdefault(seed, set()).add((run / "split.txt").read_text())
        digests.add(read_json(run / "data.json")["digest"])
        assert not (run / "checkpoint.pt").exists()
    assert [len(texts) for texts in splits.values()] == [1, 1]
    assert splits[0] != splits[1]
    assert len(digests) == 1
    images = {row["method"]: row["images"] for row in content["tables"][0]["rows"]}
    for name in ("fixmatch", "supervised"):
        assert images[name] == pytest.approx(images["ropaws"], rel=0.1)  # a few steps: rounding


def test_what_is_done_is_not_done_again_and_more_may_be_added(done, monkeypatch):
    options, content = done
    started = []

    def watched(work, items, **rest):
        started.extend(items)
        return at_once(work, items, **rest)

    monkeypatch.setattr(bench_module, "run_all", watched)
    again = run_bench(options, QUIET)
    assert started == []
    assert again["tables"] == content["tables"]
    more = run_bench(replace(options, methods=("cross_entropy",), seeds=1), QUIET)
    assert [cell.method for cell in started] == ["cross-entropy"]
    rows = more["tables"][0]["rows"]  # the page still has what was there before
    assert {row["method"]: len(row["seeds"]) for row in rows} == {
        "cross-entropy": 1, "fixmatch": 2, "ropaws": 2, "supervised": 2,
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"data": "stripes"}'])
def test_a_damaged_result_is_made_again(done, tmp_path, damage, monkeypatch, capsys):
    monkeypatch.setattr(bench_module, "run_all", at_once)
    options, _ = done
    out = tmp_path / "out"
    shutil.copytree(options.out, out)
    path = Cell(Data(options.data[0]), 2, 0, "supervised").folder(out) / "result.json"
    path.write_text(damage)
    content = run_bench(replace(options, out=out), Console(stderr=True))
    assert "is damaged; its cell is run again" in " ".join(capsys.readouterr().err.split())
    assert len(content["tables"][0]["rows"][0]["seeds"]) == 2
    assert read_json(path)["method"] == "supervised"


def test_cells_of_other_settings_of_a_method_are_refused(done, tmp_path):
    """Of an edited method of one's own, or of another version: they would be averaged with new ones."""
    options, _ = done
    out = tmp_path / "out"
    shutil.copytree(options.out, out)
    path = Cell(Data(options.data[0]), 2, 1, "fixmatch").folder(out) / "result.json"
    result = read_json(path)
    result["given"][0]["method"]["confidence"] = 0.5
    path.write_text(json.dumps(result))
    with pytest.raises(
        ValueError, match=r"cells of fixmatch with other settings: fixmatch.confidence was 0.5"
    ):
        run_bench(replace(options, out=out), QUIET)


def test_other_data_of_the_same_name_are_refused(done, data, tmp_path):
    options, _ = done
    other = tiny.write_data(tmp_path / "stripes.npz", seed=1)
    with pytest.raises(ValueError, match="stripes had other images or labels"):
        run_bench(replace(options, data=(str(other),)), QUIET)
    with pytest.raises(ValueError, match="several files are called 'stripes'"):
        run_bench(replace(options, data=(str(data), str(other)), out=tmp_path / "new"), QUIET)
    for damage in ("[]", "{"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/bench.json").write_text(damage)
        with pytest.raises(ValueError, match=r"bench.json is missing or damaged; choose another --out"):
            run_bench(replace(options, out=tmp_path / "out"), QUIET)


def test_labels_of_a_stranger_are_text_on_the_page(tmp_path):
    row = {"method": "<b>m</b>", "seeds": [0], "figures": {"accuracy": {"mean": 0.5, "deviation": None}},
           "images": 1, "seconds": 1.0, "curve": [], "selection": [], "given": []}  # fmt: skip
    content = {"reference": "ropaws", "fairness": "", "equal": "images", "network": "small",
               "budget": {"steps": 1, "seconds": None}, "data": {}, "failures": [], "protocol": None,
               "tables": [{"data": "<i>", "labels": "<script>", "rows": [row]}]}  # fmt: skip
    write_bench_page(tmp_path / "page.html", content)
    text = (tmp_path / "page.html").read_text()
    assert "<script>" not in text
    assert "<b>m" not in text


def test_verdict_counts_ties_and_leaves_out_rows_with_fewer_draws():
    def row(method, accuracy, draws):
        return {"method": method, "seeds": list(range(draws)), "figures": {"accuracy": {"mean": accuracy}}}

    rows = [row("a", 0.9, 3), row("b", 0.9, 3), row("c", 0.95, 1), row("d", 0.5, 3)]
    assert _verdict({"tables": [{"rows": rows}]}).endswith("in 1 settings: a 1, b 1.")


def test_control_table_leaves_out_what_is_missing():
    assert _control_cells({0.0: 50.0, 2.0: 40.0}, [0.0, 1.0, 2.0]) == ["50.0", "-", "40.0", "-10.0"]
    assert _control_cells({1.0: 50.0}, [0.0, 1.0]) == ["-", "50.0", "-"]


def test_a_folder_of_other_settings_is_refused_with_what_differs(done):
    options, _ = done
    with pytest.raises(ValueError, match=r"bench of other settings: steps was 8 and is 9.*another --out"):
        run_bench(replace(options, steps=9), QUIET)


def test_page_lists_everything_and_is_text(done):
    options, _ = done
    text = (options.out / "report.html").read_text()
    for word in (
        "equal terms",
        "same labeled ones",
        "AUROC unseen",
        "What each method was given",
        "StrongView",
    ):
        assert word in text
    assert "<svg" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_a_cell_that_fails_is_a_row_with_its_reason(data, tmp_path, monkeypatch, capsys):
    """In the process itself, as a worker would not see the change."""

    def step(self, model, batch):
        return Losses(next(model.parameters()).sum() * (torch.nan if batch.step == 2 else 1.0), {})

    monkeypatch.setattr(FixMatch, "step", step)
    monkeypatch.setattr(bench_module, "run_all", at_once)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["bench", "--data", str(data), "--methods", "fixmatch", "supervised", "--labels", "2",
              "--seeds", "1", "--steps", "4", "--out", str(out)])  # fmt: skip
    assert end.value.code == 2
    content = json.loads((out / "results.json").read_text())
    assert [row["method"] for row in content["tables"][0]["rows"]] == ["supervised"]
    (failure,) = content["failures"]
    assert failure["method"] == "fixmatch"
    assert failure["reason"].startswith("the loss became nan at step 2")
    assert "failed: the loss became nan" in (out / "report.html").read_text()  # in the row of the method
    assert "became nan" in (out / "report.html").read_text()
    assert "1 of the cells failed" in capsys.readouterr().err
    errors = list(out.glob("cells/**/error.txt"))
    assert len(errors) == 1


def test_workers_survive_errors_and_kills():
    items = ["a", "wrong", "killed", "bug", "b"]
    found = {items[done.number]: done for done in run_all(answer, items, workers=2, started=lambda _: None)}
    assert found["a"].result == "A"
    assert found["b"].result == "B"
    assert found["wrong"].reason == "no such thing"
    assert not found["wrong"].details
    assert found["bug"].reason == "ZeroDivisionError: oh"
    assert "Traceback" in found["bug"].details
    assert "signal 9" in found["killed"].reason


def test_a_worker_that_ctrl_c_reaches_first_stops_all():
    with pytest.raises(KeyboardInterrupt):
        list(run_all(interrupted, [0], workers=1, started=lambda _: None))


@pytest.mark.slow
def test_a_killed_bench_continues(data, tmp_path):
    """Stopped by Ctrl-C in the middle of a cell: its checkpoint is used."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ropaws", "bench", "--data", str(data), "--methods", "supervised",
               "paws", "--labels", "2", "--seeds", "1", "--steps", "400", "--out", str(out),
               "--workers", "1"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = out / "cells/stripes/labels2/seed0/supervised/1-supervised"
    deadline = time.monotonic() + 120
    while not (first / "metrics.jsonl").exists() or (first / "metrics.jsonl").read_text().count("\n") < 60:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "same command" in errors
    before = read_json(first / "config.json")
    assert (first / "checkpoint.pt").exists()
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    assert len(json.loads((out / "results.json").read_text())["tables"][0]["rows"]) == 2
    assert read_json(first / "config.json") == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fixmach"], "unknown method 'fixmach', did you mean 'fixmatch'"),
        (["--methods", "logistic"], "needs --network pretrained"),
        (["--network", "dino"], "--network must be small, pretrained, or one of dinov2-small"),
        (["--methods", "simclr>soft_nn"], "soft-nn works on features alone"),
        (["--methods", "opencos>ropaws"], "opencos in opencos>ropaws needs the encoder of a SimCLR run"),
        (["--methods", "moco_v2", "moco-v2"], "--methods has an entry twice"),
        (["--methods", "tests.methods.foreign:Nothing"], "has no dataclass 'Nothing'"),
        (["--seconds", "5"], "--seconds goes with --equal time"),
        (["--methods", "simclr>"], "must be METHOD>METHOD"),
        (["--methods", "paws", "paws"], "--methods has an entry twice"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--labels", "5000"], "a class of fashion-demo has .* images"),
        (["--protocol", "iomatch-cifar10"], "did you mean 'iomatch-cifar10-6-4'"),
        (["--protocol", "control", "--labels", "7"], "protocol control has 4, 25 labels per class"),
        (["--protocol", "control", "--data", "cifar10"], "leave --data and --network out"),
        (["--unseen", "gone.npz"], "--unseen: no file at gone.npz"),
        (["--equal", "time", "--seconds", "0"], "--seconds must be positive"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    import re

    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments, "--out", str(tmp_path / "out")])
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_protocol_without_its_data_says_which_file_goes_where(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ropaws.pool.datasets.catalog.fetch", _no_network)
    with pytest.raises(SystemExit):
        main(
            [
                "bench",
                "--protocol",
                "iomatch-cifar10-6-4",
                "--root",
                str(tmp_path),
                "--out",
                str(tmp_path / "o"),
            ]
        )
    assert "cifar-10-python.tar.gz" in capsys.readouterr().err


def _no_network(*_args, **_kwargs):
    raise FileNotFoundError("put cifar-10-python.tar.gz into the folder")


def test_list_shows_protocols_with_published_figures(capsys):
    main(["bench", "--list"])
    said = capsys.readouterr().out
    assert "iomatch-cifar100-50-50" in said
    assert "iomatch 89.7 ± 2.0" in said
    assert all(name in said for name in known_entries())


def test_on_pretrained_features(data, tmp_path, monkeypatch):
    """Classifiers without training beside trained heads; weak and strong views are cached."""
    monkeypatch.setattr(bench_module, "run_all", at_once)
    options = Bench(
        methods=("logistic", "soft-nn", "sskde-median", "fixmatch", "ropaws"), data=(str(data),), labels=(2,),
        seeds=1, steps=4, network="pretrained", curve=1, out=tmp_path / "out",
    )  # fmt: skip
    content = run_bench(options, QUIET)
    assert not content["failures"]
    found = {row["method"]: row for row in content["tables"][0]["rows"]}
    assert set(found) == set(options.methods)
    for name in ("logistic", "soft-nn", "sskde-median"):
        assert found[name]["figures"]["accuracy"]["mean"] > 0.5  # chance is a third
        assert found[name]["images"] == 0
    views = {row["method"]: row["given"][0]["views"] for row in content["tables"][0]["rows"]}
    assert views["fixmatch"] == {"weak": "WeakView", "strong": "StrongView"}


def test_the_features_may_be_those_of_any_named_network(data):
    task, file = Data(str(data)).load(), Path("weights.safetensors")
    start = Bench(network="dinov2-small", init=file).start
    base = base_config(task, Data(str(data)).config(), start, labels=2, steps=10)
    assert (base.model.backbone, base.model.init, base.model.frozen) == ("dinov2-small", file, True)
    assert base.augment.size == NETWORKS["dinov2-small"].cpu_size
    lite = base_config(task, Data(str(data)).config(), Network("pretrained"), labels=2, steps=10)
    assert (lite.model.backbone, lite.model.init, lite.augment.size) == (LITE, PRETRAINED, 96)


def test_equal_time(data, tmp_path):
    """In a worker process."""
    options = Bench(
        methods=("supervised", "ropaws"), data=(str(data),), labels=(2,), seeds=1, equal="time", seconds=1.0,
        curve=1, workers=1, out=tmp_path / "out",
    )  # fmt: skip
    content = run_bench(options, QUIET)
    for row in content["tables"][0]["rows"]:
        assert 1 <= row["given"][0]["steps"] < 10_000  # as many as fitted, on whatever machine
    assert "1 seconds of training each" in (options.out / "report.html").read_text()


def test_budget_counts_views_by_their_pixels(data):
    task = Data(str(data)).load()
    base = base_config(task, Data(str(data)).config(), Network(), labels=2, steps=10)
    labeled = 3 * base.support.images_per_class * base.support.views
    assert images_per_step(base, Supervised(), 3) == labeled
    assert images_per_step(base, FixMatch(), 3) == 2 * base.train.batch + labeled
    small, large = base.augment.small_size, base.augment.size
    paws = phases_of("paws", frozen=False)[0].method
    expected = base.train.batch * (2 + 2 * (small / large) ** 2) + labeled
    assert images_per_step(base, paws, 3) == pytest.approx(expected)
    assert steps_for(base, Supervised(), 3, 10 * labeled, reference=100) == 10
    assert steps_for(base, Supervised(), 3, 10_000 * labeled, reference=100) == 200  # labels alone
    assert steps_for(base, FixMatch(), 3, 1e6, reference=1) > 100


@pytest.mark.parametrize("network", ["small", "pretrained"])
def test_the_fixmatch_family_learns_faster_on_features(data, network):
    task = Data(str(data)).load()
    base = base_config(task, Data(str(data)).config(), Network(network), labels=2, steps=10)
    rates = {}
    for name in ("fixmatch", "cross-entropy", "ccssl", "paws"):
        (phase,) = phases_of(name, frozen=base.model.frozen)
        rates[name] = phase_config(base, phase, 3, 1e5, Budget(steps=10)).optim.peak
    expected = FEATURES_RATE if network == "pretrained" else 0.03
    assert rates == dict.fromkeys(("fixmatch", "cross-entropy", "ccssl"), expected) | {
        "paws": base.optim.peak
    }


def test_phases_share_the_budget(data):
    task = Data(str(data)).load()
    base = base_config(task, Data(str(data)).config(), Network(), labels=2, steps=10)
    phases = phases_of("simclr>fixmatch", frozen=False)
    assert [phase.name for phase in phases] == ["simclr", "fixmatch"]
    assert sum(phase.share for phase in phases) == pytest.approx(1)
    total = 100_000.0
    seen = 0.0
    for phase in phases:
        config = phase_config(base, phase, 3, total, Budget(steps=10))
        seen += config.train.steps * images_per_step(config, phase.method, 3)
    assert seen == pytest.approx(total, rel=0.05)
    for name in known_entries():
        if name not in JUDGES:
            assert sum(phase.share for phase in phases_of(name, frozen=False)) == pytest.approx(1)
    check_entries(known_entries(), frozen=True)


def test_ropaws_is_there_as_in_the_paper_and_as_documented():
    paper = phases_of("ropaws-paper", frozen=False)[0].method
    assert paper.prior_temperature == 0.1
    assert not paper.reweight_entropy
    assert phases_of("ropaws", frozen=True)[0].method.prior == "pool"
    assert phases_of("ropaws", frozen=False)[0].method.prior_temperature == "auto"


def test_paired_difference_has_students_interval():
    """t of 2 degrees of freedom at 97.5 % is 4.3027."""
    found = paired_difference([(0.5, 0.4), (0.6, 0.3), (0.7, 0.5)])
    spread = np.std([0.1, 0.3, 0.2], ddof=1)
    assert found["mean"] == pytest.approx(0.2)
    assert found["high"] - found["mean"] == pytest.approx(4.302653 * spread / np.sqrt(3), rel=1e-5)
    assert found["low"] == pytest.approx(0.4 - found["high"])
    assert paired_difference([(0.5, 0.4), (0.6, 0.4)])["low"] is None  # says nothing yet


def test_differences_are_of_the_same_draws():
    def cell(method, seed, accuracy):
        return {"data": "d", "labels": 4, "seed": seed, "method": method, "figures": {"accuracy": accuracy},
                "images": 1, "seconds": 1.0, "curve": [], "selection": [], "given": []}  # fmt: skip

    cells = [cell("ropaws", 0, 0.5), cell("ropaws", 1, 0.9), cell("paws", 1, 0.8), cell("paws", 2, 0.1)]
    (table,) = summarize(cells)
    row = next(row for row in table["rows"] if row["method"] == "paws")
    assert row["difference"]["accuracy"]["mean"] == pytest.approx(-0.1)
    assert row["difference"]["accuracy"]["pairs"] == 1
    assert "difference" not in next(row for row in table["rows"] if row["method"] == "ropaws")
