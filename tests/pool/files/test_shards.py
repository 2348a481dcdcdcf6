"""Tar shards and parquet files with image bytes."""

import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from ropaws.cli.main import main
from ropaws.pool.content import UnreadableError, content_key
from ropaws.pool.listing import Pool
from tests.photos import fails

NAMES = ("circle", "square")


def encoded(shade, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(np.full((6, 5, 3), shade, np.uint8)).save(file, kind)
    return file.getvalue()


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            add(archive, name, content)
    return path


SAMPLES = {
    "a/0001.png": encoded(10),
    "a/0001.cls": b"circle\n",
    "a/0002.json": json.dumps({"label": "square", "more": [1]}).encode(),
    "a/0002.jpg": encoded(20, "JPEG"),
    "a/0003.png": encoded(30),
    "readme.txt": b"no image",
}


def test_images_and_labels_of_a_tar_shard(tmp_path):
    shard = write_tar(tmp_path / "s.tar", SAMPLES)
    pool = Pool.open(labeled=shard)
    assert pool.labels == ("circle", "square", None)
    assert [name.rpartition("#")[2] for name in pool.names] == ["a/0001.png", "a/0002.jpg", "a/0003.png"]
    assert [np.asarray(pool.image(k)).mean().round() for k in range(3)] == [10, 20, 30]
    assert pool.notes == ()


def test_the_key_is_that_of_the_same_bytes_in_a_file(tmp_path):
    pool = Pool.open(write_tar(tmp_path / "s.tar", SAMPLES))
    (tmp_path / "alone.png").write_bytes(SAMPLES["a/0001.png"])
    assert content_key(pool.images[0]) == content_key(tmp_path / "alone.png")


def test_a_folder_of_shards_is_all_of_them_in_order(tmp_path):
    for number in (2, 0, 1):
        write_tar(tmp_path / f"s{number}.tar", {f"{number}.png": encoded(number)})
    pool = Pool.open(tmp_path)
    assert [name.rpartition("#")[2] for name in pool.names] == ["0.png", "1.png", "2.png"]


def test_links_lead_nowhere_and_are_counted(tmp_path):
    (tmp_path / "secret.png").write_bytes(encoded(1))
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
        archive.addfile(link)
        add(archive, "../../escape.png", encoded(2))
    pool = Pool.open(tmp_path / "s.tar")
    assert len(pool) == 1  # where its bytes are; its name leads nowhere
    assert not (tmp_path.parent / "escape.png").exists()
    assert "1 links or devices were left out" in pool.notes[0]


def test_a_key_that_stands_twice_counts_once(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        add(archive, "x.png", encoded(1))
        add(archive, "x.png", encoded(2))
    pool = Pool.open(tmp_path / "s.tar")
    assert len(pool) == 1
    assert "1 images whose key stands twice were left out" in pool.notes[0]


def test_a_shard_that_is_cut_gives_what_is_whole(tmp_path):
    whole = write_tar(tmp_path / "whole.tar", {f"{k}.png": encoded(k) for k in range(9)}).read_bytes()
    cut = tmp_path / "cut.tar"
    for length in range(0, len(whole), 100):
        cut.write_bytes(whole[:length])
        if length < 512:  # not even the head of one image
            with pytest.raises(ValueError, match=r"not an uncompressed tar file|has no image"):
                Pool.open(cut)
            continue
        pool = Pool.open(cut)
        for number in range(len(pool) - 1):
            pool.image(number)


def test_a_compressed_one_is_refused_with_the_remedy(tmp_path):
    shard = write_tar(tmp_path / "s.tar", SAMPLES, "w:gz")
    with pytest.raises(ValueError, match=r"not an uncompressed tar file .*; write it without compression"):
        Pool.open(shard)


def write_parquet(path, values, labels=None, names=None, rows=2):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"image": values} | ({} if labels is None else {"label": labels}))
    if names:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, path, row_group_size=rows)
    return path


@pytest.mark.parametrize("wrapped", [True, False])
def test_images_and_labels_of_a_parquet_file(tmp_path, wrapped):
    content = [encoded(10 * k) for k in range(5)]
    values = [{"bytes": data, "path": "/etc/passwd"} for data in content] if wrapped else content
    shard = write_parquet(tmp_path / "s.parquet", values, [0, 1, -1, 0, 1], list(NAMES))
    pool = Pool.open(labeled=shard)
    assert pool.labels == ("circle", "square", None, "circle", "square")
    order = [4, 0, 3, 1, 2]
    assert [np.asarray(pool.image(k)).mean() for k in order] == [10 * k for k in order]


def test_a_row_without_bytes_is_unreadable_and_the_rest_is_labeled(trained, tmp_path, capsys):
    run, photos = trained
    files = sorted((photos / "pool").iterdir())[:4]
    values = [{"bytes": file.read_bytes(), "path": None} for file in files]
    values[2] = {"bytes": None, "path": str(files[2])}  # a path is never opened
    shard = write_parquet(tmp_path / "s.parquet", values)
    main(["predict", str(run), str(shard), "--out", str(tmp_path / "labels.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [row["path"].rpartition("#")[2] for row in rows] == ["0", "1", "3"]
    assert "1 unreadable image," in capsys.readouterr().err
    main(["predict", str(run), *map(str, files), "--out", str(tmp_path / "files.jsonl")])
    expected = [json.loads(line) for line in (tmp_path / "files.jsonl").read_text().splitlines()]
    assert [row["in_domain"] for row in rows] == [expected[k]["in_domain"] for k in (0, 1, 3)]


def test_a_file_that_is_no_parquet_is_one_line(trained, tmp_path, capsys):
    (tmp_path / "s.parquet").write_bytes(b"PAR1" + bytes(40))
    message = fails(capsys, "predict", trained[0], tmp_path / "s.parquet", "--out", tmp_path / "labels.csv")
    assert "is not a readable table" in message


def test_check_and_train_take_shards_and_files_together(trained, tmp_path, capsys):
    _, photos = trained
    labeled = {f"{path.parent.name}-{path.name}": path for path in (photos / "labeled").rglob("*.png")}
    members = {}
    for name, path in labeled.items():
        members |= {name: path.read_bytes(), name[:-4] + ".cls": path.parent.name.encode()}
    shard = write_tar(tmp_path / "labeled.tar", members)
    pool = [{"bytes": path.read_bytes(), "path": None} for path in sorted((photos / "pool").iterdir())[:12]]
    rows = write_parquet(tmp_path / "pool.parquet", pool)
    sources = ["--labeled", str(shard), "--unlabeled", str(rows), str(photos / "pool")]
    main(["check", *sources])
    assert "block" in capsys.readouterr().out
    main(["train", *sources, "--out", str(tmp_path / "run"), "--train.steps", "4", "--backbone", "small"])
    assert (tmp_path / "run/report.html").exists()


def test_a_shard_that_changes_after_it_was_listed_gives_no_other_image(tmp_path):
    path = write_tar(tmp_path / "s.tar", SAMPLES)
    pool = Pool.open(path)
    for changed in ({"x.png": encoded(1)} | SAMPLES, {"a/0000.png": encoded(10)}):
        write_tar(path, changed)
        with pytest.raises(UnreadableError, match="was changed after it was listed"):
            pool.image(0)
    long = {"f" * 150 + "/" + "n" * 120 + ".png": encoded(7)}  # its name is not in the header alone
    assert Pool.open(write_tar(tmp_path / "long.tar", long)).image(0).getpixel((0, 0)) == (7, 7, 7)


def test_every_kind_of_source_in_one_command_with_damage_in_each(trained, tmp_path, capsys):
    """What is whole is labeled, what is not is counted; the command ends well."""
    run, photos = trained
    files = sorted((photos / "pool").iterdir())
    data = [file.read_bytes() for file in files[:12]]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.png").write_bytes(data[0])
    (folder / "b.png").write_bytes(data[1][:40])
    (folder / "page.jpg").write_bytes(b"<!doctype html><p>Sign in")
    tar = write_tar(tmp_path / "s.tar", {f"{k}.png": data[k] for k in (2, 3, 4)} | {"3.jpg": data[5]})
    tar.write_bytes(tar.read_bytes().rstrip(b"\0")[:-100])
    parquet = write_parquet(
        tmp_path / "s.parquet", [{"bytes": data[6], "path": None}, {"bytes": None, "path": "x"}]
    )
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr("7.png", data[7])
        archive.writestr("8.png", b"nothing")
    (tmp_path / "t.csv").write_text(f"file_name;class\n{files[9]};\n")
    sources = [folder, tar, parquet, tmp_path / "s.zip", tmp_path / "t.csv", f"file://{files[10]}"]
    main(["predict", str(run), *map(str, sources), "--out", str(tmp_path / "labels.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    said = capsys.readouterr().err
    unreadable = json.loads((tmp_path / "labels.jsonl.json").read_text())["unreadable"]
    for name in ("b.png", "page.jpg", "s.parquet#1", "8.png"):
        assert any(name in path for path, _ in unreadable)
    assert f"{len(unreadable)} unreadable images" in said
    assert "is damaged after" in said or "ends in the middle" in str(unreadable)
    assert "whose key stands twice" in said or "is damaged after" in said
    assert len(rows) >= 7
    direct = json.loads((tmp_path / "labels.jsonl").read_text().splitlines()[0])
    main(["predict", str(run), str(files[0]), "--out", str(tmp_path / "one.jsonl")])
    alone = json.loads((tmp_path / "one.jsonl").read_text())  # in another batch
    assert alone["in_domain"] == pytest.approx(direct["in_domain"], abs=1e-5)
