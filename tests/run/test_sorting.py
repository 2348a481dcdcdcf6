"""Images in folders: whole, once, and never overwritten, whatever happens meanwhile."""

import errno
import filecmp
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ropaws.run import sorting
from ropaws.run.sorting import PLAN, Sorter
from tests.run.sorting_kills import on_another_device

KILLS = Path(__file__).with_name("sorting_kills.py")


def sort(target, sources, *, move=True, label="cat"):
    sorter = Sorter(target, ["cat", "a/b", "a_b"], sources, move=move)
    places = [sorter.plan(source, label) for source in sources]
    sorter.carry_out()
    return places


def write(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_classes_have_folders_of_their_own(tmp_path):
    for number, label in enumerate(("a/b", "a_b", None)):
        sort(tmp_path / "sorted", [write(tmp_path / "pool" / f"{number}.png")], label=label)
    assert sorted(path.name[:4] for path in (tmp_path / "sorted").iterdir()) == ["a_b", "a_b~", "out-"]


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    write(tmp_path / "sorted" / "cat" / "same.png", b"other")
    write(tmp_path / "sorted" / "cat" / "SAME (2).png", b"other")
    sources = [write(tmp_path / str(n) / "same.png", bytes([n])) for n in range(3)]
    places = sort(tmp_path / "sorted", sources)
    assert [place.name for place in places] == ["same (3).png", "same (4).png", "same (5).png"]
    assert [place.read_bytes() for place in places] == [b"\0", b"\1", b"\2"]
    assert (tmp_path / "sorted" / "cat" / "same.png").read_bytes() == b"other"
    assert files(tmp_path / "sorted") == [f"cat/{name}" for name in sorted(os.listdir(places[0].parent))]


def test_long_names_are_shortened(tmp_path):
    name = "x" * 251 + ".png"
    sources = [write(tmp_path / str(n) / name, bytes([n])) for n in range(3)]
    for _ in range(2):  # the second call finds the copies of the first
        places = sort(tmp_path / "sorted", sources, move=False)
        assert [place.read_bytes() for place in places] == [b"\0", b"\1", b"\2"]
        assert len(files(tmp_path / "sorted")) == 3


def test_a_copy_from_an_earlier_call_is_left_as_it_is_in_any_order(tmp_path):
    sources = [write(tmp_path / str(n) / "same.png", bytes([n])) for n in range(4)]
    sort(tmp_path / "sorted", sources[:2], move=False)
    sort(tmp_path / "sorted", [sources[1], sources[2], sources[0]], move=False)
    assert len(files(tmp_path / "sorted")) == 3
    places = sort(tmp_path / "sorted", sources[::-1], move=False)
    assert all(filecmp.cmp(*pair, shallow=False) for pair in zip(places, sources[::-1], strict=True))
    assert len(set(places)) == len(files(tmp_path / "sorted")) == 4


def test_images_that_are_sorted_already_stay(tmp_path):
    (place,) = sort(tmp_path / "sorted", [write(tmp_path / "pool" / "1.png")])
    assert sort(tmp_path / "sorted", [place]) == [place]
    assert sort(tmp_path / "sorted", [place], move=False) == [place]
    assert files(tmp_path / "sorted") == ["cat/1.png"]


def test_planning_a_hundred_thousand_images_of_one_name_takes_seconds(tmp_path):
    sorter = Sorter(tmp_path / "sorted", ["cat"], [], move=True)
    began, places = time.monotonic(), set()
    for number in range(100_000):
        places.add(sorter.plan(Path("pool", str(number), "same.png"), "cat"))
        assert time.monotonic() - began < 60, f"{number:,} images"
    assert len(places) == 100_000


def test_finding_thousands_of_copies_again_takes_seconds(tmp_path):
    """Of one name and one size: every file is read once, not compared with every other."""
    sources = [write(tmp_path / str(n) / "same.png", n.to_bytes(4, "big")) for n in range(3000)]
    first = sort(tmp_path / "sorted", sources, move=False)
    began = time.monotonic()
    assert sort(tmp_path / "sorted", sources[::-1], move=False) == first[::-1]
    assert time.monotonic() - began < 10
    assert len(files(tmp_path / "sorted")) == 3000


# Other devices, full disks, kills


def test_a_call_that_is_killed_at_any_operation_can_be_finished(tmp_path):
    done = subprocess.run(
        [sys.executable, KILLS, tmp_path], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize("move", [True, False])
def test_a_full_disk_leaves_no_part_of_an_image(tmp_path, monkeypatch, move):
    monkeypatch.setattr(os, "rename", on_another_device)
    small = write(tmp_path / "pool" / "a.png")
    large = write(tmp_path / "pool" / "b.png", bytes(200_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sort(tmp_path / "sorted", [small, large], move=move)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [name for name in files(tmp_path / "sorted") if name != PLAN] == ["cat/a.png"]
    assert files(tmp_path / "pool") == (["b.png"] if move else ["a.png", "b.png"])
    sort(tmp_path / "sorted", [large] if move else [small, large], move=move)
    assert files(tmp_path / "sorted") == ["cat/a.png", "cat/b.png"]


def test_what_cannot_be_deleted_is_not_in_two_places(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", on_another_device)
    source = write(tmp_path / "pool" / "a.png")
    unlink = Path.unlink

    def refused(path, **options):
        if path == source:
            raise PermissionError(errno.EPERM, "no")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(PermissionError):
        sort(tmp_path / "sorted", [source])
    assert files(tmp_path / "sorted") == [PLAN]
    assert source.exists()


def test_a_folder_that_cannot_be_written_to_is_refused_first(tmp_path, monkeypatch):
    source = write(tmp_path / "pool" / "a.png")
    monkeypatch.setattr(os, "access", lambda path, _mode: path != source.parent)
    with pytest.raises(PermissionError, match=r"images cannot be taken from .*; use --copy-to"):
        Sorter(tmp_path / "sorted", ["cat"], [source], move=True)


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    for move in (True, False):
        source = write(tmp_path / "pool" / f"{move}.png", b"mine")
        sorter = Sorter(tmp_path / "sorted", ["cat"], [source], move=move)
        place = write(sorter.plan(source, "cat"), b"theirs")
        with pytest.raises(FileExistsError, match="created by someone else"):
            sorter.carry_out()
        assert source.read_bytes() == b"mine"
        assert place.read_bytes() == b"theirs"


# Links


def test_relative_links_stay_valid(tmp_path):
    real = write(tmp_path / "kept" / "real.png", b"real")
    (tmp_path / "pool" / "deep").mkdir(parents=True)
    (tmp_path / "alias").symlink_to("pool/deep")
    for name, leads_to in (("a.png", "../../kept/real.png"), ("b.png", str(real)), ("c.png", "a.png")):
        (tmp_path / "pool" / "deep" / name).symlink_to(leads_to)
    sources = [tmp_path / "alias" / "a.png", tmp_path / "alias" / "b.png"]
    places = sort(tmp_path / "sorted", sources)
    for place in places:
        assert place.is_symlink()
        assert place.read_bytes() == b"real"
    assert os.readlink(places[0]) == "../../kept/real.png"
    assert os.readlink(places[1]) == str(real)
    (copy,) = sort(tmp_path / "copies", [places[0]], move=False)
    assert not copy.is_symlink()
    assert copy.read_bytes() == b"real"


@pytest.mark.parametrize("chain", [False, True])
def test_a_link_to_an_image_that_is_moved_is_refused_first(tmp_path, chain):
    real = write(tmp_path / "pool" / "real.png")
    (tmp_path / "between").symlink_to("pool/real.png")
    link = tmp_path / "pool" / "link.png"
    link.symlink_to("../between" if chain else "real.png")
    with pytest.raises(ValueError, match=r"link.png is a link to an image that is moved too"):
        sort(tmp_path / "sorted", [link, real])
    assert files(tmp_path / "pool") == ["link.png", "real.png"]
    assert not (tmp_path / "sorted").exists()


def test_an_image_that_is_named_twice_is_refused_first(tmp_path):
    image = write(tmp_path / "pool" / "a.png")
    (tmp_path / "alias").symlink_to("pool")
    with pytest.raises(ValueError, match="are the same file, by a link between folders"):
        sort(tmp_path / "sorted", [image, tmp_path / "alias" / "a.png"])


# A plan that someone else has put there


def test_a_plan_is_believed_only_for_images_of_this_call(tmp_path):
    private = write(tmp_path / "private.txt", b"secret")
    kept = write(tmp_path / "sorted" / "cat" / "kept.png", b"secret")
    outside = write(tmp_path / "outside.png", b"image")
    source = write(tmp_path / "pool" / "a.png", b"image")
    rows = [
        [str(private), str(kept)],
        [str(source), str(outside)],
        [str(source), f"{kept}/../../../outside.png"],
    ]
    write(tmp_path / "sorted" / PLAN, json.dumps(rows).encode())
    sort(tmp_path / "sorted", [source])
    assert private.exists()
    assert kept.read_bytes() == b"secret"
    assert outside.exists()
    assert (tmp_path / "sorted" / "cat" / "a.png").read_bytes() == b"image"


@pytest.mark.parametrize("text", ["{}", "[1]", '[["a"]]', '[["a", 1]]', "nonsense", "null"])
def test_a_damaged_plan_is_one_line(tmp_path, text):
    write(tmp_path / "sorted" / PLAN, text.encode())
    with pytest.raises(ValueError, match=r"ropaws-moves\.json"):
        sort(tmp_path / "sorted", [write(tmp_path / "pool" / "a.png")])


def test_a_plan_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "sorted").mkdir()
    (tmp_path / "sorted" / PLAN).symlink_to(write(tmp_path / "elsewhere", b"[]"))
    with pytest.raises(OSError, match="symbolic link"):
        sort(tmp_path / "sorted", [write(tmp_path / "pool" / "a.png")])
    assert (tmp_path / "elsewhere").read_bytes() == b"[]"


def test_an_unfinished_move_of_other_images_stays_known(tmp_path, monkeypatch):
    """A call on one pool is killed; a call on another pool comes first; then the first is called again."""
    monkeypatch.setattr(os, "rename", on_another_device)
    source = write(tmp_path / "pool" / "a.png")
    with monkeypatch.context() as patch:
        patch.setattr(sorting, "move_file", lambda source, place: place.write_bytes(source.read_bytes()))
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # killed before
        sort(tmp_path / "sorted", [source])
    assert (tmp_path / "sorted" / PLAN).exists()
    sort(tmp_path / "sorted", [write(tmp_path / "other" / "b.png")])
    assert files(tmp_path / "sorted") == [PLAN, "cat/a.png", "cat/b.png"]
    sort(tmp_path / "sorted", [source])
    assert files(tmp_path / "sorted") == ["cat/a.png", "cat/b.png"]
    assert not source.exists()
