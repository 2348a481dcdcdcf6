"""Predictions of someone else's model: read, matched to images, shown, and choosing what to label."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ropaws.explore.page_state import state
from ropaws.explore.predictions import read_predictions
from ropaws.explore.session import Session
from tests.explore.pools import NAMES, make_pool
from tests.photos import fails

IMAGES = ["/pool/a.png", "/pool/b.png", "/other/c.png"]
PROBS = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]


def write_table(path, names=IMAGES, head=NAMES, probs=PROBS, **more):
    columns = {"path": names, **{name: [row[k] for row in probs] for k, name in enumerate(head)}, **more}
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
@pytest.mark.parametrize("head", [NAMES, [f"p({name})" for name in NAMES]])
def test_tables_are_read(tmp_path, ending, head):
    path = write_table(tmp_path / f"theirs{ending}", head=head, in_domain=[1.0, 0.5, 0.25])
    found = read_predictions(path, IMAGES)
    assert found.class_names == NAMES
    np.testing.assert_allclose(found.outputs.probs, PROBS, atol=1e-6)
    assert found.outputs.in_domain.tolist() == [1.0, 0.5, 0.25]
    assert (found.missing, found.outputs.source) == (0, path.name)


def test_an_npz_is_read(tmp_path):
    np.savez(tmp_path / "theirs.npz", paths=IMAGES[::-1], probabilities=PROBS[::-1], classes=NAMES)
    found = read_predictions(tmp_path / "theirs.npz", IMAGES)
    np.testing.assert_allclose(found.outputs.probs, PROBS, atol=1e-6)


def test_a_label_and_its_confidence_are_enough(tmp_path):
    text = "filename,label,confidence\na.png,star,0.8\nb.png,square,0.6\nc.png,,0\n"
    (tmp_path / "theirs.csv").write_text(text)
    found = read_predictions(tmp_path / "theirs.csv", IMAGES)
    assert found.class_names == ("square", "star")
    np.testing.assert_allclose(found.outputs.probs, [[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]], atol=1e-6)


def test_images_are_found_by_relative_path_and_by_a_name_that_only_one_has(tmp_path):
    path = write_table(tmp_path / "theirs.csv", names=["pool/a.png", "elsewhere/c.png", "d.png"])
    images = [str(tmp_path / "pool/a.png"), "/1/b.png", "shard.tar#c.png", "/1/d.png", "/2/d.png"]
    found = read_predictions(path, images)
    assert found.missing == 3  # d.png may be either
    np.testing.assert_allclose(found.outputs.probs[[0, 2]], PROBS[:2], atol=1e-6)
    np.testing.assert_allclose(found.outputs.probs[[1, 3, 4]], 1 / 3, atol=1e-6)


def test_classes_of_labels_that_the_file_does_not_know_have_probability_0(tmp_path):
    found = read_predictions(write_table(tmp_path / "theirs.csv"), IMAGES, ["moon", "star"])
    assert found.class_names == (*NAMES, "moon")
    assert (found.outputs.probs[:, 3] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["x", "y", "z"]}, "names none of the images"),
        ({"probs": [[2.0, 0.0, 0.0]] * 3}, "sum to 1"),
        ({"probs": [["", 1, 0]] * 3}, "no probability"),
        ({"probs": [["nan", 1, 0]] * 3}, "sum to 1"),
        ({"head": ["star"]}, "two or more classes"),
        ({"head": ["star", "star ", "Out-of-class"]}, "in_domain"),
        ({"in_domain": [1, 2, 3]}, "in_domain be from 0 to 1"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, options, message):
    with pytest.raises(ValueError, match=r".") as error:
        read_predictions(write_table(tmp_path / "theirs.csv", **options), IMAGES)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_arrays_of_another_shape_are_refused(tmp_path):
    np.savez(tmp_path / "theirs.npz", names=IMAGES, probs=PROBS[:2], classes=NAMES)
    with pytest.raises(ValueError, match=r"must be \(3, 3\)"):
        read_predictions(tmp_path / "theirs.npz", IMAGES)
    np.savez(tmp_path / "theirs.npz", probs=PROBS)
    with pytest.raises(ValueError, match="needs names"):
        read_predictions(tmp_path / "theirs.npz", IMAGES)


def test_they_are_shown_and_choose_what_to_label_until_a_refit(tmp_path):
    pool = make_pool(tmp_path / "pool")
    probs = np.full((len(pool), 3), 0.1)
    probs[:, 2] = 0.8
    head = [f"p({name})" for name in NAMES]
    path = write_table(tmp_path / "theirs.csv", pool.names, head, probs.tolist())
    found = read_predictions(path, pool.names)
    pool = make_pool(tmp_path / "pool", outputs=found.outputs)
    object.__setattr__(pool, "class_names", found.class_names)
    session = Session(pool, tmp_path / "out")
    try:
        assert {session.answers.classes[number] for number in session.predicted.tolist()} == {"star"}
        assert session.confidence == pytest.approx(0.8)
        assert len(session.suggested()) == 20
        assert not session.auto_refit
        assert "theirs.csv" in state(session, "tab")["notice"]
        session.start_background()
        session.jobs.wait()
        assert session.round == 0
    finally:
        session.close()


def test_a_run_has_predictions_of_its_own(capsys, tmp_path):
    message = fails(capsys, "explore", tmp_path, "--probabilities", tmp_path / "t.csv", "--no-browser")
    assert "--probabilities takes the place" in message
