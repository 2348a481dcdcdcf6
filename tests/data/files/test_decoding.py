"""Every kind of image file becomes the right RGB square; bad ones are said to be bad."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ropaws.data.files import decoding
from ropaws.data.files.decoding import UnreadableError, read_square, read_squares, to_rgb, walk_images

RED = (200, 30, 30)


def image(color=RED, size=(40, 40), mode="RGB"):
    return Image.new("RGB", size, color).convert(mode)


def assert_color(square, color, *, tolerance=3):
    assert square.shape[2] == 3
    assert np.abs(square.reshape(-1, 3).astype(int) - color).max() <= tolerance


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "a.png", "a.webp", "a.bmp", "a.tif", "a.tiff"])
def test_formats(tmp_path, name):
    image().save(tmp_path / name)
    assert_color(read_square(tmp_path / name, 16), RED, tolerance=6)


def test_first_frame_of_a_gif(tmp_path):
    image().save(tmp_path / "a.gif", save_all=True, append_images=[image((0, 0, 255))])
    assert_color(read_square(tmp_path / "a.gif", 16), RED)


def test_gray_and_palette(tmp_path):
    image(mode="L").save(tmp_path / "gray.png")
    assert_color(read_square(tmp_path / "gray.png", 8), (81, 81, 81))
    image(mode="P").save(tmp_path / "palette.png")
    assert_color(read_square(tmp_path / "palette.png", 8), RED, tolerance=40)


def test_transparency_shows_white(tmp_path):
    clear = Image.new("RGBA", (20, 20), (*RED, 0))
    clear.save(tmp_path / "clear.png")
    assert_color(read_square(tmp_path / "clear.png", 8), (255, 255, 255))
    half = Image.new("RGBA", (20, 20), (*RED, 128))
    half.save(tmp_path / "half.png")
    assert_color(read_square(tmp_path / "half.png", 8), (227, 142, 142))
    indexed = Image.new("P", (20, 20), 0)
    indexed.putpalette([10, 10, 10] * 256)
    indexed.save(tmp_path / "indexed.png", transparency=0)
    assert_color(read_square(tmp_path / "indexed.png", 8), (255, 255, 255))


def test_cmyk(tmp_path):
    image(mode="CMYK").save(tmp_path / "a.jpg", quality=95)
    assert_color(read_square(tmp_path / "a.jpg", 8), RED, tolerance=12)


def test_sixteen_bits(tmp_path):
    Image.fromarray(np.full((20, 20), 128 * 257, np.uint16)).save(tmp_path / "a.png")
    assert_color(read_square(tmp_path / "a.png", 8), (128, 128, 128))
    Image.fromarray(np.full((20, 20), 128 * 257, np.uint16)).save(tmp_path / "a.tif")
    assert_color(read_square(tmp_path / "a.tif", 8), (128, 128, 128))
    assert to_rgb(Image.fromarray(np.full((4, 4), 77.0, np.float32))).getpixel((0, 0)) == (77, 77, 77)


def test_floats_from_0_to_1_are_not_black(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "STRIP", 32)  # two rows at a time
    shades = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    found = np.asarray(to_rgb(Image.fromarray(shades)))[:, :, 0]
    np.testing.assert_array_equal(found.ravel(), np.arange(256))
    Image.fromarray(np.full((20, 20), 0.5, np.float32)).save(tmp_path / "a.tif")
    assert_color(read_square(tmp_path / "a.tif", 8), (128, 128, 128))
    shades[3, 3] = 2.0  # of another range
    assert np.asarray(to_rgb(Image.fromarray(shades))).max() == 2
    for bad in (np.nan, np.inf):
        shades[3, 3] = bad
        Image.fromarray(shades).save(tmp_path / "bad.tif")
        with pytest.raises(UnreadableError, match="not finite"):
            read_square(tmp_path / "bad.tif", 8)


def test_exif_rotation(tmp_path):
    """The camera says: turn by 90 degrees. Left of the file is then the top of the image."""
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:, :20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    square = read_square(tmp_path / "a.jpg", 40)
    assert square[:15].mean() > 240
    assert square[25:].mean() < 15


def test_a_wide_image_gives_its_central_square(tmp_path):
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert_color(read_square(tmp_path / "a.png", 10), (255, 255, 255))


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path):
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (800, 800), Image.Resampling.BICUBIC
    )
    coarse.save(tmp_path / "a.jpg", quality=95)
    small = read_square(tmp_path / "a.jpg", 64).astype(int)
    full = np.asarray(coarse.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(small - full).mean() < 3


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff\xe0 cut"])
def test_unreadable_files_say_why(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UnreadableError, match=r"\w"):
        read_square(tmp_path / "a.jpg", 8)


def test_a_truncated_file_is_unreadable(tmp_path):
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(UnreadableError):
        read_square(tmp_path / "a.png", 8)


def test_a_decompression_bomb_is_not_decoded(tmp_path, monkeypatch):
    image(size=(300, 300)).save(tmp_path / "a.png")
    monkeypatch.setenv("ROPAWS_MOST_PIXELS", "1000")
    with pytest.raises(UnreadableError, match=r"300 x 300 has 90,000 pixels, .* set ROPAWS_MOST_PIXELS"):
        read_square(tmp_path / "a.png", 8)
    monkeypatch.setenv("ROPAWS_MOST_PIXELS", "90000")
    assert read_square(tmp_path / "a.png", 8).shape == (8, 8, 3)


def test_workers_give_the_same_in_order(tmp_path):
    paths = []
    for i in range(70):
        paths.append(tmp_path / f"{i:03}.png")
        image((i, 2 * i, 255 - i)).save(paths[-1])
    paths[5].write_bytes(b"broken")
    alone, together = (list(read_squares(paths, 8, workers=workers)) for workers in (1, 2))
    assert [isinstance(x, UnreadableError) for x in together] == [i == 5 for i in range(70)]
    for one, other in zip(alone, together, strict=True):
        if not isinstance(one, UnreadableError):
            np.testing.assert_array_equal(one, other)


def test_folders_are_walked_once_whatever_their_links_and_names(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    os.symlink(tmp_path, tmp_path / "deep" / "loop")
    odd = ["with\nnewline.png", "späße.PNG", "plain.jpg"]
    for name in odd:
        image().save(tmp_path / "deep" / "er" / name)
    raw = os.fsencode(tmp_path / "deep") + b"/not-utf8-\xff.png"
    Path(os.fsdecode(raw)).write_bytes((tmp_path / "deep" / "er" / "plain.jpg").read_bytes())
    (tmp_path / "notes.txt").write_text("no image")
    found = list(walk_images(tmp_path))
    assert len(found) == 4
    assert {path.name for path in found} >= set(odd)
    assert all(read_square(path, 4).shape == (4, 4, 3) for path in found)
