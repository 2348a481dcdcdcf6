import contextlib
import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws.explore.answer_log import AnswerLog, Answers, RefusedError, checked_class_name

IMAGES = ["a.png", "b.png", "c.png", "ü/\udcff.png"]


def give(log, image, label, tab="one"):
    log.append("label", tab, images=[image], label=label, why="grid", said=[-1])


def with_classes(path, *names):
    log = AnswerLog(path)
    for number, name in enumerate(names):
        log.append("class", "one", id=number, name=name)
    return log


def test_answers_are_on_disk_before_they_count(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "dog")
    give(log, "a.png", 1)
    assert log.answers.labels == {"a.png": 1}
    lines = (tmp_path / "log").read_text().splitlines()  # another process would read them now
    assert [json.loads(line)["do"] for line in lines] == ["class", "class", "label"]


def test_undo_survives_a_restart(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "dog")
    give(log, "a.png", 0)
    give(log, "a.png", 1)
    log.close()
    log = AnswerLog(tmp_path / "log")
    assert log.undo("one")["label"] == 1
    assert log.answers.labels == {"a.png": 0}
    log.close()
    log = AnswerLog(tmp_path / "log")
    assert log.answers.labels == {"a.png": 0}
    assert log.undo("one")["label"] == 0
    assert log.answers.labels == {}


def test_a_tab_takes_back_its_own_answers_only(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "dog")
    give(log, "a.png", 0, tab="left")
    give(log, "b.png", 1, tab="right")
    log.undo("left")
    assert log.answers.labels == {"b.png": 1}
    with pytest.raises(RefusedError, match="nothing to undo"):
        log.undo("left")
    assert log.answers.labels == {"b.png": 1}


def test_a_new_tab_takes_back_the_last_answer_of_all(tmp_path):
    """After the browser has crashed, nobody remembers the name of the tab."""
    log = with_classes(tmp_path / "log", "cat")
    give(log, "a.png", 0, tab="crashed")
    assert log.undo("new")["images"] == ["a.png"]


def test_undo_keeps_what_another_tab_said_later(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "dog")
    give(log, "a.png", 0, tab="left")
    give(log, "a.png", 1, tab="right")
    log.undo("left")
    assert log.answers.labels == {"a.png": 1}


def test_a_class_in_use_cannot_be_undone(tmp_path):
    log = with_classes(tmp_path / "log", "cat")
    give(log, "a.png", 0, tab="other")
    with pytest.raises(RefusedError, match="use the class 'cat'"):
        log.undo("one")
    assert log.answers.classes == {0: "cat"}


def test_classes_are_renamed_and_merged_and_both_are_taken_back(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "kitten")
    give(log, "a.png", 0)
    give(log, "b.png", 1)
    log.append("class", "one", id=0, name="cats")
    log.append("merge", "one", id=1, into=0)
    assert log.answers.classes == {0: "cats"}
    assert log.answers.labels == {"a.png": 0, "b.png": 0}
    log.undo("one")
    assert log.answers.labels == {"a.png": 0, "b.png": 1}
    log.undo("one")
    assert log.answers.classes == {0: "cat", 1: "kitten"}


def test_a_round_leaves_the_answers_that_came_while_it_was_fitted(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "dog")
    log.append("label", "one", images=["a.png"], label=0, said=[0])
    begun = log.revision
    log.append("label", "one", images=["b.png", "c.png"], label=1, said=[0, 1])
    assert log.answers.right_since == [True, False, True]
    log.append("round", "", facts={"labels": 1}, upto=begun)
    assert log.answers.right_since == [False, True]
    log.close()
    assert AnswerLog(tmp_path / "log").answers.right_since == [False, True]


def test_two_servers_cannot_open_one_folder(tmp_path):
    log = AnswerLog(tmp_path / "log")
    with pytest.raises(OSError, match=r"another `ropaws explore` has .* open"):
        AnswerLog(tmp_path / "log")
    log.close()
    AnswerLog(tmp_path / "log").close()


def test_a_link_in_the_place_of_the_log_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("mine\n")
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="log"):
        AnswerLog(tmp_path / "log")
    assert (tmp_path / "elsewhere").read_text() == "mine\n"


def test_read_only_writes_nothing(tmp_path):
    with_classes(tmp_path / "log", "cat").close()
    before = (tmp_path / "log").read_bytes()
    log = AnswerLog(tmp_path / "log", read_only=True)
    assert log.answers.classes == {0: "cat"}
    with pytest.raises(RefusedError, match="read-only"):
        give(log, "a.png", 0)
    assert (tmp_path / "log").read_bytes() == before
    assert not AnswerLog(tmp_path / "none", read_only=True).entries
    assert not (tmp_path / "none").exists()


def test_a_full_disk_refuses_the_answer_and_leaves_no_part_of_it(tmp_path, monkeypatch):
    log = with_classes(tmp_path / "log", "cat")
    before, real = (tmp_path / "log").read_bytes(), os.write
    room = [20]

    def full(file, data):
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="could not be saved") as error:
        give(log, "a.png", 0)
    assert error.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert (tmp_path / "log").read_bytes() == before
    assert log.answers.labels == {}
    give(log, "a.png", 0)  # there is room again
    log.close()
    assert AnswerLog(tmp_path / "log").answers.labels == {"a.png": 0}


def test_a_log_cut_anywhere_gives_the_answers_before_the_cut(tmp_path):
    log = with_classes(tmp_path / "log", "cat", "dog")
    ends = {0: {}}
    for image, label in zip(IMAGES, (0, 1, 0, 1), strict=True):
        give(log, image, label)
        ends[(tmp_path / "log").stat().st_size] = dict(log.answers.labels)
    log.close()
    data = (tmp_path / "log").read_bytes()
    for cut in range(len(data)):
        (tmp_path / "log").write_bytes(data[:cut])
        log = AnswerLog(tmp_path / "log")
        assert log.answers.labels == ends[max(end for end in ends if end <= cut)]
        give(log, "late.png", -2)  # and the log goes on
        log.close()
        assert AnswerLog(tmp_path / "log", read_only=True).answers.labels["late.png"] == -2


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "null", "3", '{"n":2}', '{"n":2,"tab":"","do":"__init__"}',
        '{"n":2,"tab":"","do":"label"}', '{"n":2,"tab":"","do":"label","images":[1],"label":0}',
        '{"n":2,"tab":"","do":"label","images":["a"],"label":"x"}',
        '{"n":2,"tab":"","do":"class","id":true,"name":"x"}', '{"n":2,"tab":"","do":"undo","of":[]}',
        "[" * 5000, '{"n":2,"tab":"","do":["label"]}', '{"n":2,"tab":"","do":{"label":1}}',
        '{"n":2,"tab":"","do":"estimate","facts":[]}', '{"n":2,"tab":"","do":"export","name":3,"facts":{}}',
        '{"n":2,"tab":"","do":"label","images":["a"],"label":0,"said":["x"]}', "\x00\xff",
    ],
)  # fmt: skip
def test_a_damaged_line_costs_itself_alone(tmp_path, line):
    log = with_classes(tmp_path / "log", "cat", "dog")
    give(log, "a.png", 1)
    give(log, "b.png", 0)
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    lines[2] = line
    (tmp_path / "log").write_text("\n".join(lines) + "\n", encoding="latin-1")
    log = AnswerLog(tmp_path / "log")
    assert log.answers.labels == {"b.png": 0}
    assert "damaged and left out: line 3" in log.notices[0]


ACTIONS = st.one_of(
    st.tuples(st.just("label"), st.sampled_from(IMAGES), st.integers(-3, 3)),
    st.tuples(st.just("class"), st.integers(0, 3), st.sampled_from(["cat", "dog", "<b>", "naïve"])),
    st.tuples(st.just("merge"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.integers(0, 3), st.none()),
    st.tuples(st.just("round"), st.none(), st.none()),
    st.tuples(st.just("confirm"), st.sampled_from(IMAGES), st.none()),
    st.tuples(st.just("undo"), st.sampled_from(["left", "right"]), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(st.tuples(ACTIONS, st.sampled_from(["left", "right"])), max_size=25))
def test_what_is_in_memory_is_what_is_on_disk(tmp_path_factory, actions):
    path = tmp_path_factory.mktemp("log") / "log"
    log = AnswerLog(path)
    for (do, first, second), tab in actions:
        if do == "label":
            images = [first, IMAGES[second % 4]]
            log.append("label", tab, images=list(dict.fromkeys(images)), label=second, said=[0, -1])
        elif do == "class":
            log.append("class", tab, id=first, name=second)
        elif do == "merge" and first != second:
            log.append("merge", tab, id=first, into=second)
        elif do == "delete":
            log.append("delete", tab, id=first)
        elif do == "round":
            log.append("round", "", facts={}, upto=log.revision)
        elif do == "confirm":
            log.append("confirm", tab, images=[first])
        elif do == "undo":
            with contextlib.suppress(RefusedError):
                log.undo(first)
        elif do == "restart":
            log.close()
            log = AnswerLog(path)
        assert all(label < 0 or label in log.answers.classes for label in log.answers.labels.values())
    found, kept = log.answers, AnswerLog(path, read_only=True).answers
    assert found == kept
    log.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "needs a name"), (None, "needs a name"), (" \n", "needs a name"), ("x" * 101, "at most 100"),
     ("a\x1b[2J", "control characters"), ("Out-of-class", "meaning of its own"), ("CAT", "already")],
)  # fmt: skip
def test_names_of_classes_are_checked(name, why):
    with pytest.raises(RefusedError, match=why):
        checked_class_name(name, ["cat"])
    assert checked_class_name("  big   <b>cat</b> ", ["cat"]) == "big <b>cat</b>"


def test_undo_looks_only_at_what_was_said_of_its_images(tmp_path, monkeypatch):
    """It must not take longer with every answer that was given."""
    log = with_classes(tmp_path / "log", "cat", "dog")
    for number in range(200):
        give(log, f"{number}.png", number % 2)
    give(log, "7.png", 0)
    applied, real = [], Answers.apply
    monkeypatch.setattr(Answers, "apply", lambda self, entry: (applied.append(entry), real(self, entry)))
    log.undo("one")
    assert log.answers.labels["7.png"] == 1
    assert len(applied) == 3  # two classes, and the answer before
    log.close()
    assert AnswerLog(tmp_path / "log").answers == log.answers
