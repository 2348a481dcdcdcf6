"""Pages made from run folders: whole, damaged, hostile, and in a real browser."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ropaws
from ropaws.cli.main import main
from ropaws.methods import PAWS
from ropaws.report import charts
from ropaws.report.compare_page import compare_runs
from ropaws.report.run_page import SECTIONS, write_report
from tests import tiny

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a & b </title>")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run with snapshots, a supervised baseline and class names that are no class names."""
    folder = tmp_path_factory.mktemp("report")
    data = tiny.write_data(folder / "data.npz")
    arrays = dict(np.load(data))
    np.savez(data, **{**arrays, "class_names": np.array(HOSTILE)})
    run = ropaws.train(tiny.config(data, keep_every=3), folder / "run")
    ropaws.evaluate(run)
    ropaws.evaluate(run, only=["supervised"])
    data.unlink()  # from here on the images are gone
    return run


@pytest.fixture
def run(evaluated, tmp_path):
    return shutil.copytree(evaluated, tmp_path / "elsewhere")


class Checker(html.parser.HTMLParser):
    """Tags in balance; collects headings, scripts and addresses."""

    VOID = ("meta", "link", "img", "br", "rect", "line", "circle", "polyline")

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.addresses, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def parsed(page):
    checker = Checker()
    checker.feed(Path(page).read_text(encoding="utf-8"))
    assert checker.open == []
    return checker


def test_a_report_has_every_section_and_needs_no_network_and_no_images(run):
    page = parsed(write_report(run))
    assert page.headings == list(SECTIONS)
    assert all(address.startswith("data:") for address in page.addresses)
    text = (run / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert 'name="viewport"' in text
    images = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(images) > 60
    assert all(re.match(r"data:image/(png|jpeg);base64,", source) for source in images)


def test_names_are_shown_as_text(run):
    page = parsed(write_report(run))
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert len(scripts) == 2  # the data of the map and the code of the page, and no other
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (run / "report.html").read_text()


def test_the_verdict_says_what_the_unlabeled_images_brought(run):
    def verdict():
        return re.search(r'class="verdict">(.*?)</p>', write_report(run).read_text())[1]

    def change(path, **values):
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    own, alone = run / "evaluation.json", run / "supervised" / "evaluation.json"
    matrix = [[1000, 0, 0], [0, 1000, 0], [0, 0, 1000]]
    change(own, accuracy=0.8, confusion=matrix)
    change(alone, accuracy=0.7)
    assert "The unlabeled data raised the accuracy from 70.0% to 80.0%. " in verdict()
    assert re.search(r"\d+% of the pool looks out-of-class\.", verdict())
    change(alone, accuracy=0.9)
    assert "lowered the accuracy from 90.0% to 80.0%" in verdict()
    change(alone, accuracy=0.8)
    assert "made no significant difference" in verdict()
    change(alone, accuracy=0.801)
    assert "made no significant difference" in verdict()
    shutil.rmtree(run / "supervised")
    assert "The accuracy on unseen test images is 80.0%." in verdict()
    found = json.loads(own.read_text())
    del found["accuracy"]
    own.write_text(json.dumps(found))
    assert "There are no test images" in verdict()
    own.unlink()
    assert verdict() == "This run has not been evaluated yet."


def test_a_baseline_can_be_another_run(run, tmp_path):
    other = shutil.copytree(run / "supervised", tmp_path / "other")
    shutil.rmtree(run / "supervised")
    row = "supervised baseline: the same network and steps, labeled images alone"
    assert row not in classifiers(write_report(run))
    assert row in classifiers(write_report(run, baseline=other))


def classifiers(page):
    """The cells of the comparison."""
    return re.findall(r"<td>([^<]*)</td>", page.read_text().split("<h2>The pool")[0])


FILES = ["evaluation.json", "gallery.json", "metrics.jsonl", "config.json", "data.json", "environment.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"class_names": 3, "pool": 1}']
)
def test_what_is_missing_or_damaged_costs_its_section_only(run, name, content):
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    page = parsed(write_report(run))
    plain = name in ("config.json", "environment.json") and (content or b"").endswith(b"}")
    assert ("Not shown" in page.headings) != plain  # whatever an object says of settings can be shown
    untouched = {"metrics.jsonl": "Calibration"}.get(name, "Training")
    assert untouched in page.headings


def test_every_part_of_the_evaluation_may_be_nonsense(run):
    whole = json.loads((run / "evaluation.json").read_text())
    for part in whole:
        for nonsense in (None, [], "x", {"a": 1}, [[1]], -1):
            (run / "evaluation.json").write_text(json.dumps({**whole, part: nonsense}))
            page = parsed(write_report(run))
            assert "Training" in page.headings
    images = json.loads((run / "gallery.json").read_text())
    (run / "evaluation.json").write_text(json.dumps(whole))
    for part in images:
        for nonsense in (None, [], "x", {"a": 1}, [[1]], -1):
            (run / "gallery.json").write_text(json.dumps({**images, part: nonsense}))
            assert "Training" in parsed(write_report(run)).headings


def test_a_hostile_or_broken_file_costs_no_more_than_its_sections(run):
    (run / "gallery.json").write_text("[" * 200_000)
    assert "Calibration" in parsed(write_report(run)).headings
    shutil.rmtree(run / "supervised")
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["pool"]["out_of_class"] = float("inf")
    evaluation["suggestions"][0]["rank"] = "<script>alert(3)</script>"
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    config = json.loads((run / "config.json").read_text())
    config["train"]["batch"] = "<script>alert(4)</script>"
    (run / "config.json").write_text(json.dumps(config))
    page = parsed(write_report(run))
    assert {"Calibration", "Label these next"} <= set(page.headings)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 1  # the code of the page; the map is lost
    (run / "config.json").unlink()
    main(["report", str(run)])
    assert "Calibration" in parsed(run / "report.html").headings


def test_names_that_are_not_utf8_can_be_shown(run):
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["suggestions"][0]["name"] = "caf\udce9.jpg"
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    assert "caf?.jpg" in write_report(run).read_text(encoding="utf-8")


def test_a_cut_off_line_of_the_metrics_is_left_out(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert "Training" in parsed(write_report(run)).headings


def test_a_verdict_does_not_boast_of_what_was_not_told_apart(run):
    evaluation = json.loads((run / "evaluation.json").read_text())
    for auroc, warns in ((0.48, True), (0.9, False)):
        (run / "evaluation.json").write_text(json.dumps({**evaluation, "in_domain_auroc": auroc}))
        assert ("hardly separated (AUROC 48%)" in write_report(run).read_text()) == warns


def test_suspected_errors_of_labels_that_predict_nothing_are_not_shown(run):
    evaluation = json.loads((run / "evaluation.json").read_text())
    error = {"position": 0, "image": 0, "name": "x", "label": "a", "suspected": "b", "own": 0.1, "other": 0.9}
    for share, warns in ((0.0, True), (0.8, False)):
        found = {**evaluation, "leave_one_out": share, "label_errors": [error]}
        (run / "evaluation.json").write_text(json.dumps(found))
        assert ("no better than guessing" in write_report(run).read_text()) == warns


def test_labels_that_chance_contradicts_are_no_suspected_errors(run):
    evaluation = json.loads((run / "evaluation.json").read_text()) | {
        "leave_one_out": 0.8,
        "label_errors": [],
    }
    check = {"contradicted": 3, "by_chance": 3.46}
    for found, line in (
        ({**evaluation, "label_check": check}, "other labels contradict 3, and about 3.5 are expected"),
        ({**evaluation, "label_check": {"contradicted": 0, "by_chance": 0.0}}, "No label is contradicted"),
    ):
        (run / "evaluation.json").write_text(json.dumps(found))
        assert line in write_report(run).read_text()


def test_a_baseline_must_be_supervised(run, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(run), "--baseline", str(run)])
    assert "has seen the unlabeled images" in capsys.readouterr().err


def test_the_report_loads_no_torch(run):
    code = (
        "import sys; from ropaws.report.run_page import write_report; from ropaws.report.compare_page import"
        f" compare_runs; write_report({str(run)!r}); compare_runs([{str(run)!r}]);"
        " assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_evaluates_what_was_not(tmp_path, capsys):
    data = tiny.write_data(tmp_path / "data.npz")
    run = ropaws.train(tiny.config(data), tmp_path / "run")
    main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert "Written" in capsys.readouterr().out
    assert "Calibration" in parsed(tmp_path / "page.html").headings
    for name in ("evaluation.json", "gallery.json", "embeddings.safetensors"):
        (run / name).unlink()
    data.unlink()
    main(["report", str(run)])  # no images and no evaluation: what is left
    captured = capsys.readouterr()
    assert "Not evaluated: " in captured.err
    assert {"Training", "Settings", "Not shown"} <= set(parsed(run / "report.html").headings)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """PAWS and RoPAWS with two seeds each, and RoPAWS with another temperature."""
    folder = tmp_path_factory.mktemp("several")
    config = tiny.config(tiny.write_data(folder / "data.npz"))
    variants = {
        "paws": PAWS(),
        "ropaws": config.method,
        "warm": replace(config.method, temperature=0.2),
    }
    runs = []
    for name, method in variants.items():
        for seed in (0, 1) if name != "warm" else (0,):
            settings = replace(config, method=method, train=replace(config.train, seed=seed))
            runs.append(ropaws.train(settings, folder / f"{name}{seed}"))
            ropaws.evaluate(runs[-1], only=["soft-nn", "confusion", "snapshots"])
    return runs


def test_comparison_groups_seeds_and_names_what_differs(several):
    found = compare_runs(several)
    assert [group.name for group in found.groups] == ["paws", "ropaws", "ropaws, temperature 0.2"]
    assert [len(group.runs) for group in found.groups] == [2, 2, 1]
    assert found.varied == ["method.name", "method.temperature"]
    accuracies = [json.loads((run / "evaluation.json").read_text())["accuracy"] for run in several]
    head, rows = found.rows()
    mean, deviation = np.mean(accuracies[:2]), np.std(accuracies[:2], ddof=1)
    assert rows[0][head.index("accuracy")] == f"{100 * mean:.1f}±{100 * deviation:.1f}"
    assert rows[2][head.index("gain")] == f"{100 * (accuracies[4] - mean):+.1f}"
    assert rows[0][-1] == ""


def test_compare_prints_and_writes_a_page(several, tmp_path, capsys):
    arguments = ["compare", *map(str, several)]
    main([*arguments, "--out", str(tmp_path / "all.html")])
    assert "ropaws, temperature" in capsys.readouterr().out.replace("\n", " ")
    page = parsed(tmp_path / "all.html")
    assert {"What differs", "Accuracy per class", "Runs"} <= set(page.headings)
    main([*arguments, "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_a_damaged_part_does_not_stop_a_comparison(several, tmp_path, capsys):
    run = shutil.copytree(several[0], tmp_path / "run")
    evaluation = json.loads((run / "evaluation.json").read_text())
    for nonsense in (None, [{}], {"a": 1}, 3):
        (run / "evaluation.json").write_text(json.dumps({**evaluation, "over_training": nonsense}))
        main(["compare", str(run), "--out", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit):
        main(["compare", str(run), "--out", str(tmp_path / "no" / "page.html")])
    assert "no folder" in capsys.readouterr().err


def test_what_differs_is_readable_however_much_it_is(several, tmp_path, capsys):
    other = shutil.copytree(several[2], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["optim"] = dict.fromkeys(config["optim"], 9.25)
    config["augment"]["jitter"] = 0.125
    (other / "config.json").write_text(json.dumps(config))
    main(["compare", str(several[2]), str(other)])
    told = capsys.readouterr().out
    assert "9.25" in told
    assert "ropaws" in told.split("What differs")[1]


def test_compare_leaves_out_what_was_not_evaluated(several, tmp_path, capsys):
    bare = shutil.copytree(several[0], tmp_path / "bare")
    (bare / "evaluation.json").unlink()
    main(["compare", str(bare), str(several[1])])
    assert "left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no run to compare"):
        compare_runs([bare])


@pytest.fixture(params=[1280, 390])
def window(request, run, tmp_path, browser):
    """The report in a real browser, with everything that its console said."""
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(write_report(run, tmp_path / "page.html").as_uri())
    yield page
    page.close()


def test_hovering_a_point_of_the_map_shows_its_image(window):
    window.locator("#map circle").last.hover()
    tip = window.locator("#tip")
    assert tip.is_visible()
    assert tip.locator("img").count() == 1
    assert "predicted" in tip.inner_text()
    window.mouse.move(2, 2)
    assert not tip.is_visible()
    assert window.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert window.said == []


def test_every_button_of_the_map_hides_its_points(window):
    """Of out-of-class images, too."""
    buttons = window.locator("#classes button")
    shown = window.locator("#map circle:visible")
    left = shown.count()
    assert buttons.last.inner_text() == "out-of-class"
    for number in range(buttons.count()):
        buttons.nth(number).click()
        assert shown.count() < left
        left = shown.count()
    assert left == 0
    buttons.last.click()
    assert shown.count() > 0


def test_no_text_of_a_chart_is_cut_off_or_covers_another(window):
    wrong = """() => [...document.querySelectorAll("svg:not(#map)")].flatMap((chart) => {
      const frame = chart.getBoundingClientRect();
      const texts = [...chart.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
      const cut = texts.filter(([, box]) => box.left < frame.left || box.right > frame.right ||
        box.top < frame.top || box.bottom > frame.bottom + 1);
      const covered = texts.filter(([, a], k) => texts.some(([, b], other) => other > k &&
        a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1));
      return [...cut, ...covered].map(([text]) => text.textContent);
    })"""
    assert window.locator("svg:not(#map) text").count() > 30
    assert window.evaluate(wrong) == []


def test_every_section_uses_the_width_of_the_page(window):
    """Paragraphs, tables, images and charts reach to its right end."""
    narrow = """() => [...document.querySelectorAll("section")].filter((section) => {
      const { left, width } = section.getBoundingClientRect();
      const parts = [...section.querySelectorAll("p, table, figure, .grid, dd")];
      return !parts.some((part) => part.getBoundingClientRect().right > left + 0.95 * width);
    }).map((section) => section.querySelector("h2").textContent)"""
    assert window.evaluate(narrow) == []
    images = "[...document.querySelectorAll('.grid .tile')].map((tile) => tile.getBoundingClientRect().right)"
    assert max(window.evaluate(images)) > 0.9 * window.evaluate("document.body.clientWidth")


def test_the_most_confident_images_are_sorted_by_the_figure_below_them(window):
    rows = """[...document.querySelectorAll("section")].filter((section) =>
      section.querySelector("h2").textContent === "Most confident images per class"
    ).flatMap((section) => [...section.querySelectorAll(".grid")]).map((grid) =>
      [...grid.querySelectorAll(".tile")].map((tile) => parseFloat(tile.textContent)))"""
    found = window.evaluate(rows)
    assert max(map(len, found)) > 3
    assert all(row == sorted(row, reverse=True) for row in found)


def test_the_report_names_the_commands_that_label_next(run, tmp_path):
    moved = shutil.copytree(run, tmp_path / "my run")
    text = html.unescape(write_report(moved).read_text())
    assert f"<code>ropaws explore '{moved}'</code>" in text
    assert f"<code>ropaws suggest '{moved}' --out next.csv</code>" in text
    gallery = json.loads((moved / "gallery.json").read_text())
    (moved / "gallery.json").write_text(json.dumps({**gallery, "thumbnails": {}}))  # as of features
    text = html.unescape(write_report(moved).read_text())
    assert "ropaws explore" not in text
    assert f"ropaws suggest '{moved}'" in text


def test_a_map_is_as_high_as_its_points_need():
    flat = charts.scatter([(0.0, 0.0), (10.0, 1.0), (5.0, 0.5)], [0, 1, -1], label="map")
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', flat).groups())
    lowest = max(float(found) for found in re.findall(r'cy="([\d.]+)"', flat))
    assert height < width / 4
    assert lowest + 4 < height < lowest + 20
