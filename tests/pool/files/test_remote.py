"""Sources behind addresses: fsspec's file systems, zip archives, a web server of this process."""

import functools
import http.server
import json
import re
import tarfile
import threading
import zipfile
from typing import ClassVar

import fsspec
import fsspec.implementations.memory
import numpy as np
import pytest

from ropaws.cli.main import main
from ropaws.pool import remote
from ropaws.pool.content import UnreadableError, read_content
from ropaws.pool.decoding import read_square, read_squares
from ropaws.pool.listing import Pool, read_csv
from ropaws.run.manifest import read_facts
from tests.photos import fails


class Server(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, or parts of them; what `trouble` names answers otherwise."""

    trouble: ClassVar[dict[str, list[int]]] = {}  # path: status of each answer to come

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        if body and self.trouble.get(path):
            return self.send_error(self.trouble[path].pop(0))
        try:
            with open(self.translate_path(path), "rb") as file:
                data = file.read()
        except OSError:
            return self.send_error(404)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(part[1]), int(part[2] or len(data) - 1)) if part else (0, len(data) - 1)
        self.send_response(206 if part else 200)
        self.send_header("Accept-Ranges", "bytes")
        if part:
            self.send_header("Content-Range", f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}")
        self.send_header("Content-Length", str(len(data[first : last + 1])))
        self.end_headers()
        if body:
            self.wfile.write(data[first : last + 1])
        return None


@pytest.fixture
def web(photos, monkeypatch):
    """The address of a server of the photos."""
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))
    Server.trouble = {}
    handler = functools.partial(Server, directory=str(photos))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def zipped(photos, name, prefix=""):
    with zipfile.ZipFile(photos / f"{name}.zip", "w") as archive:
        for path in sorted((photos / name).rglob("*.png")):
            archive.write(path, f"{prefix}{path.relative_to(photos / name)}")
        archive.writestr(f"{prefix}notes.txt", "no image")
        archive.writestr("__MACOSX/rows/._0.png", b"what a file system adds")
    return photos / f"{name}.zip"


def contents(pool):
    return [read_content(image).data for image in pool.images]


def test_a_folder_behind_an_address_is_the_folder(photos):
    here = Pool.open(photos / "pool", labeled=photos / "labeled", test=photos / "test")
    root = f"file://{photos}"
    there = Pool.open(f"{root}/pool", labeled=f"{root}/labeled", test=f"{root}/test")
    assert there.labels == here.labels
    assert there.names == tuple(f"file://{name}" for name in here.names)
    assert contents(there) == contents(here)
    assert there.are_files
    square = next(read_squares(there.images[:1], 20))
    assert np.array_equal(square, read_square(here.images[0], 20))


def test_file_systems_of_fsspec_are_all_alike(photos):
    store = fsspec.filesystem("memory")
    for image in (photos / "labeled").rglob("*.png"):
        store.pipe(f"/bucket/{image.relative_to(photos)}", image.read_bytes())
    pool = Pool.open(labeled="memory://bucket/labeled")
    assert pool.labels == Pool.open(labeled=photos / "labeled").labels
    assert contents(pool) == contents(Pool.open(labeled=photos / "labeled"))
    assert Pool.open("memory://bucket/labeled/rows/0.png").names == ("memory://bucket/labeled/rows/0.png",)
    store.rm("/bucket", recursive=True)


@pytest.mark.parametrize("prefix", ["", "my photos/of 2026/"])
def test_a_zip_file_is_a_folder(photos, prefix):
    found = Pool.open(labeled=zipped(photos, "labeled", prefix))
    here = Pool.open(labeled=photos / "labeled")
    assert found.labels == here.labels
    assert contents(found) == contents(here)
    assert found.names[0] == f"zip://{prefix}block/0.png::file://{photos}/labeled.zip"


def test_archives_and_shards_of_a_server_are_read_in_place(photos, web):
    zipped(photos, "labeled")
    with tarfile.open(photos / "pool.tar", "w") as shard:
        shard.add(photos / "pool", "pool")
    found = Pool.open(f"{web}/pool.tar", labeled=f"{web}/labeled.zip")
    here = Pool.open(photos / "pool.tar", labeled=photos / "labeled")
    assert contents(found) == contents(here)
    assert found.labels == here.labels
    assert found.names[-1] == f"{web}/pool.tar#pool/rows-7.png"


def test_parquet_with_image_bytes_behind_an_address(photos, web):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    data = [path.read_bytes() for path in sorted((photos / "pool").iterdir())[:3]]
    table = pyarrow.table(
        {"image": [{"bytes": item, "path": None} for item in data], "label": ["a", "b", None]}
    )
    pyarrow.parquet.write_table(table, photos / "rows.parquet", row_group_size=2)
    pool = Pool.open(labeled=f"{web}/rows.parquet")
    assert pool.labels == ("a", "b", None)
    assert contents(pool) == data


def test_tables_name_addresses_and_tables_behind_one_name_what_is_beside_them(photos, web):
    rows = [("labeled/rows/0.png", "rows"), (f"{web}/labeled/block/0.png", "block")]
    (photos / "own.csv").write_text("path,label\n" + "".join(f"{a},{b}\n" for a, b in rows))
    for source, first in (
        (photos / "own.csv", photos / rows[0][0]),
        (f"{web}/own.csv", f"{web}/{rows[0][0]}"),
    ):
        pool = Pool.open(labeled=source)
        assert pool.names == (str(first), rows[1][0])
        assert pool.labels == ("rows", "block")
        assert contents(pool) == [
            (photos / name).read_bytes() for name in ("labeled/rows/0.png", "labeled/block/0.png")
        ]


def test_a_read_that_fails_is_tried_again_and_then_reported(photos, web):
    (photos / "page.png").write_text("<html>please log in</html>")
    image = remote.RemoteImage(f"{web}/pool/rows-0.png")
    Server.trouble["/pool/rows-0.png"] = [503, 500]
    assert image.encoded() == (photos / "pool/rows-0.png").read_bytes()
    Server.trouble["/pool/rows-0.png"] = [503] * 9
    addresses = [str(image), f"{web}/pool/not-there.png", f"{web}/page.png", f"{web}/pool/rows-1.png"]
    found = list(read_squares([remote.RemoteImage(address) for address in addresses], 20))
    assert [isinstance(item, UnreadableError) for item in found] == [True, True, True, False]
    assert "503" in str(found[0])
    assert "not there" in str(found[1])
    assert "not an image" in str(found[2])


def test_what_a_server_refuses_is_counted_and_the_rest_is_labeled(trained, photos, web, tmp_path, capsys):
    """No permission, a page to log in, nothing there, a shard whose end does not come: exit code 0."""
    run, _ = trained
    (photos / "page.png").write_text("<html>please log in</html>")
    with tarfile.open(photos / "cut.tar", "w") as archive:
        for name in ("rows-2.png", "rows-3.png"):
            archive.add(photos / "pool" / name, name)
    whole = (photos / "cut.tar").read_bytes().rstrip(b"\0")
    (photos / "cut.tar").write_bytes(whole[:-50])
    named = ("pool/rows-0.png", "pool/rows-1.png", "page.png", "pool/gone.png")
    (photos / "named.csv").write_text("\n".join(["path", *(f"{web}/{name}" for name in named)]))
    Server.trouble = {"/pool/rows-0.png": [403] * 9}
    call = ["predict", run, photos / "named.csv", f"{web}/cut.tar", "--out", tmp_path / "labels.csv"]
    main(list(map(str, call)))
    said = capsys.readouterr().err
    assert "Left out: 4 unreadable images" in said
    labeled = [row["path"] for row in read_csv(tmp_path / "labels.csv")]
    assert labeled == [f"{web}/pool/rows-1.png", f"{web}/cut.tar#rows-2.png"]
    reasons = dict(json.loads((tmp_path / "labels.csv.json").read_text())["unreadable"])
    assert "403" in reasons[f"{web}/pool/rows-0.png"]
    assert "not an image" in reasons[f"{web}/page.png"]
    assert "not there" in reasons[f"{web}/pool/gone.png"]
    assert "ends in the middle of an image" in reasons[f"{web}/cut.tar#rows-3.png"]
    assert all("\n" not in reason for reason in reasons.values())


def test_a_bucket_without_permission_is_one_line(capsys):
    class Bucket(fsspec.implementations.memory.MemoryFileSystem):
        protocol = "closed"

        def find(self, *_, **__):
            raise PermissionError("Access Denied")

    fsspec.register_implementation("closed", Bucket, clobber=True)
    line = fails(capsys, "check", "--labeled", "closed://bucket/photos")
    assert line.endswith("closed://bucket/photos cannot be listed (PermissionError: Access Denied)")


def test_a_report_of_remote_images_loads_nothing_from_a_network(photos, web, tmp_path):
    pool, run = f"{web}/pool.zip", tmp_path / "run"
    zipped(photos, "pool")
    main(["train", "--labeled", f"file://{photos}/labeled", "--unlabeled", pool, "--out", str(run),
          "--backbone", "small", "--train.steps", "3"])  # fmt: skip
    page = (run / "report.html").read_text()
    loaded = re.findall(r"""(?:src|href|action|data)=["']([^"']*)|url\(([^)]*)\)""", page)
    addresses = [address.strip("\"' ") for pair in loaded for address in pair if address]
    assert len(addresses) > 5
    assert all(address.startswith(("data:", "#")) for address in addresses)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://me:secret@bucket/photos", "must not have a password"),
        ("https://host/photos.zip?X-Amz-Signature=abc", "must not have a password"),
        ("https://host/photos.zip?version=2&api_key=abc", "must not have a password"),
        ("nosuch://bucket/photos", "pip install 'ropaws.remote.'"),
        ("memory://empty/photos", "memory://empty/photos has no image"),
        ("http://127.0.0.1:9/pool.csv", "cannot be read"),
    ],
)
def test_addresses_that_cannot_be_used_are_one_line(address, words, capsys, monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", ())
    line = fails(capsys, "check", "--labeled", address)
    assert re.search(words, line)
    assert "secret" not in line
    assert "abc" not in line


def test_credentials_in_a_table_are_refused(tmp_path):
    (tmp_path / "own.csv").write_text("path,label\nhttps://host/a.png?token=abc,cat\n")
    with pytest.raises(ValueError, match="must not have a password, token or signature") as error:
        Pool.open(labeled=tmp_path / "own.csv")
    assert "abc" not in str(error.value)


def test_every_command_takes_addresses(photos, web, tmp_path, capsys):
    """Mixed in one command, and the answers are those for the same images on disk."""
    zipped(photos, "pool")
    pool, labeled, run = f"{web}/pool.zip", f"file://{photos}/labeled", tmp_path / "run"
    main(["check", "--labeled", labeled, "--unlabeled", pool, str(photos / "pool")])
    assert "36" in capsys.readouterr().out
    main(["train", "--labeled", labeled, "--unlabeled", pool, "--out", str(run), "--backbone", "small",
          "--train.steps", "3", "--no-report"])  # fmt: skip
    assert len(read_facts(run).split.indices) == 9
    assert f'"{pool}"' in (run / "config.json").read_text()
    tables = []
    for name, source in (("there", pool), ("here", str(photos / "pool"))):
        main(["predict", str(run), source, "--out", str(tmp_path / f"{name}.csv")])
        tables.append(list(read_csv(tmp_path / f"{name}.csv")))
    assert [row.pop("path").partition("::")[0] for row in tables[0]] == [
        f"zip://{row.pop('path').rpartition('/')[2]}" for row in tables[1]
    ]
    assert tables[0] == tables[1]  # to the last digit
    main(["embed", pool, "--backbone", "small", "--init", str(run / "model.safetensors"),
          "--out", str(tmp_path / "f.npz")])  # fmt: skip


def test_the_page_shows_images_behind_addresses(photos, web):
    from ropaws.explore.images import Thumbnails, open_shown, version_of

    (image,) = Pool.open(f"{web}/pool/rows-0.png").images
    assert open_shown(image).size == (36, 36)
    assert version_of(image) == f"{web}/pool/rows-0.png"
    with tarfile.open(photos / "pool.tar", "w") as shard:
        shard.add(photos / "pool", "pool")
    members = Pool.open(f"{web}/pool.tar").images
    assert Thumbnails(members, photos / "small").get(0).data == Thumbnails(members, None).get(0).data
