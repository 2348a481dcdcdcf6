"""Every class has a folder of its own, and none leads elsewhere."""

import os
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropaws.run import sorting as module
from ropaws.run.sorting import LONGEST, OUT_OF_CLASS_NAME, alike, class_folders, numbered

ODD = st.text(alphabet="aA/\\_. ~\0\x1b\n\u0301\u00e1", max_size=4) | st.text(max_size=300)


def test_a_usual_class_keeps_its_name():
    names = ("cat", "wild cat", "a_b", "caf\u00e9", "3", "e.g.", "wei\udcff")
    assert class_folders(names) == {name: name for name in names}


def test_classes_that_look_alike_on_disk_are_told_apart():
    labels = [
        "a/b",
        "a\\b",
        "a_b",
        "Cat",
        "cat",
        "caf\u00e9",
        "cafe\u0301",
        "Out-Of-Class",
        "",
        "_",
        " x",
        "x",
    ]
    folders = class_folders(labels)
    assert len({alike(name) for name in folders.values()} | {OUT_OF_CLASS_NAME}) == len(labels) + 1
    assert folders["a_b"] == "a_b"
    assert folders["x"] == "x"
    assert folders["Cat"].startswith("Cat~")
    assert folders == class_folders(labels[::-1])
    # A class that is called like the folder of another one.
    taken = folders["a/b"]
    assert class_folders([*labels, taken])["a/b"] == taken != class_folders([*labels, taken])[taken]


@settings(deadline=None)
@given(st.lists(ODD, min_size=1, max_size=6, unique=True))
def test_no_label_leads_out_of_the_folder_and_no_two_share_one(labels):
    folders = class_folders(labels)
    assert list(folders) == labels
    for name in folders.values():
        assert os.path.basename(name) == name
        assert not name.startswith(".")
        assert alike(name) not in ("", OUT_OF_CLASS_NAME)
        assert not {"/", "\\"} & set(name)
        assert not any(unicodedata.category(char) == "Cc" for char in name)
        assert len(os.fsencode(name)) <= LONGEST
    assert len({alike(name) for name in folders.values()}) == len(labels)


def test_two_labels_with_one_mark_are_refused(monkeypatch):
    monkeypatch.setattr(module, "_marked", lambda name, label: f"{name}~00000000")
    with pytest.raises(ValueError, match=r"classes 'a/b' and 'a\\\\b' need the same folder"):
        class_folders(["a/b", "a\\b"])


def test_names_of_files_get_numbers_and_stay_short():
    assert numbered("a.png", 1) == "a.png"
    assert numbered("a.tar.png", 12) == "a.tar (12).png"
    long = "\u00e9" * 125 + ".jpeg"
    assert len(os.fsencode(long)) == LONGEST
    assert numbered(long, 1) == long
    assert numbered(long, 1000).endswith("\u00e9 (1000).jpeg")
    assert len(os.fsencode(numbered(long, 1000))) <= LONGEST
