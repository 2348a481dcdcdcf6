"""`ropaws check`: what is wrong with a person's images."""

import itertools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ropaws.cli.main import main
from ropaws.pool.check import slips


def test_check_finds_what_is_wrong(photos, capsys):
    pool, labeled = photos / "pool", photos / "labeled"
    main(["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(photos / "test")])
    text = capsys.readouterr().out
    assert "No problem was found." in text
    assert "36 px" in text
    (pool / "broken.png").write_bytes(b"broken")
    Image.new("RGB", (5, 5), "green").save(pool / "tiny.png")
    (pool / "copy.png").write_bytes((pool / "rows-0.png").read_bytes())
    with Image.open(labeled / "rows" / "0.png") as image:
        image.save(labeled / "block" / "the-same.bmp")  # a copy in another format, with another label
    (photos / "test" / "rows" / "leak.png").write_bytes((pool / "rows-1.png").read_bytes())
    (labeled / "lone").mkdir()
    Image.new("RGB", (40, 40), "red").save(labeled / "lone" / "1.png")
    (labeled / "empty").mkdir()
    out = photos / "findings.json"
    main(["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(photos / "test"),
          "--json", str(out)])  # fmt: skip
    text = capsys.readouterr().out
    for line in (
        "1 image that cannot be read, so not counted; copy anew or remove: ",
        "1 image smaller than 16 px, which shows little; replace or remove: ",
        "2 groups of images (4 in all) with the same pixels; keep one of each: ",
        "1 group of images (2 in all) copied under different labels; keep one label: ",
        "1 image for testing and in the training set too; remove one of the two: ",
        "classes with a single label: lone; add one at least, `ropaws explore` helps\n",
        f"--labeled: class folder {labeled / 'empty'} has no image; fill it or remove it\n",
    ):
        assert line in text
    findings = json.loads(out.read_text())
    assert findings["classes"] == {"block": 4, "columns": 3, "lone": 1, "rows": 3}
    assert findings["unreadable"][0][0].endswith("broken.png")
    assert {Path(p).name for p in findings["conflicts"][0]} == {"0.png", "the-same.bmp"}
    assert [Path(p).name for p in findings["test_in_train"][0]] == ["leak.png", "rows-1.png"]


def checked(labeled, pool, capsys):
    main(["check", "--labeled", str(labeled), "--unlabeled", str(pool)])
    return capsys.readouterr().out


@pytest.fixture
def dishes(tmp_path):
    """Twelve labels of one class and two of another, and a pool; all of one size."""
    labeled, pool = tmp_path / "labeled", tmp_path / "pool"
    for folder, count, seed in ((labeled / "sushi", 12, 0), (labeled / "pizza", 3, 20), (pool, 9, 40)):
        folder.mkdir(parents=True)
        for i in range(count):
            scene(seed + i).save(folder / f"{i}.png")
    return labeled, pool


def test_an_unreadable_file_is_no_label(dishes, capsys):
    labeled, _ = dishes
    assert "No problem was found." in checked(*dishes, capsys)
    for i in range(3):
        (labeled / "pizza" / f"{i}.png").write_bytes(b"\x89PNG cut")
    text = checked(*dishes, capsys)
    assert "pizza       │       0" in text
    assert "3 images that cannot be read" in text
    assert "classes without a readable image: pizza; add some, or remove the class" in text


def test_unreadable_files_of_the_pool_do_not_count_and_names_are_as_short_as_typed(
    dishes, capsys, monkeypatch
):
    pool = dishes[1]
    (pool / "broken.png").write_bytes(b"broken")
    monkeypatch.chdir(pool.parent)
    main(["check", "--labeled", "labeled", "--unlabeled", "pool"])
    said = capsys.readouterr()
    assert re.search(r"\(unlabeled\) \S +9 ", said.out)
    assert ": pool/broken.png (" in said.out
    assert str(pool) not in said.out
    assert "test images" not in said.out + said.err  # there are none to look at


def test_few_labels_beside_many_are_said(dishes, capsys):
    labeled, _ = dishes
    for i in (1, 2):
        (labeled / "pizza" / f"{i}.png").unlink()
    text = checked(*dishes, capsys)
    assert "sushi has 12 labels, pizza 1: label more of the small classes\n" in text


@pytest.mark.parametrize("name", ["shushi", "sushis", "suhsi", "Sushy"])
def test_a_name_that_may_be_a_slip_of_another_is_said(dishes, capsys, name):
    labeled, _ = dishes
    (labeled / "pizza").rename(labeled / name)
    text = checked(*dishes, capsys)
    line = f"classes {name} (3) and sushi (12) are named nearly alike; if they mean the same, make them one\n"
    assert line in text


@pytest.mark.parametrize(("one", "other"), [("bat", "cat"), ("class 1", "class 2"), ("sashimi", "sushi ya")])
def test_names_of_their_own_are_no_slips(dishes, capsys, one, other):
    labeled, _ = dishes
    (labeled / "pizza").rename(labeled / one)
    (labeled / "sushi").rename(labeled / other)
    assert "No problem was found." in checked(*dishes, capsys)


def test_slips_are_those_of_a_slow_search_and_many_names_take_no_time():
    """Against trying every pair: a name is a slip if a change of one letter makes it the other."""
    random = np.random.default_rng(0)
    names = sorted({"".join(random.choice(list("abc"), random.integers(4, 8))) for _ in range(300)})

    def changed(name):
        for k in range(len(name) + 1):
            yield name[:k] + name[k + 1 :]
            yield name[:k] + name[k : k + 2][::-1] + name[k + 2 :]
            for letter in "abc":
                yield name[:k] + letter + name[k:]
                yield name[:k] + letter + name[k + 1 :]

    pairs = itertools.combinations(names, 2)
    slow = {(a, b) for a, b in pairs if b in set(changed(a)) and min(len(a), len(b)) >= 5}
    assert len(slow) > 50
    assert set(slips(names)) == slow
    began = time.monotonic()
    assert slips([f"species {number:05}" for number in range(5000)]) == []
    assert time.monotonic() - began < 20


def test_a_labeled_image_that_is_in_the_pool_by_another_name_is_said(dishes, capsys):
    labeled, pool = dishes
    (pool / "holiday.png").write_bytes((labeled / "sushi" / "7.png").read_bytes())
    line = "1 image with a label and in the pool too, by another name; remove it there: "
    assert f"{line}{labeled / 'sushi' / '7.png'} ({pool / 'holiday.png'})\n" in checked(*dishes, capsys)


def test_one_image_of_another_size_is_said(dishes, capsys):
    _, pool = dishes
    scene(99, size=(300, 180)).save(pool / "odd.png")
    line = "1 image unlike all the others in size; look whether they belong here: "
    assert f"{line}{pool / 'odd.png'} (300 x 180 px, not 240 x 180)\n" in checked(*dishes, capsys)
    scene(98, size=(240, 200)).save(pool / "another.png")  # sizes differ, as they do
    assert "No problem was found." in checked(*dishes, capsys)


def scene(seed, size=(240, 180)):
    """A smooth image, as photographs are."""
    random = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(random).resize(size, Image.Resampling.BICUBIC)


def test_check_finds_near_copies(tmp_path, capsys):
    """Smaller, recompressed and in another format; in the pool, under another label, and in the test set."""
    labeled, pool, test = (tmp_path / name for name in ("labeled", "pool", "test"))
    for folder in (labeled / "cat", labeled / "dog", pool, test / "cat", test / "dog"):
        folder.mkdir(parents=True)
    for i in range(4):
        scene(i).save(labeled / "cat" / f"{i}.png")
        scene(10 + i).save(labeled / "dog" / f"{i}.png")
        scene(20 + i).save(pool / f"{i}.png")
        scene(30 + i).save(test / ("cat" if i % 2 else "dog") / f"{i}.jpg")
    Image.new("RGB", (90, 90), "white").save(pool / "white.png")  # flat ones are not alike
    Image.new("RGB", (90, 90), (250, 250, 250)).save(labeled / "cat" / "gray.png")
    command = ["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(test)]
    main(command)
    assert "No problem was found." in capsys.readouterr().out
    scene(0).resize((120, 90)).save(pool / "smaller.jpg", quality=60)
    scene(1).save(labeled / "dog" / "again.jpg", quality=50)
    scene(20).resize((100, 75)).save(test / "dog" / "leak.webp", quality=70)
    main([*command, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    pairs = [tuple(Path(path).name for path in pair) for pair in found["lookalikes"]]
    assert sorted(pairs) == [("0.png", "smaller.jpg"), ("1.png", "again.jpg")]
    assert [[Path(p).name for p in group] for group in found["conflicts"]] == [["1.png", "again.jpg"]]
    assert [[Path(p).name for p in pair] for pair in found["test_in_train"]] == [["leak.webp", "0.png"]]
    assert found["duplicates"] == []
