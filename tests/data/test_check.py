"""`ropaws check`: what is wrong with a person's images."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from ropaws.cli.main import main


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
    out = photos / "findings.json"
    main(["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(photos / "test"),
          "--json", str(out)])  # fmt: skip
    text = capsys.readouterr().out
    for line in (
        "1 images cannot be read",
        "1 images are smaller than 16 px",
        "2 groups of images (4 in all) are the same\n",
        "1 groups of images (2 in all) are copies with different labels",
        "1 test images are in the training set too",
        "classes with a single label: lone",
    ):
        assert line in text
    findings = json.loads(out.read_text())
    assert findings["classes"] == {"block": 4, "columns": 3, "lone": 1, "rows": 3}
    assert findings["unreadable"][0][0].endswith("broken.png")
    assert {Path(p).name for p in findings["conflicts"][0]} == {"0.png", "the-same.bmp"}
    assert [Path(p).name for p in findings["test_in_train"][0]] == ["leak.png", "rows-1.png"]


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
