"""Every kind of image file becomes the right RGB square; bad ones are said to be bad."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, features

from ropaws.pool import decoding
from ropaws.pool.decoding import UnreadableError, read_square, read_squares, to_rgb, walk_images

RED = (200, 30, 30)


def image(color=RED, size=(40, 40), mode="RGB"):
    return Image.new("RGB", size, color).convert(mode)


def assert_color(square, color, *, tolerance=3):
    assert square.shape[2] == 3
    assert np.abs(square.reshape(-1, 3).astype(int) - color).max() <= tolerance


NAMES = ["a.jpg", "a.JPEG", "a.png", "a.webp", "a.bmp", "a.tif", "a.tiff", "a.ppm", "a.avif"]


@pytest.mark.parametrize("name", NAMES)
def test_formats(tmp_path, name):
    if name == "a.avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    image().save(tmp_path / name)
    assert walk_images(tmp_path) == [tmp_path / name]  # also found in a folder
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
    for name in ("a.png", "a.tif"):
        Image.fromarray(np.full((20, 20), 128 * 257, np.uint16)).save(tmp_path / name)
        assert_color(read_square(tmp_path / name, 8), (128, 128, 128))


def saved_deep(path, values):
    """As a gray image of 16 bits; .ppm, which Pillow opens as one of 32 bits, is written by hand."""
    if path.suffix == ".ppm":
        head = b"P5 %d %d 65535\n" % values.shape[::-1]
        path.write_bytes(head + values.astype(">u2").tobytes())
    elif path.suffix == ".bigtif":
        Image.frombytes("I;16B", values.shape[::-1], values.astype(">u2").tobytes()).save(path, "TIFF")
    else:
        Image.fromarray(values).save(path)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.bigtif", "a.ppm"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.sampled_from([255, 256, 65_535]).flatmap(
        lambda highest: arrays(np.uint16, (5, 5), elements=st.integers(0, highest), fill=st.just(highest))
    )
)
def test_a_format_of_16_bits_is_scaled_whatever_its_values_are(tmp_path, name, values):
    """A dark image stays dark, and one bright pixel changes no other."""
    found = read_square(saved_deep(tmp_path / name, values), 5)[:, :, 0]
    np.testing.assert_array_equal(found, (values / 257).round())


@pytest.mark.parametrize("highest", [255, 256, 65_535])
def test_integers_of_32_bits_are_scaled_as_those_of_16(tmp_path, highest):
    values = np.arange(36, dtype=np.int32).reshape(6, 6)
    values[0, 0] = highest
    Image.fromarray(values).save(tmp_path / "a.tif")
    found = read_square(tmp_path / "a.tif", 6)[:, :, 0]
    np.testing.assert_array_equal(found, (values / 257).round())


@pytest.mark.parametrize(("dtype", "value"), [(np.int32, 65_536), (np.int32, -1), (np.float32, 1.5)])
def test_values_beyond_black_and_white_are_refused_with_the_rule(tmp_path, dtype, value):
    values = np.zeros((8, 24), dtype)
    values[0, 0] = value  # outside the central square, which must not decide
    Image.fromarray(values).save(tmp_path / "a.tif")
    rule = (
        r"its values are .*, where 0 is black and \d+ is white, but they go from .*; scale them, or save it"
    )
    with pytest.raises(UnreadableError, match=rule):
        read_square(tmp_path / "a.tif", 8)


def test_floats_go_from_0_to_1(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "STRIP", 32)  # two rows at a time
    shades = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    found = np.asarray(to_rgb(Image.fromarray(shades)))[:, :, 0]
    np.testing.assert_array_equal(found.ravel(), np.arange(256))
    Image.fromarray(np.full((20, 20), 0.5, np.float32)).save(tmp_path / "a.tif")
    assert_color(read_square(tmp_path / "a.tif", 8), (128, 128, 128))
    for bad in (np.nan, np.inf):
        shades[3, 3] = bad
        Image.fromarray(shades).save(tmp_path / "bad.tif")
        with pytest.raises(UnreadableError, match=r"where 0 is black and 1 is white, .*(nan|inf)"):
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
