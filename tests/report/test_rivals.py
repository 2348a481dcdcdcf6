"""The sentences and tables about simpler classifiers, the in-class share and the learning curve."""

import json
import re

import pytest

from ropaws.insight.accuracy_estimate import binomial_interval
from ropaws.report import rivals, run_page
from ropaws.report.charts import error_chart
from ropaws.report.rivals import share_of, verdict
from ropaws.report.run_files import RunFiles
from ropaws.report.run_page import write_groups_page, write_report

CURVE = {
    "labels_per_class": [1, 2, 4],
    "images": 200,
    "draws": 20,
    "series": {
        "logistic": {
            "accuracy": [0.4, 0.5, 0.58],
            "error": [0.02, 0.02, 0.02],
            "gain": 0.08,
            "gain_error": 0.01,
        },
        "soft_nn": {
            "accuracy": [0.41, 0.49, 0.55],
            "error": [0.02, 0.02, 0.02],
            "gain": 0.06,
            "gain_error": 0.01,
        },
    },
}


def on_tests(own=0.9, logistic=0.8, error=0.01, **more):
    return {
        "on": "test",
        "images": 500,
        "frozen": True,
        "own": {"accuracy": own, "error": 0.01, "auroc": 0.97},
        "logistic": {"accuracy": logistic, "error": 0.01, "auroc": 0.81},
        "soft_nn": {"accuracy": 0.7, "error": 0.01, "auroc": 0.9},
        "gain": own - logistic,
        "gain_error": error,
        **more,
    }


def on_labels(own=0.9, logistic=0.8, error=0.01):
    found = on_tests(own, logistic, error, on="labels", images=15)
    return found | {
        name: {
            "accuracy": (share := found[name]["accuracy"]),
            "error": 0.01,
            **dict(zip(("low", "high"), binomial_interval(round(15 * share), 15, level=0.9), strict=True)),
        }
        for name in ("own", "logistic", "soft_nn")
    }


def test_fifteen_right_of_fifteen_is_no_hundred_percent(files):
    told = verdict(files(features=on_labels(1.0, 0.8)))
    assert "classifies 100% (82 to 100%) correctly" in told


def test_a_run_that_cannot_be_fitted_anew_has_no_figure_of_its_own(files):
    found = on_labels()
    del found["own"]
    run = files(features=found, leave_one_out=1.0)
    assert verdict(run) == "There are no test images, so the accuracy is not known."
    section = rivals.comparison(run)
    assert "this run" not in section
    assert "80.0 (56 to 94%)" in section


def pool(**more):
    return {
        "size": 10,
        "seen": 10,
        "threshold": 0.5,
        "out_of_class": 0.3,
        "classes": {"a": 4, "b": 3},
        "in_domain": [1] * 20,
        **more,
    }


@pytest.fixture
def files(tmp_path):
    """Write an evaluation.json and read it back as the report does."""
    (tmp_path / "config.json").write_text(json.dumps({"method": {"name": "ropaws"}}))
    (tmp_path / "data.json").write_text(json.dumps({"class_names": ["a", "b", "c"]}))

    def write(**evaluation):
        (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
        return RunFiles(tmp_path)

    return write


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (on_tests(), "gets 80.0%, 10.0 points less than this run."),
        (on_tests(0.8, 0.9), "does better: 90.0%, 10.0 points more than this run."),
        (on_tests(0.81, 0.8), "is level with this run: 80.0% on the same images."),
        (on_tests(0.9, 0.8, 0.06), "is level with this run"),
    ],
)
def test_the_verdict_names_logistic_regression_also_where_it_wins(files, found, words):
    run = files(accuracy=found["own"]["accuracy"], auroc=0.97, features=found)
    assert f"Logistic regression on the same features {words}" in verdict(run)
    assert "this run has an AUROC of 97.0%, logistic regression 81.0%." in verdict(run)
    section = rivals.comparison(run)
    assert words in section
    points = 100 * (found["logistic"]["accuracy"] - found["own"]["accuracy"])
    row = f"<td>{found['logistic']['accuracy']:.1%}".rstrip("%") + f"</td><td>{points:+.1f}</td><td>81.0</td>"
    assert f"<td>logistic regression on the same features</td>{row}" in section


def test_without_out_of_class_tests_there_is_no_auroc(files):
    found = on_tests()
    for name in ("own", "logistic", "soft_nn"):
        del found[name]["auroc"]
    run = files(accuracy=0.9, features=found)
    assert "AUROC" not in verdict(run)
    assert "AUROC" not in rivals.comparison(run)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (on_labels(), "logistic regression on the same features 80% (56 to 94%)."),
        (on_labels(0.8, 0.8), "With so few images that is no clear difference."),
        (on_labels(0.7, 0.9, 0.2), "no clear difference."),
        (on_labels(0.7, 0.9), "So logistic regression does better."),
    ],
)
def test_without_tests_the_verdict_says_what_held_out_labels_are_worth(files, found, words):
    run = files(features=found, leave_one_out=0.5)
    told = verdict(run)
    assert told.startswith("There are no test images, so the accuracy is not known. Of 15 labeled images")
    assert f"has not seen them classifies {found['own']['accuracy']:.0%} (" in told
    assert "too high" not in told
    assert words in told
    assert "50%" not in told  # one figure for one thing: not leave-one-out beside folds
    section = rivals.comparison(run)
    assert f"{100 * found['own']['accuracy']:.1f} (" in section
    assert words in section


def test_held_out_labels_at_chance_ask_for_longer_training(files):
    assert "no better than guessing: train longer" in verdict(files(features=on_labels(0.3, 0.9)))


@pytest.mark.parametrize(
    "damage", [None, 3, [], {}, {"on": "test"}, {"on": 1}, {**on_tests(), "own": {}}, on_tests(gain="x")]
)
def test_damaged_figures_are_left_out(files, damage):
    run = files(accuracy=0.9, features=damage)
    assert rivals.on_features(run.evaluation) is None
    assert verdict(run) == "The accuracy on unseen test images is 90.0%."
    assert "this run" in rivals.comparison(run)


def test_the_share_of_the_pool_is_told_with_its_range(files, tmp_path):
    share = {"estimate": 0.42, "low": 0.3, "high": 0.55}
    run = files(accuracy=0.9, pool=pool(in_class_share=share))
    assert "About 42% (30 to 55%) of the pool belongs to your classes." in verdict(run)
    assert "looks out-of-class" not in verdict(run)
    page = write_report(tmp_path).read_text()
    assert "<b>About 42% of them belong to your classes</b> (30 to 55%: where 90 of 100" in page
    assert "more likely out-of-class than in-class" in page
    assert "of the pool belongs to your classes (30 to 55%)" in page
    doubtful = files(accuracy=0.9, pool=pool(in_class_share=share, share_doubt="The share is uncertain: so."))
    assert "belongs to your classes. The share is uncertain: so." in verdict(doubtful)
    known = files(accuracy=0.9, pool=pool(in_class_share=share, truly_out_of_class=0.5))
    assert "of the pool belongs to your classes; 50% truly does." in verdict(known)


@pytest.mark.parametrize("share", [None, 3, {}, {"estimate": 0.4}, {"estimate": "x", "low": 0, "high": 1}])
def test_without_an_estimate_the_threshold_speaks(files, share):
    run = files(accuracy=0.9, pool=pool(in_class_share=share))
    assert share_of(run) is None
    assert "30% of the pool looks out-of-class." in verdict(run)


@pytest.mark.parametrize(
    ("tests", "in_pool", "warns"),
    [(0.5, None, True), (0.9, None, False), (0.5, 0.9, False), (0.9, 0.5, True)],
)
def test_only_the_in_domain_probability_can_make_its_own_share_doubtful(files, tests, in_pool, warns):
    """The score may be another: its AUROC, here of guessing, says nothing of the share."""
    more = {} if in_pool is None else {"in_domain_auroc": in_pool}
    run = files(accuracy=0.9, auroc=0.5, in_domain_auroc=tests, pool=pool(auroc=0.5, **more))
    assert ("hardly separated (AUROC 50%)" in verdict(run)) == warns
    assert "hardly separated" not in verdict(files(accuracy=0.9, auroc=0.5, pool=pool()))


def doubling(gain, error, *, frozen=True):
    return run_page.doubling_sentence(run_page.Doubling(4, 8, gain, error, frozen))


def test_the_last_doubling_in_words():
    start = "Going from 4 to 8 labels per class raised the accuracy by"
    assert (
        doubling(0.08, 0.01)
        == f"{start} 8.0 points (standard error 1.0): more labels are likely to help further."
    )
    assert "unlikely to help much" in doubling(0.01, 0.01)
    assert "learned from all labels already" in doubling(0.01, 0.01, frozen=False)
    assert "likely to help further" in doubling(0.08, 0.01, frozen=False)
    assert "too few images to tell" in doubling(0.1, 0.06)
    assert "too few images to tell" in doubling(0.046, 0.023)  # from nothing to nine points
    assert "lowered the accuracy by 8.0 points" in doubling(-0.08, 0.01)
    assert "look for label errors" in doubling(-0.08, 0.01)


def test_the_section_has_a_curve_a_table_and_the_sentence(files):
    run = files(features=on_tests(), learning_curve={"least": 3, "test": CURVE, "held_out": CURVE})
    section = run_page.learning_curve(run)
    assert section.count("<svg") == 2
    assert "Going from 2 to 4 labels per class raised the accuracy by 8.0 points" in section
    assert "58.0 ± 2.0" in section
    assert "On test images" in section
    assert "too high" not in section
    trained = files(features=on_tests(frozen=False), learning_curve={"least": 3, "held_out": CURVE})
    section = run_page.learning_curve(trained)
    assert section.count("<svg") == 1
    assert "with few labels the curve is too high" in section


def test_too_few_labels_are_said(files):
    assert "at least 3 labels per class" in run_page.learning_curve(files(learning_curve={"least": 3}))


def test_the_sentence_is_of_test_images_where_there_are_some():
    held_out = json.loads(json.dumps(CURVE))
    held_out["series"]["logistic"]["gain"] = 0.5
    both = {"learning_curve": {"held_out": held_out, "test": CURVE}}
    assert run_page.last_doubling(both).gain == 0.08
    assert run_page.last_doubling({"learning_curve": {"held_out": held_out}}).gain == 0.5
    assert run_page.last_doubling({"learning_curve": {"held_out": {"series": 3}}}) is None
    assert run_page.last_doubling({}) is None


def test_a_chart_with_error_bars_is_drawn_to_scale():
    drawn = error_chart({"a": [(1, 40, 5), (2, 50, 5), (4, 60, 5)]}, x_label="x", y_label="y")
    points = [tuple(map(float, p)) for p in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    xs, ys = zip(*points, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # a doubling is a doubling
    bars = [tuple(map(float, b)) for b in re.findall(r'y1="([\d.]+)" y2="([\d.]+)" stroke', drawn)]
    for up, (top, bottom) in zip(ys, bars, strict=True):
        assert up - top == pytest.approx((ys[0] - ys[1]) / 2, abs=0.2)
        assert bottom - up == pytest.approx((ys[0] - ys[1]) / 2, abs=0.2)
    assert all(f">{mark}</text>" in drawn for mark in (1, 2, 4))
    assert "a, 4: 60.0 ± 5.0" in drawn
    assert "#" not in drawn.split("<svg")[1].split(">")[0]
    assert re.findall(r'stroke="(.*?)"', drawn)[0].startswith("var(")  # colors that change with the scheme
    with pytest.raises(ValueError, match="nothing to draw"):
        error_chart({}, x_label="x", y_label="y")


def suggestion(rank):
    return {"rank": rank, "image": rank, "name": f"{rank}.png", "reason": "coat (60%) or dress (30%)?"}


def test_label_these_next_has_thumbnails_where_there_are_some(files, tmp_path):
    files(suggestions=[suggestion(rank) for rank in range(1, 31)])
    uri = "data:image/png;base64,AAAA"
    (tmp_path / "gallery.json").write_text(json.dumps({"thumbnails": {"train/1": uri}}))
    section = write_report(tmp_path).read_text().split("<h2>Label these next</h2>")[1].split("</section>")[0]
    assert section.count("<img") == section.count(uri) == 1
    assert section.count('<div class="item">') == 30
    assert "<summary>18 more</summary>" in section
    assert "30.png" in section


def next_section(folder):
    return write_report(folder).read_text().split("<h2>Label these next</h2>")[1].split("</section>")[0]


def frequencies(count):
    shares = {"estimate": 0.625, "low": 0.5, "high": 0.75}
    small = {"estimate": 0.01, "low": 0.0, "high": 0.03}
    return {"<b>rare</b>": small, "coat": shares, **{f"class {k}": small for k in range(count - 2)}}


def test_frequencies_of_classes_are_bars_with_intervals_the_most_frequent_first(files, tmp_path):
    share = {"estimate": 0.4, "low": 0.3, "high": 0.5}
    files(pool=pool(in_class_share=share, class_prior=frequencies(2)))
    page = write_report(tmp_path).read_text()
    section = page.split("How frequent the classes are</h3>")[1].split("</section>")[0]
    assert section.index("coat") < section.index("&lt;b&gt;rare")
    assert "62% (50 to 75%)" in section
    assert 'style="width:62.5%"' in section
    assert 'style="left:50.0%;width:25.0%"' in section
    assert "<summary>" not in section
    files(pool=pool(in_class_share=share, class_prior=frequencies(25)))
    assert "<summary>5 more</summary>" in write_report(tmp_path).read_text()
    files(pool=pool(in_class_share=share))
    page = write_report(tmp_path).read_text()
    assert "How frequent the classes are" not in page
    assert "taken for equally frequent" in page


def group(number, **values):
    found = {"group": number, "size": 40 - number, "nearest": "coat", "nearest_share": 0.6}
    return {**found, "images": [number, 99], "names": [f"a/{number}.png", "<b>99</b>.png"], **values}


def test_groups_of_likely_new_classes_have_a_section_of_their_own(files, tmp_path):
    mine = [{**suggestion(rank), "kind": "in-class", "in_domain": 0.75} for rank in range(1, 5)]
    files(suggestions=mine, new_classes=[group(1), group(2)])
    uri = "data:image/png;base64,AAAA"
    (tmp_path / "gallery.json").write_text(json.dumps({"thumbnails": {"train/1": uri}}))
    page = write_report(tmp_path).read_text()
    section = page.split("<h2>Likely new classes</h2>")[1].split("</section>")[0]
    assert "Group 1: 39 images" in section
    assert "60% of them look most like coat." in section
    assert section.count('<div class="tile">') == 4
    assert section.count(uri) == 1
    assert "&lt;b&gt;99" in section
    assert "ropaws discover" in section
    assert "About 3 of the 4 belong to a class." in next_section(tmp_path)


def test_no_group_is_said_and_a_damaged_list_costs_its_section_alone(files, tmp_path):
    files(new_classes=[])
    assert "No group among the out-of-class images" in write_report(tmp_path).read_text()
    for damaged in ([{"group": 1}], [3], "x"):
        files(new_classes=damaged)
        page = write_report(tmp_path).read_text()
        assert "<h2>Likely new classes</h2>" not in page
        assert "Likely new classes: its part of the run folder is damaged" in page


def test_a_page_of_groups_alone(tmp_path):
    write_groups_page(tmp_path / "g.html", "<mine>", [group(1)], {1: "data:image/png;base64,AA"}, images=1234)
    page = (tmp_path / "g.html").read_text()
    assert "likely new classes among 1,234 images" in page
    assert "&lt;mine&gt;" in page
    assert page.count("base64,AA") == 1
    assert "--accept" not in page


def test_suggestions_of_damaged_files_are_shown_without_a_guess(files, tmp_path):
    damaged = [{**suggestion(1), "kind": "x"}]
    files(suggestions=damaged)
    section = next_section(tmp_path)
    assert section.count('<div class="item">') == 1
    assert "belong to a class." not in section
