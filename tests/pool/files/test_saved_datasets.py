"""A saved dataset of a stranger: nothing outside its folder is opened."""

import json
import os
import zipfile

import datasets
import pyarrow as pa
import pytest
from PIL import Image

from ropaws.pool.decoding import UnreadableError, read_square
from ropaws.pool.listing import list_labeled, list_unlabeled


def save(folder, images):
    """A dataset whose image column holds these pairs of bytes and path, as they are."""
    blank = Image.new("L", (8, 8))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": [blank] * len(images), "label": ["x"] * len(images)}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    (name,) = (part["filename"] for part in json.loads((folder / "state.json").read_text())["_data_files"])
    with pa.ipc.open_stream(folder / name) as stream:
        schema = stream.schema
    stored = [{"bytes": content, "path": path} for content, path in images]
    table = pa.table(
        {"image": pa.array(stored, schema.field("image").type), "label": ["x"] * len(images)}, schema=schema
    )
    with pa.ipc.new_stream(folder / name, schema) as stream:
        stream.write_table(table)
    return folder


def test_paths_of_others_are_not_opened(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "private.png")
    content = (tmp_path / "private.png").read_bytes()
    monkeypatch.chdir(tmp_path)
    absolute, relative, whole, nothing = list_unlabeled(
        save(
            tmp_path / "saved",
            [
                (None, str(tmp_path / "private.png")),
                (None, "private.png"),
                (content, "/any/name.png"),
                (None, None),
            ],
        )
    ).images
    assert read_square(whole, 8)[0, 0].tolist() == [255, 0, 0]
    for row in (absolute, relative, nothing):
        with pytest.raises(UnreadableError, match="the image is not in the dataset"):
            read_square(row, 8)


def test_addresses_of_others_are_not_opened(tmp_path):
    """An address inside an archive stands for those on servers, which need packages that may be missing."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "private.png")
    with zipfile.ZipFile(tmp_path / "private.zip", "w") as archive:
        archive.write(tmp_path / "private.png", "private.png")
    addresses = (f"zip://private.png::{tmp_path}/private.zip", "https://localhost:9/private.png")
    for row in list_unlabeled(save(tmp_path / "saved", [(None, address) for address in addresses])).images:
        with pytest.raises(UnreadableError, match="the image is not in the dataset"):
            read_square(row, 8)


def with_state(folder, change):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(change(state)))
    return folder


@pytest.mark.parametrize("style", ["absolute", "up", "link"])
def test_the_files_of_a_dataset_are_in_its_folder(tmp_path, style):
    content = b"\x89PNG"
    other = save(tmp_path / "other", [(content, None)])
    (theirs,) = other.glob("*.arrow")
    saved = save(tmp_path / "saved", [(content, None)])
    assert len(list_labeled(saved).images) == 1
    if style == "link":
        (saved / "linked.arrow").symlink_to(theirs)
    name = {"absolute": str(theirs), "up": f"../other/{theirs.name}", "link": "linked.arrow"}[style]
    moved = tmp_path / "again"  # what was read once is remembered by its place
    with_state(saved, lambda state: state | {"_data_files": [{"filename": name}]}).rename(moved)
    with pytest.raises(ValueError, match="is not a file of that folder"):
        list_labeled(moved)


@pytest.mark.parametrize("state", [[], {}, {"_data_files": 3}, {"_data_files": [{}]}, {"_data_files": []}])
def test_a_damaged_dataset_is_one_line(tmp_path, state):
    saved = with_state(save(tmp_path / "saved", [(b"x", None)]), lambda _: state)
    with pytest.raises(ValueError, match="saved dataset"):
        list_labeled(saved)


def test_an_arrow_file_of_noise_is_one_line(tmp_path):
    saved = save(tmp_path / "saved", [(b"x", None)])
    (part,) = saved.glob("*.arrow")
    part.write_bytes(os.urandom(500))
    with pytest.raises(ValueError, match="is not a readable saved dataset"):
        list_labeled(saved)


def test_labels_of_a_dataset_are_numbers_or_names(tmp_path):
    rows = {"image": [Image.new("L", (8, 8))], "label": [[1, 2]]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="column 'label' must be class numbers or names"):
        list_labeled(tmp_path / "saved")
