"""The one place that reads an image: keys of the very bytes that are decoded, and formats that are named."""

import builtins
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from ropaws.cli.main import main
from ropaws.explore.images import open_shown, shown_size
from ropaws.pool import content as module
from ropaws.pool.array_files import list_arrays
from ropaws.pool.check import check_data, look_at
from ropaws.pool.content import FORMATS, Content, UnreadableError, content_key, image_size, read_content
from ropaws.pool.decoding import decode_content, read_image, read_square
from ropaws.pool.listing import Pool, list_unlabeled
from tests.pool.files.test_saved_datasets import save as save_dataset

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n"


def saved(path, color="red", **options):
    Image.new("RGB", (20, 20), color).save(path, **options)
    return path


def rows_of(folder, contents):
    """Rows of a saved dataset with these encoded images."""
    return list_unlabeled(save_dataset(folder, [(content, None) for content in contents])).images


# Keys


@settings(max_examples=200, deadline=None)
@given(one=st.binary(max_size=40), other=st.binary(max_size=40))
def test_keys_are_equal_if_and_only_if_the_bytes_are(one, other):
    assert (Content(one).key == Content(other).key) == (one == other)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.tuples(*[st.sampled_from([(2, 6), (6, 2), (3, 4), (2, 2, 3)])] * 2),
    values=st.tuples(*[st.binary(min_size=12, max_size=12)] * 2),
)
def test_keys_of_pixels_are_equal_if_and_only_if_all_of_the_image_is(shapes, values):
    one, other = (
        Content(np.frombuffer(value, np.uint8).reshape(shape))
        for shape, value in zip(shapes, values, strict=True)
    )
    assert (one.key == other.key) == (shapes[0] == shapes[1] and values[0] == values[1])


def test_the_key_is_of_the_bytes_wherever_they_are(tmp_path):
    path = saved(tmp_path / "a.png")
    (row,) = rows_of(tmp_path / "saved", [path.read_bytes()])
    assert content_key(path) == content_key(row) == read_image(path, 8, "both").key
    pixels = np.asarray(Image.open(path))
    np.savez(tmp_path / "a.npz", images=np.stack([pixels, pixels, pixels + 1]))
    keys = [content_key(row) for row in list_arrays(tmp_path / "a.npz")[0]]
    assert keys[0] == keys[1] == Content(pixels).key
    assert len({*keys, content_key(path)}) == 3


def palette_image(path, palette):
    image = Image.new("P", (20, 20), 1)
    image.putpalette(palette)
    image.save(path)
    return path.read_bytes()


def turned_image(path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.arange(1200, dtype=np.uint8).reshape(20, 20, 3))
    image.save(path, exif=exif)
    return path.read_bytes()


def test_images_of_a_dataset_that_differ_in_palette_or_orientation_have_keys_of_their_own(tmp_path):
    contents = [
        palette_image(tmp_path / "a.png", [0, 0, 0, 255, 0, 0]),
        palette_image(tmp_path / "b.png", [0, 0, 0, 0, 0, 255]),
        turned_image(tmp_path / "c.png", 1),
        turned_image(tmp_path / "d.png", 6),
    ]
    rows = rows_of(tmp_path / "saved", contents)
    assert len({read_square(row, 8).tobytes() for row in rows}) == 4
    assert len({content_key(row) for row in rows}) == 4


def test_large_jpegs_of_a_dataset_have_keys_of_their_own_and_are_looked_at(tmp_path):
    """Of 41 megapixels: they are decoded at a smaller size, so all that looks at them takes them."""
    paths = []
    for color in ("red", "blue"):
        paths.append(tmp_path / f"{color}.jpg")
        Image.new("RGB", (6400, 6410), color).save(paths[-1], quality=30)
    rows = rows_of(tmp_path / "saved", [path.read_bytes() for path in paths])
    keys = [content_key(row) for row in rows]
    assert None not in keys
    assert keys[0] != keys[1]
    assert read_square(rows[0], 32)[0, 0].tolist() == pytest.approx([255, 0, 0], abs=4)
    look = look_at(paths[1])
    assert (look.size, look.reason) == ((6400, 6410), "")
    assert shown_size(paths[0]) == (6400, 6410)
    assert max(open_shown(paths[0]).size) < 6400


def test_what_could_not_be_read_whole_has_no_key(tmp_path, monkeypatch):
    assert content_key(tmp_path / "gone.png") is None
    os.mkfifo(tmp_path / "pipe.png")
    assert content_key(tmp_path / "pipe.png") is None
    (absent,) = list_unlabeled(save_dataset(tmp_path / "saved", [(None, "elsewhere.png")])).images
    assert content_key(absent) is None
    path = saved(tmp_path / "a.png")
    real = module.open_regular

    class Failing:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def fileno(self):
            return self.file.fileno()

        def read(self):
            self.file.read(10)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "open_regular", lambda *args: Failing(real(*args)))
    assert content_key(path) is None
    with pytest.raises(UnreadableError, match="Input/output error"):
        read_square(path, 8)


@pytest.mark.parametrize("change", ["longer", "shorter", "same length"])
def test_a_file_that_changes_while_it_is_read_has_no_key(tmp_path, monkeypatch, change):
    path = saved(tmp_path / "a.png")
    os.utime(path, ns=(0, 0))
    whole = path.read_bytes()
    real = module.open_regular

    def opened_then_changed(*args):
        file = real(*args)
        file.peek(4)  # the first bytes are there when the others change
        read = file.read

        class Reader:
            fileno, close = file.fileno, file.close

            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def read(self):
                new = {"longer": whole + b"x", "shorter": whole[:-9], "same length": whole[::-1]}[change]
                path.write_bytes(new)
                return read()

        return Reader()

    monkeypatch.setattr(module, "open_regular", opened_then_changed)
    assert content_key(path) is None
    path.write_bytes(whole)
    with pytest.raises(UnreadableError, match="was changed while it was read"):
        read_square(path, 8)


def test_pixels_are_decoded_from_the_bytes_that_were_hashed(tmp_path):
    """Also if another file has taken the place in the meantime."""
    path = saved(tmp_path / "a.png", "red")
    content = read_content(path)
    saved(path, "blue")
    found = decode_content(content, 8, "center")
    assert found.square[0, 0].tolist() == [255, 0, 0]
    assert found.key == content.key != content_key(path)


def test_an_image_is_opened_once(tmp_path, monkeypatch):
    path = saved(tmp_path / "a.png")
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda place, *args: opened.append(str(place)) or real(place, *args))
    monkeypatch.setattr(
        builtins, "open", lambda place, *args, _real=open: opened.append(str(place)) or _real(place, *args)
    )
    read_image(path, 8, "both")
    monkeypatch.undo()
    assert opened.count(str(path)) == 1


# Formats


def never(*_args, **_options):
    raise AssertionError("a format that is not read was opened")


@pytest.fixture
def guarded(monkeypatch):
    """No program is started and no other format is opened."""
    Image.init()
    for name in set(Image.OPEN) - set(FORMATS):
        monkeypatch.setitem(Image.OPEN, name, (never, Image.OPEN[name][1]))
    for place, name in ((EpsImagePlugin, "Ghostscript"), (subprocess, "Popen"), (os, "posix_spawn")):
        monkeypatch.setattr(place, name, never)


REFUSED = "a file of format EPS; the formats that are read are JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM"


@pytest.mark.parametrize(
    "look",
    [
        lambda image: read_square(image, 8),
        lambda image: read_image(image, 8, "both"),
        image_size,
        open_shown,
        shown_size,
    ],
)
@pytest.mark.parametrize("place", ["file", "dataset"])
def test_postscript_named_jpg_starts_no_program(tmp_path, guarded, look, place):
    image = tmp_path / "evil.jpg"
    image.write_bytes(POSTSCRIPT)
    if place == "dataset":
        (image,) = rows_of(tmp_path / "saved", [POSTSCRIPT])
    with pytest.raises(UnreadableError, match=REFUSED):
        look(image)


def test_check_lists_a_postscript_file_and_starts_no_program(tmp_path, guarded):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            saved(tmp_path / name / f"{number}.png", (40 * number, 10, 200 if name == "a" else 0))
    (tmp_path / "a" / "evil.jpg").write_bytes(POSTSCRIPT)
    ((path, reason),) = check_data(tmp_path, [], None).unreadable
    assert path == str(tmp_path / "a" / "evil.jpg")
    assert REFUSED in reason


def test_every_place_that_opens_an_image_names_the_formats():
    """Also the examples, which people copy."""
    root = Path(__file__).parents[3]
    opened = [
        line.strip()
        for folder in ("src", "examples")
        for file in (root / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        if "Image.open(" in line
    ]
    assert len(opened) >= 2
    assert all("formats=" in line for line in opened), opened


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.fixture
def without_the_extra(monkeypatch):
    module.formats_read()
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    monkeypatch.setattr(module, "formats_read", module.formats_read.__wrapped__)  # not the cached answer


@pytest.mark.usefixtures("without_the_extra")
def test_photographs_of_a_phone_are_not_passed_over(trained, tmp_path, capsys):
    """Without the extra that reads them they are listed, counted, with what to install."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        saved(tmp_path / name / "0.png", "red" if name == "a" else "blue")
    (tmp_path / "a" / "IMG_1.HEIC").write_bytes(HEIC)
    found = check_data(tmp_path, [], None)
    ((path, reason),) = found.unreadable
    assert path == str(tmp_path / "a" / "IMG_1.HEIC")
    assert reason == "a file of format HEIF, which needs pip install 'ropaws[heic]'"
    assert any("1 of them needs pip install 'ropaws[heic]'" in line for line in found.warnings())
    (tmp_path / "b" / "IMG_2.HEIC").write_bytes(HEIC)
    main(["predict", str(trained[0]), str(tmp_path), "--out", str(tmp_path / "labels.csv")])
    said = " ".join(capsys.readouterr().err.split())
    assert "2 unreadable images" in said
    assert said.endswith("; 2 of them need pip install 'ropaws[heic]'")


def test_photographs_of_a_phone_are_read_with_the_extra(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(Image.new("RGB", (64, 48), "red")).save(tmp_path / "IMG_1.HEIC")
    red, green, blue = Pool.open(tmp_path).image(0).getpixel((30, 20))
    assert red > 200
    assert green < 50
    assert blue < 50


def test_the_extra_for_photographs_of_phones_is_used_where_it_is_installed(monkeypatch):
    class Plugin:
        @staticmethod
        def register_heif_opener():
            monkeypatch.setitem(Image.OPEN, "HEIF", (never, lambda start: start[4:12] == b"ftypheic"))

    monkeypatch.setitem(sys.modules, "pillow_heif", Plugin)
    monkeypatch.setattr(module, "formats_read", module.formats_read.__wrapped__)  # not the cached answer
    assert module.formats_read()[-1] == "HEIF"


def icon(side):
    """One frame of 32 bits, compressed as a PNG that claims any size."""
    head = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    chunk = b"IHDR" + head
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(png), 22) + png


def fits(side):
    cards = (("SIMPLE", "T"), ("BITPIX", "8"), ("NAXIS", "2"), ("NAXIS1", str(side)), ("NAXIS2", str(side)))
    text = "".join(f"{name:8}= {value:>20}".ljust(80) for name, value in cards) + "END".ljust(80)
    return text.ljust(2880).encode()


@pytest.mark.parametrize(("kind", "content"), [("ICO", icon(13_000)), ("FITS", fits(30_000))])
def test_formats_that_take_memory_are_refused_before_they_are_opened(tmp_path, guarded, kind, content):
    assert Image.OPEN[kind][1](content[:16])
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UnreadableError, match=f"a file of format {kind}; the formats that are read are"):
        read_square(tmp_path / "a.png", 8)


@pytest.mark.parametrize("kind", sorted(set(Image.registered_extensions().values()) & set(Image.SAVE)))
def test_a_format_is_read_if_and_only_if_it_is_named(tmp_path, kind):
    """Whatever the file is called."""
    path = tmp_path / "a.jpg"
    for mode in ("RGB", "L", "1", "P", "RGBA"):
        try:
            Image.new("RGB", (64, 64), "red").convert(mode).save(path, kind)
            break
        except (OSError, ValueError, KeyError, RuntimeError):
            continue
    else:
        pytest.skip(f"Pillow writes no {kind} here")
    if kind in FORMATS or kind == "MPO":  # several JPEGs in a file, as phones write them
        assert read_square(path, 8).shape == (8, 8, 3)
    else:
        with pytest.raises(UnreadableError, match="the formats that are read are JPEG, PNG, WEBP"):
            read_square(path, 8)


def test_a_jpeg_of_several_frames_is_read(tmp_path):
    first, second = Image.new("RGB", (64, 48), "red"), Image.new("RGB", (64, 48), "blue")
    first.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[second])
    with Image.open(tmp_path / "a.jpg") as opened:
        assert opened.format == "MPO"
    assert read_square(tmp_path / "a.jpg", 8)[0, 0].tolist() == [254, 0, 0]
    assert image_size(tmp_path / "a.jpg") == (64, 48)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image; the formats that are read are JPEG"),
        (b"hello", "not an image; the formats that are read are JPEG"),
        (b"\xff\xd8\xff\xff cut", "a damaged JPEG file"),
        (b"II*\0cut", "a damaged TIFF file"),
    ],
)
def test_a_file_that_is_no_image_is_said_to_be_so(tmp_path, content, reason):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UnreadableError, match=reason):
        read_square(tmp_path / "a.jpg", 8)
    with pytest.raises(UnreadableError, match=reason):
        image_size(tmp_path / "a.jpg")
