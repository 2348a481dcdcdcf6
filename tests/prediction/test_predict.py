"""Labels for images: the same for every kind of input, with and without propagation."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import ropaws
from tests import tiny
from tests.photos import NAMES


def test_predict_in_python_takes_paths_images_and_arrays(trained):
    run, photos = trained
    path = photos / "pool" / "rows-0.png"
    with Image.open(path) as image:
        by_path, by_image, by_array = ropaws.predict(run, [path, image.copy(), np.asarray(image)])
    assert by_path.path == str(path)
    assert by_path.probabilities == pytest.approx(by_image.probabilities, abs=1e-6)
    assert by_path.probabilities == pytest.approx(by_array.probabilities, abs=1e-6)
    assert ropaws.predict(run, [path], threshold=1.0)[0].out_of_class
    assert not ropaws.predict(run, [path], threshold=0.0)[0].out_of_class
    with pytest.raises(ValueError, match="cannot be read"):
        ropaws.predict(run, [photos / "nowhere.png"])


def test_a_run_on_gray_images_takes_any_image(photos, tmp_path):
    """As the demo's runs are: their images come as arrays of one channel."""
    run = ropaws.train(tiny.config(tiny.write_data(tmp_path / "data.npz")), tmp_path / "run")
    (prediction,) = ropaws.predict(run, [photos / "pool" / "rows-0.png"])
    assert prediction.label in NAMES
    assert prediction.nearest.isdigit()  # no file: the position in the training images


def test_a_run_predicts_without_its_training_images(trained, tmp_path):
    run, photos = trained
    image = [photos / "pool" / "rows-0.png"]
    moved = shutil.copytree(run, tmp_path / "run")
    config = json.loads((moved / "config.json").read_text())
    config["data"].update(labeled="gone", unlabeled=["gone"], test="gone")
    (moved / "config.json").write_text(json.dumps(config))
    assert ropaws.predict(moved, image) == ropaws.predict(run, image)
