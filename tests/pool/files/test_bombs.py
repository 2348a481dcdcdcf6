"""Small files that ask for all memory, or never end: refused before they are used."""

import gzip
import io
import json
import pickle
import struct
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from ropaws.core.files import PARSED, PIXELS, Limit, read_json
from ropaws.embedding.weight_files import check_pickle, fit_weights, load_torch_file, read_weights
from ropaws.pool.array_files import list_arrays, load_arrays
from ropaws.pool.datasets import archives
from ropaws.pool.datasets.feature_file import read_feature_table
from ropaws.pool.decoding import UnreadableError, read_square
from ropaws.pool.listing import read_table
from tests.run.test_strangers import within

# Limits


def test_a_limit_can_be_raised_by_the_environment_alone(monkeypatch):
    limit = Limit("ROPAWS_MOST_TESTS", 10, "tests")
    limit.check(10, "this")
    with pytest.raises(ValueError, match=r"this has 11 tests, more than 10; .* set ROPAWS_MOST_TESTS"):
        limit.check(11, "this")
    monkeypatch.setenv("ROPAWS_MOST_TESTS", "11")
    limit.check(11, "this")
    for wrong in ("many", "-1", "0", "1e9", "9" * 30, "٣"):
        monkeypatch.setenv("ROPAWS_MOST_TESTS", wrong)
        with pytest.raises(ValueError, match="ROPAWS_MOST_TESTS must be a whole number"):
            limit.check(1, "this")


# Images


def webp(width, height):
    """One color on so many pixels, in 34 bytes."""
    body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + b"\x88\x88\x08" + bytes(6)
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


def test_34_bytes_do_not_become_gigabytes(tmp_path):
    (tmp_path / "small.webp").write_bytes(webp(100, 90))
    assert read_square(tmp_path / "small.webp", 8).shape == (8, 8, 3)
    (tmp_path / "large.webp").write_bytes(webp(13_300, 13_300))
    with pytest.raises(UnreadableError, match="13300 x 13300 has 176,890,000 pixels, more than 40,000,000"):
        read_square(tmp_path / "large.webp", 8)


def test_a_jpeg_that_is_decoded_at_a_smaller_size_may_have_more_pixels(tmp_path, monkeypatch):
    Image.new("RGB", (160, 100)).save(tmp_path / "a.jpg")
    Image.new("RGB", (160, 100)).save(tmp_path / "a.png")
    monkeypatch.setenv(PIXELS.variable, "8000")
    assert read_square(tmp_path / "a.jpg", 8).shape == (8, 8, 3)
    with pytest.raises(UnreadableError, match="decoded, has 16,000 pixels"):
        read_square(tmp_path / "a.jpg", 90)
    with pytest.raises(UnreadableError, match="16,000 pixels"):
        read_square(tmp_path / "a.png", 8)
    monkeypatch.setenv(PIXELS.variable, "5000")
    with pytest.raises(UnreadableError, match="160 x 100 has 16,000 pixels, more than 15,000"):
        read_square(tmp_path / "a.jpg", 8)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_images_are_converted_as_in_one_piece(tmp_path, monkeypatch, dtype):
    """In strips, which take less memory."""
    white = 1 if dtype == np.float32 else 65_535
    values = (np.random.default_rng(0).integers(0, 65_536, (37, 23)) * (white / 65_535)).astype(dtype)
    Image.fromarray(values).save(tmp_path / "a.tif")
    whole = read_square(tmp_path / "a.tif", 23)
    monkeypatch.setattr("ropaws.pool.decoding.STRIP", 100)
    np.testing.assert_array_equal(read_square(tmp_path / "a.tif", 23), whole)
    expected = (values[7:30].astype(np.float64) * (255 / white)).round()
    np.testing.assert_array_equal(whole[:, :, 0], expected)


# Arrays


def test_an_archive_of_zeros_does_not_fill_memory(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": "|u1", "fortran_order": False, "shape": (150_000, 64, 64)}
        )
        with archive.open("images.npy", "w") as stream:
            stream.write(head.getvalue())
            for _ in range(150):
                stream.write(bytes(1000 * 64 * 64))
    assert (tmp_path / "a.npz").stat().st_size < 1_000_000
    with pytest.raises(
        ValueError, match=r"614,400,128 bytes in memory, more than 268,435,456; .*ARRAY_BYTES"
    ):
        load_arrays(tmp_path / "a.npz")


def test_more_rows_than_python_can_list_are_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", images=np.zeros((5000, 1, 1), np.uint8))
    list_arrays(tmp_path / "a.npz")
    monkeypatch.setenv(PARSED.variable, "1000000")
    with pytest.raises(ValueError, match="5,000 rows: their list has"):
        list_arrays(tmp_path / "a.npz")


def test_damaged_texts_in_arrays_are_refused(tmp_path):
    names = np.array(["a", "b"])
    names.view(np.uint32)[0] = 0xFFFFFFFF
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4), np.uint8), class_names=names)
    with pytest.raises(ValueError, match="texts are damaged"):
        list_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "header", [b"{'descr': '<f4', (", b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 8), }"]
)
def test_a_features_file_with_a_damaged_header_is_refused(tmp_path, header):
    text = header.ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
    with pytest.raises(ValueError, match=r"a\.npy is not a readable \.npy file"):
        read_feature_table(tmp_path / "a.npy")


def test_a_gzipped_archive_unpacks_no_further_than_it_may(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes((0, 0, 8, 1)) + bytes(1 << 29), 1))
    with pytest.raises(ValueError, match="unpacks to more than"):
        archives._read_idx(tmp_path / "a.gz", 1)


# Tables


def test_rows_of_a_table_are_counted_before_they_are_read(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text("path\n" + "a.png\n" * 3000)
    assert len(read_table(tmp_path / "a.csv", needs_label=False).images) == 3000
    monkeypatch.setenv(PARSED.variable, "1000000")
    with pytest.raises(ValueError, match=r"a.csv, once read, has .* set ROPAWS_MOST_PARSED_BYTES"):
        read_table(tmp_path / "a.csv", needs_label=False)


def test_a_parquet_table_that_repeats_a_long_text_is_refused(tmp_path, monkeypatch):
    column = pyarrow.DictionaryArray.from_arrays([0] * 20_000, ["x" * 10_000])
    pyarrow.parquet.write_table(
        pyarrow.table({"path": column.cast(pyarrow.string())}), tmp_path / "a.parquet"
    )
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setenv(PARSED.variable, "50000000")
    with pytest.raises(ValueError, match=r"a.parquet, once read, has"):
        read_table(tmp_path / "a.parquet", needs_label=False)


def test_a_damaged_parquet_table_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not a table PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable table"):
        read_table(tmp_path / "a.parquet")


# JSON


@pytest.mark.parametrize("text", [b"[" + b"{}," * 4_000_000 + b"0]", b"[" + b"[]," * 10_000_000 + b"0]"])
def test_a_json_file_of_empty_values_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"once read, has .* ROPAWS_MOST_PARSED_BYTES"):
        read_json(tmp_path / "a.json")


def test_a_file_of_holes_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.write(b"[" + bytes(5000))
        file.truncate(200 << 20)
    with pytest.raises(OSError, match="are there; write it again"):
        read_json(tmp_path / "a.json")


# Weights


def test_a_dictionary_that_contains_itself_ends(tmp_path):
    loop = {"x": 1}
    loop["state_dict"] = loop
    torch.save(loop, tmp_path / "a.pth")
    with within(20), pytest.raises(ValueError, match="has no tensors by name"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("kind", [list, tuple])
def test_values_that_repeat_each_other_without_end_are_refused(tmp_path, kind):
    """As a key of a dictionary, hashing such a tuple alone would take longer than the universe is old."""
    value = kind(["ha"])
    for _ in range(60):
        value = kind([value] * 10)
    torch.save({"next_step": value}, tmp_path / "a.pt")
    with within(20), pytest.raises(ValueError, match="not a file of tensors, numbers and text"):
        load_torch_file(tmp_path / "a.pt")


def test_a_pickle_of_any_ordinary_value_is_counted():
    values = [
        {"a": [1, 2, (3, 4)], "b": {"c": {5, 6}}},
        list(range(2000)),
        {"x": "y" * 1000},
        (),
        b"z",
        1.5,
        None,
    ]
    for protocol in range(2, 6):
        for value in values:
            check_pickle(io.BytesIO(pickle.dumps(value, protocol)))


def test_compressed_weights_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "a.pth")
    with zipfile.ZipFile(tmp_path / "a.pth") as old, zipfile.ZipFile(tmp_path / "b.pth", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert read_weights(tmp_path / "a.pth")["a"].numel() == 1 << 20
    with pytest.raises(ValueError, match="damaged or holds more than tensors"):
        read_weights(tmp_path / "b.pth")


def test_the_format_of_torch_before_1_6_is_read(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert read_weights(tmp_path / "a.pth")["a"].tolist() == [1, 1, 1]


def test_only_plain_tensors_are_weights(tmp_path):
    odd = {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "complex": torch.zeros(2, dtype=torch.complex64),
        3: torch.ones(2),
        "good": torch.ones(2),
    }
    torch.save(odd, tmp_path / "a.pth")
    assert list(read_weights(tmp_path / "a.pth")) == ["good"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_to_start_from_must_be_finite(tmp_path, value):
    layer = torch.nn.Linear(2, 2)
    save_file({"weight": torch.full((2, 2), value), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="not finite: weight"):
        fit_weights(layer, read_weights(tmp_path / "a.safetensors"))


def test_nothing_of_this_is_in_the_way_of_ordinary_json(tmp_path):
    value = {"names": [f"image {i}" for i in range(100_000)], "deep": [[[]]]}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "a.json") == value
