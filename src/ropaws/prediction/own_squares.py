"""Images of a run as the squares that prediction takes: to verify, calibrate and measure an exported file."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.data.corpus import Images
from ropaws.data.features import Features, features_of, pixels_of
from ropaws.data.randomness import ANALYSIS, generator
from ropaws.prediction.predict import square_pixels
from ropaws.runs.images import readable_among
from ropaws.runs.run import Run

TEST, POOL, GENERATED = "test images", "training images", "generated images"


class OwnInputs(NamedTuple):
    """What an exported file is tried on."""

    inputs: NDArray[np.uint8] | NDArray[np.float32]  # (n, 3, size, size), or (n, d) features
    labels: NDArray[np.int64]  # (n,) class, or below 0 where none is known
    source: str  # what they are, for a person


def own_inputs(run: Run, most: int) -> OwnInputs:
    """Test images of the run, or else training images; generated ones where its images are gone."""
    try:
        corpus = run.corpus
    except (OSError, ValueError) as error:
        run.console.print(
            f"The images are not available ({error}); generated ones are used instead.", soft_wrap=True
        )
        return _generated(run, most)
    if len(corpus.test_images):
        rows = _draw(torch.arange(len(corpus.test_images)), most)
        return OwnInputs(squares(run, corpus.test_images, rows), corpus.test_labels[rows].numpy(), TEST)
    rows = pool_rows(run, most)
    return OwnInputs(squares(run, corpus.train_images, rows), np.full(len(rows), -1), POOL)


def pool_rows(run: Run, most: int, *, but: Tensor | None = None) -> Tensor:
    """Readable training images that have no label; labeled ones too if there are no others.

    but: images to leave out, if there are others
    """
    everything = torch.arange(len(run.corpus.train_images))
    rows = everything[~torch.isin(everything, run.facts.split.indices)]
    rows = rows if len(rows) else everything
    if but is not None:
        rest = rows[~torch.isin(rows, but)]
        rows = rest if len(rest) else rows
    return readable_among(run.corpus.train_images, _draw(rows, most))


def squares(run: Run, images: Images, rows: Tensor) -> NDArray[np.uint8] | NDArray[np.float32]:
    """The inputs that `ropaws predict` would make of these images."""
    if run.facts.feature_dims:
        features = features_of(images)
        assert isinstance(features, Features)
        return features[rows].float().numpy()
    pixels = pixels_of(images)[rows]  # (n, channels, h, w)
    size = run.config.data.image_size
    if tuple(pixels.shape[1:]) == (3, size, size):
        return np.ascontiguousarray(pixels.numpy())
    made = [square_pixels(image.permute(1, 2, 0).numpy(), size) for image in pixels]
    return np.ascontiguousarray(np.stack(made).transpose(0, 3, 1, 2))


def _draw(rows: Tensor, most: int) -> Tensor:
    """So many of them, always the same ones."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=generator(0, ANALYSIS))[:most]].sort().values


def _generated(run: Run, count: int) -> OwnInputs:
    """Smooth random images, or random rows: for a run whose images are gone."""
    random = np.random.default_rng(0)
    if run.facts.feature_dims:
        rows = random.standard_normal((count, run.facts.feature_dims)).astype(np.float32)
        return OwnInputs(rows, np.full(count, -1), GENERATED)
    size = run.config.data.image_size
    coarse = random.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    smooth = np.stack([square_pixels(image, size) for image in coarse])
    return OwnInputs(np.ascontiguousarray(smooth.transpose(0, 3, 1, 2)), np.full(count, -1), GENERATED)
