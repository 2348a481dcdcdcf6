import csv
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from ropaws.classify import head
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore import fitting
from ropaws.explore.answer_log import SKIPPED, RefusedError
from ropaws.explore.browsing import Query, _smallest, browse, details, new_class_list
from ropaws.explore.jobs import Job
from ropaws.explore.page_state import state
from ropaws.explore.session import Session
from ropaws.insight import label_errors
from ropaws.pool.listing import list_labeled
from tests.explore.pools import COUNT, NAMES, OTHERS, label_some, make_points, make_pool, truth
from tests.explore.serving import PATIENCE


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(head, "STEPS", 15)


@pytest.fixture
def session(tmp_path):
    found = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    found.auto_refit = False
    yield found
    found.close()


def table(session):
    session.table.close()
    with (session.folder / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def fit(session):
    assert session.refit()
    session.jobs.wait()
    assert session.error is None


def test_from_nothing_to_predictions(session):
    assert [len(session.suggested()), state(session, "tab")["round"]] == [20, 0]
    assert (session.predicted == UNLABELED).all()
    ids = label_some(session)
    session.label(np.flatnonzero(truth() == OTHERS)[:4].tolist(), OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    known = truth() < OTHERS
    right = session.predicted == np.array([*ids, OUT_OF_CLASS])[truth()]
    inside = np.array(session.fitted.classes)[session.fitted.probs.argmax(axis=1)]
    assert (inside == np.array([*ids, -9])[truth()])[known].mean() > 0.95
    assert right.mean() > 0.7
    shown = state(session, "tab")
    assert shown["round"] == 1
    assert shown["counts"]["labeled"] == 12
    assert shown["counts"]["out_of_class"] == 4
    assert [each["labels"] for each in shown["classes"]] == [4, 4, 4]
    assert sum(each["predicted"] for each in shown["classes"]) == (session.predicted >= 0).sum()


def test_the_view_of_out_of_class_images_is_counted_as_it_is_shown(session):
    label_some(session)
    session.label(np.flatnonzero(truth() == OTHERS)[:4].tolist(), OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    counts = state(session, "tab")["counts"]
    assert counts["out_of_class"] == 4
    assert counts["outside"] == browse(session, Query(view="out-of-class"))["total"] > 4


def test_suggestions_and_estimates_follow_a_round(session):
    label_some(session)
    session.label([int(np.flatnonzero(truth() == OTHERS)[0])], OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    assert not set(session.suggested()) & set(np.flatnonzero(session.codes != UNLABELED).tolist())
    rounds = state(session, "tab")["panel"]["rounds"]
    assert [(r["round"], r["labels"], r["answered"]) for r in rounds] == [(1, 12, 0)]  # nothing was predicted
    assert 0 <= rounds[0]["low"] <= rounds[0]["accuracy"] <= rounds[0]["high"] <= 1
    first = session.suggested()[0]
    said = int(session.predicted[first])
    session.label([first], said, why="suggested", tab="tab")
    wrong = next(number for number in session.answers.classes if number != said)
    session.label([session.suggested()[0]], wrong, why="suggested", tab="tab")
    fit(session)
    last = state(session, "tab")["panel"]["rounds"][-1]
    assert last["answered"] == 2
    assert last["right"] in (1, 2)  # the second may have been predicted as `wrong`


def test_answers_survive_a_crash_and_predictions_come_back(session, tmp_path):
    ids = label_some(session)
    session.log.close()  # as if killed: nothing else is written
    again = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    assert np.array_equal(again.codes, session.codes)
    assert list(again.answers.classes) == ids
    again.start_background()
    again.jobs.wait()
    assert again.round == 1
    again.close()


def test_images_are_known_by_name_not_by_number(session, tmp_path):
    ids = label_some(session)
    session.close()
    pool = make_pool(tmp_path / "pool", COUNT)
    fewer = [number for number in range(COUNT) if number != 0]
    moved = replace(pool, images=pool.images[1:], labels=pool.labels[1:], points=pool.points[fewer])
    again = Session(moved, tmp_path / "out")
    assert again.codes[0] == ids[1]  # image 1 has taken the place of image 0
    assert again.answers.labels[pool.names[0]] == ids[0]  # and that is not forgotten
    again.close()


def test_the_labels_that_images_came_with_are_the_first_answers(tmp_path):
    pool = make_pool(tmp_path / "pool", labels={0: "circle", 1: "square", 5: "square"})
    session = Session(pool, tmp_path / "out")
    assert list(session.answers.classes.values()) == ["circle", "square"]
    assert session.codes[[0, 1, 5]].tolist() == [0, 1, 1]
    assert session.answers.right_since == []
    session.label([1], UNLABELED, why="grid", tab="tab")
    session.close()
    again = Session(pool, tmp_path / "out")
    assert again.codes[1] == UNLABELED  # what was cleared stays cleared
    again.close()


def test_labels_csv_is_what_training_reads(session):
    ids = label_some(session, per_class=2)
    outside, skipped = np.flatnonzero(truth() == OTHERS)[:2].tolist()
    session.label([outside], OUT_OF_CLASS, why="grid", tab="tab")
    session.label([skipped], SKIPPED, why="grid", tab="tab")
    session.rename_class(ids[0], "disk", tab="tab")
    rows = table(session)
    assert len(rows) == 7
    assert {row["label"] for row in rows if row["out_of_class"] == "False"} == {"disk", "square", "star"}
    assert [row["label"] for row in rows if row["out_of_class"] == "True"] == [""]
    listing = list_labeled(session.folder / "labels.csv")
    labels = ["disk"] * 2 + ["out-of-class"] + ["square"] * 2 + ["star"] * 2
    assert sorted(filter(None, listing.labels)) == labels


def test_classes_are_merged_with_their_predictions(session):
    ids = label_some(session)
    fit(session)
    before = session.predicted.copy()
    session.merge_class(ids[1], ids[0], tab="tab")
    assert not (session.predicted == ids[1]).any()
    assert (session.predicted[before == ids[1]] == ids[0]).all()
    assert (session.codes == ids[0]).sum() == 8
    session.undo("tab")
    assert (session.codes == ids[1]).sum() == 4


def test_a_new_class_from_a_cluster_of_others(session):
    label_some(session, per_class=6)
    session.label(np.flatnonzero(truth() == OTHERS)[:3].tolist(), OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    clusters = new_class_list(session)
    assert clusters
    page = browse(session, Query(view="new-class", cluster=clusters[0]["cluster"]))
    members = [item["id"] for item in page["items"]]
    assert page["total"] == clusters[0]["size"]
    assert (truth()[members] == OTHERS).mean() > 0.8
    number = session.add_class("moon", members, tab="tab")
    assert (session.codes == number).sum() == len(members)
    assert not any(each["cluster"] == clusters[0]["cluster"] for each in new_class_list(session))
    session.undo("tab")
    assert number not in session.answers.classes


def test_frequencies_of_the_classes_are_on_the_panel(session):
    """Unequal labels say that classes are not equally frequent; a class that goes takes the figures along."""
    assert state(session, "tab")["panel"]["frequencies"] == []
    ids = label_some(session, per_class=3)
    session.label(np.flatnonzero(truth() == 0)[3:12].tolist(), ids[0], why="grid", tab="tab")
    fit(session)
    found = state(session, "tab")["panel"]["frequencies"]
    assert {each["id"] for each in found} == set(ids)
    assert sum(each["estimate"] for each in found) == pytest.approx(1, abs=1e-4)
    assert [each["estimate"] for each in found] == sorted((e["estimate"] for e in found), reverse=True)
    assert all(0 <= each["low"] <= each["estimate"] <= each["high"] <= 1 for each in found)
    assert found[0]["name"] == session.answers.classes[found[0]["id"]]
    session.delete_class(ids[1], tab="tab")
    assert state(session, "tab")["panel"]["frequencies"] == []


def test_groups_say_which_images_make_a_class(session):
    label_some(session, per_class=7)
    session.label(np.flatnonzero(truth() == OTHERS)[:3].tolist(), OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    first = new_class_list(session)[0]
    assert len(first["typical"]) == min(7, first["size"])
    page = browse(session, Query(view="new-class", cluster=first["cluster"]))
    assert [item["id"] for item in page["items"]][: len(first["typical"])] == first["typical"]


def test_a_suspected_error_is_confirmed_or_corrected(session, monkeypatch):
    monkeypatch.setattr(label_errors, "GAIN", -np.inf)  # so few errors may be chance
    monkeypatch.setattr(label_errors, "ERROR_RATES", (0.3,))
    ids = label_some(session, per_class=8)
    flipped = np.flatnonzero(truth() == 0)[[0, 1]].tolist()
    session.label(flipped, ids[1], why="grid", tab="tab")
    fit(session)
    page = browse(session, Query(view="label-errors"))
    assert [item["id"] for item in page["items"]][:2] == flipped or set(flipped) <= set(session.suspects())
    item = next(item for item in page["items"] if item["id"] == flipped[0])
    assert item["suggest"] == ids[0]
    assert "circle" in item["note"]
    session.confirm([flipped[0]], tab="tab")
    session.label([flipped[1]], item["suggest"], why="label-error", tab="tab")
    assert not set(flipped) & set(session.suspects())
    session.undo("tab")
    assert flipped[1] in session.suspects()


def test_an_audit_is_a_random_sample_without_answers(session):
    label_some(session)
    found = session.start_audit(45, tab="tab")  # of 30, now and then too few are in-class to speak
    assert found == {"answered": 0, "of": 45}
    open_ones = session.open_audit()
    assert len(set(open_ones)) == 45
    assert (session.codes[open_ones] == UNLABELED).all()
    session.label([open_ones[0]], OUT_OF_CLASS, why="audit", tab="tab")
    panel = state(session, "tab")["panel"]
    assert (panel["audit"]["answered"], panel["audit"]["of"]) == (1, 45)
    assert 10 <= panel["audit_offer"]["within"] <= 20
    ids, known = list(session.answers.classes), truth()
    for number in session.open_audit():
        label = OUT_OF_CLASS if known[number] == OTHERS else ids[known[number]]
        session.label([number], label, why="audit", tab="tab")
    fit(session)
    estimate = state(session, "tab")["panel"]["estimate"]
    assert estimate["kind"] == "audit"
    assert estimate["labels"] <= 45
    audit = state(session, "tab")["panel"]["audit"]
    assert (audit["answered"], audit["of"], audit["predicted"]) == (
        45,
        45,
        0,
    )  # answered before the first fit


def test_a_finished_audit_tells_how_many_predictions_were_right(session):
    ids = label_some(session)
    fit(session)
    session.start_audit(12, tab="tab")
    order = session.open_audit()
    for number in order[:3]:
        wrong = next(each for each in ids if each != session.predicted[number])
        session.label([number], wrong, why="audit", tab="tab")
    for number in order[3:11]:
        session.label([number], int(session.predicted[number]), why="audit", tab="tab")
    session.label([order[11]], SKIPPED, why="audit", tab="tab")
    audit = state(session, "tab")["panel"]["audit"]
    assert [audit[name] for name in ("answered", "of", "right", "predicted")] == [12, 12, 8, 11]


def test_rounds_are_counted_over_answers_which_only_grow(session):
    label_some(session)
    fit(session)
    session.label([0, 4, 8], UNLABELED, why="grid", tab="tab")
    fit(session)
    session.undo("tab")
    session.label([3], OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    rounds = state(session, "tab")["panel"]["rounds"]
    assert [(each["labels"], each["answers"]) for each in rounds] == [(12, 12), (9, 15), (12, 16)]


def test_a_refit_is_cancelled_while_labeling_goes_on(session, monkeypatch):
    label_some(session)
    begun, go_on = threading.Event(), threading.Event()
    real = fitting.fit_round

    def slow(points, answered, report):
        begun.set()
        assert go_on.wait(PATIENCE)
        return real(points, answered, report)

    monkeypatch.setattr(fitting, "fit_round", slow)
    session.refit()
    assert begun.wait(PATIENCE)
    assert not session.refit()  # one at a time
    session.label([100], OUT_OF_CLASS, why="grid", tab="tab")  # does not wait
    assert state(session, "tab")["job"]["kind"] == "refit"
    assert session.jobs.cancel().kind == "refit"
    go_on.set()
    session.jobs.wait()
    assert session.round == 0
    assert session.answers.rounds == []
    assert session.error is None


def test_what_follows_a_job_belongs_to_it(session):
    """Between a refit and the next one there is no moment in which nothing is under way."""
    ended, go_on = threading.Event(), threading.Event()

    def follow():
        ended.set()
        assert go_on.wait(PATIENCE)
        session.jobs.start(Job("refit", "again"), lambda job: None)

    session.jobs.start(Job("refit", "first"), lambda job: None, then=follow)
    assert ended.wait(PATIENCE)
    assert state(session, "tab")["job"]["text"] == "first"
    with pytest.raises(TimeoutError, match="still first"):
        session.jobs.wait(0.05)
    go_on.set()
    session.jobs.wait()
    assert state(session, "tab")["job"] is None


def test_refits_come_by_themselves_and_miss_no_answer(session):
    session.auto_refit = True
    ids = [session.add_class(name, [], tab="tab") for name in NAMES]
    for number in range(24):
        label = OUT_OF_CLASS if truth()[number] == OTHERS else ids[truth()[number]]
        session.label([number], label, why="suggested", tab="tab")
    end = time.monotonic() + PATIENCE
    while session.jobs.shown() is not None or session.pending >= 10:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert session.round >= 1
    assert session.pending < 10


def test_a_failed_refit_says_so_and_keeps_the_last_one(session, monkeypatch):
    label_some(session)
    fit(session)
    before = session.predicted.copy()
    monkeypatch.setattr(fitting, "fit_round", lambda *_: (_ for _ in ()).throw(ValueError("no luck")))
    session.refit()
    session.jobs.wait()
    assert session.error == "refit failed: no luck"
    assert np.array_equal(session.predicted, before)


def test_a_table_that_cannot_be_written_is_said_and_the_answer_kept(session, monkeypatch):
    monkeypatch.setattr("ropaws.explore.label_table.write_table", _no_space)
    session.add_class("cat", [0], tab="tab")
    end = time.monotonic() + PATIENCE
    while session.table_error is None and time.monotonic() < end:
        time.sleep(0.01)
    assert f"{session.folder / 'labels.csv'} could not be written" in state(session, "tab")["error"]
    assert session.codes[0] == 0


def test_the_message_of_a_full_disk_goes_away_when_there_is_space(session, monkeypatch):
    monkeypatch.setattr("ropaws.explore.label_table.RETRY_SECONDS", 0.05)
    with monkeypatch.context() as full:
        full.setattr("ropaws.explore.label_table.write_table", _no_space)
        session.add_class("cat", [0], tab="tab")
        end = time.monotonic() + PATIENCE
        while session.table_error is None:
            assert time.monotonic() < end
            time.sleep(0.01)
    while state(session, "tab")["error"] is not None:  # without another answer
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [row["label"] for row in table(session)] == ["cat"]


def _no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("numbers", "label", "why"),
    [([], 0, "no image"), ([COUNT], 0, "from 0 to 119"), ([-1], 0, "from 0 to 119"), ([0], 7, "no class 7"),
     ([0], -4, "must be a class")],
)  # fmt: skip
def test_wrong_answers_are_refused(session, numbers, label, why):
    session.add_class("cat", [], tab="tab")
    before = session.log.revision
    with pytest.raises(RefusedError, match=why):
        session.label(numbers, label, why="grid", tab="tab")
    assert session.log.revision == before


def test_one_class_alone_and_only_out_of_class_answers_can_be_fitted(session):
    session.label([3, 7], OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    assert (session.predicted == UNLABELED).all()
    assert session.suggested()
    session.add_class("cat", [0, 4, 8], tab="tab")
    fit(session)
    assert set(session.predicted.tolist()) <= {0, OUT_OF_CLASS}


def test_every_image_labeled_can_be_fitted(session):
    ids = [session.add_class(name, [], tab="tab") for name in NAMES]
    for kind in range(4):
        numbers = np.flatnonzero(truth() == kind).tolist()
        session.label(numbers, OUT_OF_CLASS if kind == OTHERS else ids[kind], why="grid", tab="tab")
    fit(session)
    assert session.suggested() == []
    assert state(session, "tab")["panel"]["estimate"] is None  # there is nothing left to be right about


def test_the_estimate_never_learns_from_what_it_judges(monkeypatch):
    """Labels at random: a classifier that had seen them would be right; one that has not is at chance."""
    random = torch.Generator().manual_seed(0)
    labels = torch.full((COUNT,), UNLABELED)
    labels[:60] = torch.randint(0, 3, (60,), generator=random)
    none = torch.zeros(COUNT, dtype=torch.bool)
    answered = fitting.Answered(labels, (0, 1, 2), none, none)
    points = torch.randn(COUNT, 12, generator=random)
    seen = []

    def remember(held_out, given, *_):
        seen.append((held_out[:, :3].argmax(dim=1) == given).float().mean())

    monkeypatch.setattr(fitting, "pool_accuracy", remember)
    fitted = fitting.fit_round(points, answered, Job("refit", "").report)
    fitting.estimate(points, answered, fitted, Job("refit", "").report)
    assert float(seen[0]) < 0.6


# The grid


def test_filters_of_the_grid(session):
    ids = label_some(session)
    session.label([3, 7], OUT_OF_CLASS, why="grid", tab="tab")
    session.label([11], SKIPPED, why="grid", tab="tab")
    fit(session)

    def found(**options):
        page = browse(session, Query(limit=500, **options))
        assert page["total"] == len(page["items"])
        return [item["id"] for item in page["items"]]

    everything = set(range(COUNT))
    assert set(found()) == everything
    assert set(found(view="labeled")) == set(np.flatnonzero(session.codes >= 0).tolist())
    assert set(found(view="skipped")) == {11}
    assert set(found(view="unlabeled")) == set(np.flatnonzero(session.codes == UNLABELED).tolist())
    assert {3, 7} <= set(found(view="out-of-class"))
    assert found(view="suggested") == session.suggested()
    assert set(found(predicted=ids[0])) == set(np.flatnonzero(session.predicted == ids[0]).tolist())
    assert set(found(label=ids[0])) == set(np.flatnonzero(session.codes == ids[0]).tolist())
    high = set(found(confidence=(0.9, 1.0)))
    assert high == set(np.flatnonzero(session.confidence >= 0.9).tolist())
    assert set(found(in_domain=(0.0, 0.2))) == set(np.flatnonzero(session.fitted.in_class <= 0.2).tolist())
    assert found(text="MAGE-01") == list(range(10, 20))
    assert found(ids=(5, 3, 9999), text="e-003") == [3]
    assert found(sort="number", descending=True)[0] == COUNT - 1
    values = session.confidence[found(sort="confidence")]
    assert (np.diff(values) >= 0).all()
    names = [session.pool.names[number] for number in found(sort="name", descending=True)]
    assert names == sorted(names, reverse=True)


def test_pages_hold_every_image_once(session):
    seen = []
    for offset in range(0, COUNT, 50):
        seen += [item["id"] for item in browse(session, Query(offset=offset, limit=50))["items"]]
    assert seen == list(range(COUNT))


def test_details_of_an_image(session):
    ids = label_some(session)
    fit(session)
    number = int(np.flatnonzero(truth() == 1)[10])
    found = details(session, number)
    assert found["probs"][0]["id"] == ids[1]
    assert sum(each["p"] for each in found["probs"]) == pytest.approx(1, abs=0.01)
    assert [each["label"] for each in found["nearest"]][:3] == [ids[1]] * 3
    assert found["nearest"][0]["similarity"] >= found["nearest"][1]["similarity"]


def test_a_name_that_is_not_utf8_can_be_shown(tmp_path):
    pool = make_pool(tmp_path / "pool", 8)
    odd = tmp_path / "pool" / os.fsdecode(b"\xff.png")
    (tmp_path / "pool/image-000.png").rename(odd)
    pool = replace(pool, images=(odd, *pool.images[1:]))
    session = Session(pool, tmp_path / "out")
    assert "\ufffd" in browse(session, Query(limit=1))["items"][0]["name"]
    session.add_class("cat", [0], tab="tab")
    session.close()
    again = Session(pool, tmp_path / "out")
    assert again.codes[0] == 0
    again.close()


KILLED = """
import sys
from pathlib import Path
from ropaws.explore.session import Session
from tests.explore.pools import make_pool
session = Session(make_pool(Path(sys.argv[1])), Path(sys.argv[2]))
session.add_class("cat", [], tab="tab")
for number in range(10_000):
    session.label([number % 120], 0, why="grid", tab="tab")
    print(number, flush=True)
"""


def test_a_killed_server_loses_no_confirmed_answer(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "pool"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stdout:
            said.append(int(line))
            if said[-1] == 40:
                process.send_signal(signal.SIGKILL)
    confirmed = said[-1]
    session = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    given = [entry for entry in session.log.entries if entry["do"] == "label"]
    assert len(given) > confirmed
    assert (session.codes[:40] == 0).all()
    assert len(table(session)) == (session.codes == 0).sum()  # and the table follows the log
    session.log.close()


def test_points_of_the_fixture_are_apart():
    points = torch.nn.functional.normalize(make_points(), dim=1)
    same = torch.from_numpy(truth()[:, None] == truth()[None])
    cosines = points @ points.T
    assert float(cosines[same].min()) > float(cosines[~same].median())


# What a review found


def test_nothing_is_exported_as_a_class_before_the_first_round(session):
    from ropaws.explore.outputs import Shown

    session.add_class("circle", [0], tab="tab")
    session.add_class("square", [1], tab="tab")
    labels = [prediction.label for _, prediction in Shown(session).predictions()]
    assert labels == ["circle", "square", *[""] * (COUNT - 2)]


def test_read_only_shows_the_labels_that_images_came_with(tmp_path):
    pool = make_pool(tmp_path / "pool", labels={0: "circle", 1: "square"})
    session = Session(pool, tmp_path / "out", read_only=True)
    assert session.codes[:2].tolist() == [0, 1]
    assert not (tmp_path / "out").exists()
    session.close()


def test_undo_leaves_the_labels_that_images_came_with(tmp_path):
    pool = make_pool(tmp_path / "pool", labels={0: "circle", 1: "square"})
    session = Session(pool, tmp_path / "out")
    with pytest.raises(RefusedError, match="nothing to undo"):
        session.undo("tab")
    session.label([5], 0, why="grid", tab="tab")
    session.undo("tab")
    assert session.codes[:2].tolist() == [0, 1]
    session.close()


def test_labels_that_are_named_later_join(tmp_path):
    session = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    session.add_class("square", [9], tab="tab")
    session.label([1], OUT_OF_CLASS, why="grid", tab="tab")
    session.close()
    pool = make_pool(tmp_path / "pool", labels={0: "circle", 1: "square", 5: "square"})
    session = Session(pool, tmp_path / "out")
    named = {name: number for number, name in session.answers.classes.items()}
    assert session.codes[[0, 5, 9]].tolist() == [named["circle"], named["square"], named["square"]]
    assert session.codes[1] == OUT_OF_CLASS  # what the person said stays
    session.close()


def test_answers_to_other_images_are_not_mixed_in(tmp_path):
    session = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    session.add_class("square", [9], tab="tab")
    session.close()
    with pytest.raises(ValueError, match="answers to other images; choose another folder with --out"):
        Session(make_pool(tmp_path / "elsewhere"), tmp_path / "out")


def test_skipped_images_are_not_suggested_again(session):
    session.label(session.suggested(), SKIPPED, why="suggested", tab="tab")
    fit(session)
    assert len(session.suggested()) == 20


def test_an_out_of_class_answer_can_be_confirmed(session):
    session.label([3], OUT_OF_CLASS, why="grid", tab="tab")
    session.confirm([3], tab="tab")
    assert session.pool.names[3] in session.answers.confirmed


def test_a_merge_while_a_round_is_fitted_is_kept(session, monkeypatch):
    ids = label_some(session)
    real = fitting.fit_round

    def merged_meanwhile(points, answered, report):
        found = real(points, answered, report)
        session.merge_class(ids[1], ids[0], tab="tab")
        return found

    monkeypatch.setattr(fitting, "fit_round", merged_meanwhile)
    fit(session)
    assert not (session.predicted == ids[1]).any()
    assert (session.predicted == ids[0]).sum() > 30
    monkeypatch.undo()
    session.undo("tab")  # and back: the classifier follows
    session.jobs.wait()
    assert (session.predicted == ids[1]).any()


def test_what_was_learned_or_repeated_does_not_count_as_predicted(session):
    ids = label_some(session)
    fit(session)
    session.label([0, 0, 0], ids[0], why="grid", tab="tab")  # it has this label
    number = int(np.flatnonzero(session.codes == UNLABELED)[0])
    session.label([number, number], int(session.predicted[number]), why="grid", tab="tab")
    session.add_class("moon", [number + 1], tab="tab")  # nobody could know
    assert session.answers.right_since == [True]


def test_only_the_beginning_of_an_audit_speaks_for_the_pool(session):
    label_some(session)
    session.start_audit(20, tab="tab")
    order = session.open_audit()
    session.label([order[0], order[1], order[5]], OUT_OF_CLASS, why="grid", tab="tab")
    names = session.pool.names
    assert session.answers.audited() == {names[order[0]], names[order[1]]}
    session.label([order[2]], SKIPPED, why="audit", tab="tab")
    session.label([order[3]], OUT_OF_CLASS, why="audit", tab="tab")
    assert session.answers.audited() == {names[order[place]] for place in (0, 1, 3)}


def test_folds_hide_a_fifth_of_few_labels():
    labels = torch.arange(10).repeat_interleave(2)
    counts = torch.bincount(fitting._folds(labels), minlength=fitting.FOLDS)
    assert counts.tolist() == [4] * 5


def test_undo_makes_no_two_classes_of_one_name(session):
    ids = [session.add_class(name, [number], tab="tab") for number, name in enumerate(("coat", "jacket"))]
    session.merge_class(ids[0], ids[1], tab="tab")
    session.add_class("coat", [], tab="other")
    with pytest.raises(RefusedError, match="two classes of one name"):
        session.undo("tab")


def test_a_lost_line_costs_itself_alone(session):
    label_some(session)
    for number in (50, 51, 52):
        session.label([number], OUT_OF_CLASS, why="grid", tab="tab")
    path, pool, folder = session.log.path, session.pool, session.folder
    session.close()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2] + lines[-1:]))
    again = Session(pool, folder)
    assert again.codes[[50, 51, 52]].tolist() == [OUT_OF_CLASS, UNLABELED, OUT_OF_CLASS]
    again.close()


# What the classifier was fitted to, and what was said since


@pytest.fixture
def halted(session, monkeypatch):
    """Refits wait before they fit, the first one until `go_on` is set; what each was given is kept."""
    begun, go_on, given = threading.Event(), threading.Event(), []
    real = fitting.fit_round

    def slow(points, answered, report):
        given.append(answered)
        begun.set()
        assert go_on.wait(PATIENCE)
        return real(points, answered, report)

    monkeypatch.setattr(fitting, "fit_round", slow)
    return begun, go_on, given


def others(count):
    return np.flatnonzero(truth() == OTHERS)[:count].tolist()


def test_undo_during_a_refit_starts_another_with_the_answers_as_they_are(session, halted):
    begun, go_on, given = halted
    label_some(session)
    session.auto_refit = True
    session.label(np.arange(60, 110).tolist(), OUT_OF_CLASS, why="grid", tab="tab")  # many are none
    assert begun.wait(PATIENCE)
    session.undo("tab")
    assert state(session, "tab")["pending"] == 12  # nothing was fitted yet
    go_on.set()
    session.jobs.wait()
    assert [int((answered.labels == OUT_OF_CLASS).sum()) for answered in given] == [50, 0]
    assert state(session, "tab")["pending"] == 0
    assert session.made_from == session.digest()
    known = truth() < OTHERS
    assert (session.predicted == truth())[known].mean() > 0.9


CHANGES = {
    "label": lambda session, ids: session.label(others(1), OUT_OF_CLASS, why="grid", tab="tab"),
    "clear": lambda session, ids: session.label([0], UNLABELED, why="grid", tab="tab"),
    "skip": lambda session, ids: session.label(others(1), SKIPPED, why="grid", tab="tab"),
    "undo": lambda session, ids: session.undo("tab"),
    "merge": lambda session, ids: session.merge_class(ids[1], ids[0], tab="tab"),
    "delete": lambda session, ids: session.delete_class(ids[1], tab="tab"),
    "new class": lambda session, ids: session.add_class("moon", others(1), tab="tab"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_during_a_refit_is_fitted_when_it_ends(session, halted, change):
    begun, go_on, given = halted
    ids = label_some(session)
    session.auto_refit = True
    session.refit()
    assert begun.wait(PATIENCE)
    CHANGES[change](session, ids)
    go_on.set()
    session.jobs.wait()
    assert len(given) == 2
    assert session.pending == 0
    assert session.made_from == session.digest()


def test_without_refits_by_themselves_the_page_says_stale(session, halted):
    begun, go_on, given = halted
    label_some(session)
    session.refit()
    assert begun.wait(PATIENCE)
    session.undo("tab")
    go_on.set()
    session.jobs.wait()
    assert len(given) == 1
    assert state(session, "tab")["pending"] == 4
    session.label([8, 9, 10, 11], 2, why="grid", tab="tab")
    assert state(session, "tab")["pending"] == 6  # two of the four are as they were
    session.undo("tab")
    fit(session)
    assert state(session, "tab")["pending"] == 0


def test_undo_after_a_round_is_due_as_answers_are(session):
    label_some(session)
    session.label(others(12), OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    session.auto_refit = True
    session.undo("tab")
    session.jobs.wait()
    assert session.round == 2
    assert session.pending == 0


def test_the_same_label_again_and_another_name_need_no_refit(session):
    ids = label_some(session)
    fit(session)
    session.label([0, 4, 8], ids[0], why="grid", tab="tab")
    session.rename_class(ids[0], "disk", tab="tab")
    assert session.pending == 0
    assert (session.predicted == ids[0]).any()  # shown by its new name


def test_a_class_that_is_undone_is_not_predicted_any_more(session, halted):
    begun, go_on, _ = halted
    label_some(session)
    number = session.add_class("moon", others(4), tab="tab")
    session.refit()
    assert begun.wait(PATIENCE)
    session.undo("tab")
    go_on.set()
    session.jobs.wait()
    assert number not in session.fitted.classes
    assert not (session.predicted == number).any()
    assert session.fitted.probs.sum(axis=1) == pytest.approx(1)


def test_the_number_of_the_round_survives_a_restart(session, tmp_path):
    label_some(session)
    fit(session)
    session.label(others(3), OUT_OF_CLASS, why="grid", tab="tab")
    fit(session)
    fit(session)  # to the same answers: no new round
    assert session.round == 2
    rounds = state(session, "tab")["panel"]["rounds"]
    session.close()

    again = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    again.start_background()
    again.jobs.wait()
    assert again.round == 2
    assert state(again, "tab")["panel"]["rounds"] == rounds
    again.label(others(5), OUT_OF_CLASS, why="grid", tab="tab")
    fit(again)
    assert again.round == 3
    again.close()


def test_a_deleted_class_leaves_labels_and_predictions_and_comes_back(session):
    ids = label_some(session)
    fit(session)
    session.delete_class(ids[1], tab="tab")
    assert ids[1] not in session.answers.classes
    assert (session.codes == UNLABELED).sum() == COUNT - 8
    assert not (session.predicted == ids[1]).any()
    assert (session.predicted == ids[0]).any()
    assert session.fitted.probs.sum(axis=1) == pytest.approx(1)
    assert session.pending == 4
    with pytest.raises(RefusedError, match="no class"):
        session.delete_class(ids[1], tab="tab")
    assert state(session, "tab")["undo"] == "delete class square"
    session.undo("tab")
    session.jobs.wait()
    assert (session.codes == ids[1]).sum() == 4
    assert (session.predicted == ids[1]).any()
    session.delete_class(ids[0], tab="tab")
    session.delete_class(ids[1], tab="tab")
    session.delete_class(ids[2], tab="tab")
    assert (session.predicted == UNLABELED).all()
    assert session.add_class("circle", [0], tab="tab") == 3  # numbers are not given twice


def test_files_that_a_killed_server_left_half_written_are_swept(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    left = out / ".labels.csv.0123456789abcdef.tmp"
    others = (out / ".labels.csv.tmp", out / ".mine.0123456789abcdef.tmp", out / "notes.tmp")
    for path in (left, *others):
        path.write_text("x")
    pool = make_pool(tmp_path / "pool", 8)
    Session(pool, out, read_only=True).close()
    assert left.exists()
    Session(pool, out).close()
    assert not left.exists()
    assert all(path.exists() for path in others)


def test_more_like_an_image(session):
    page = browse(session, Query(like=5, limit=500))
    numbers = [item["id"] for item in page["items"]]
    assert numbers[0] == 5
    assert sorted(numbers) == list(range(COUNT))
    assert (truth()[numbers[:30]] == truth()[5]).mean() > 0.9
    points = torch.nn.functional.normalize(session.pool.points, dim=1)
    assert (np.diff((points @ points[5]).numpy()[numbers]) <= 1e-6).all()
    with pytest.raises(RefusedError, match="from 0 to 119"):
        browse(session, Query(like=COUNT))


def test_a_page_in_order_is_that_of_sorting_everything():
    random = np.random.default_rng(0)
    for count in (1, 5, 60, 400):
        keys = random.integers(0, 12, 300).astype(np.float32)  # many ties, in the order of the images
        np.testing.assert_array_equal(_smallest(keys, count)[:count], np.argsort(keys, kind="stable")[:count])


def test_names_are_sorted_and_searched(session):
    names = session.pool.names
    page = browse(session, Query(sort="name", descending=True, limit=7))
    assert [item["name"] for item in page["items"]] == sorted(names, reverse=True)[:7]
    assert page["total"] == COUNT
    found = browse(session, Query(text="IMAGE-01", limit=500))
    assert found["total"] == 10


def test_many_images_are_answered_for_by_a_classifier_of_a_sample(tmp_path, monkeypatch):
    seen = []
    whole = fitting.OpenSetClassifier

    def watched(points, *given, **options):
        seen.append(len(points.values) if hasattr(points, "values") else len(points))
        return whole(points, *given, **options)

    monkeypatch.setattr(fitting, "OpenSetClassifier", watched)
    monkeypatch.setattr(fitting, "FITTED", 60)
    session = Session(make_pool(tmp_path / "pool"), tmp_path / "out")
    session.auto_refit = False
    ids = label_some(session)
    fit(session)
    session.close()
    assert max(seen) <= 60
    named = {ids[kind]: kind for kind in range(3)}
    inside = truth() != OTHERS
    right = [named.get(code) == kind for code, kind in zip(session.predicted, truth(), strict=True)]
    assert np.array(right)[inside].mean() > 0.8
