"""Labels for images: class, confidence, and whether the image belongs to any class at all."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor

from ropaws.batch import Outputs
from ropaws.data import image_ops
from ropaws.data.datasets.feature_file import (
    FeatureTable,
    check_feature_array,
    feature_rows,
    is_feature_file,
    read_feature_table,
)
from ropaws.data.features import FeatureRows
from ropaws.data.files.decoding import ImageRef, UnreadableError, read_square, read_squares, square_of
from ropaws.data.files.listing import list_unlabeled
from ropaws.data.files.streaming import stack_squares
from ropaws.evaluation.neighbors import Neighbors, nearest
from ropaws.methods import encoder_of
from ropaws.methods.propagation import held_out_in_domain, pool_posterior
from ropaws.methods.soft_nn import kept_quantile
from ropaws.runs.run import BATCH, Run, open_run

ImageLike = Path | str | Image.Image | NDArray[np.uint8]
ImageSource = Path | str | Image.Image | Iterable[ImageLike] | NDArray[np.uint8] | NDArray[np.floating[Any]]
CHANNELS = (1, 3, 4)  # of an image in an array: gray, RGB, RGB with transparency


class Prediction(NamedTuple):
    """What a run says of one image."""

    path: str  # empty for images that are not files
    label: str
    confidence: float  # probability of that class, among the classes
    in_domain: float  # probability of belonging to any of the classes
    out_of_class: bool  # in_domain below the threshold
    nearest: str  # the most similar labeled image
    similarity: float  # to it, -1 to 1
    probabilities: tuple[float, ...]  # in the order of the run's class names


class Unreadable(NamedTuple):
    """An image file that could not be read."""

    path: str
    reason: str


class Verdicts(NamedTuple):
    """Outputs, with the threshold that suits their in-domain score."""

    outputs: Outputs
    threshold: float


class Predictor:
    """A run made ready for images."""

    def __init__(self, run: Run, *, threshold: float | None = None, propagate: bool = False) -> None:
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be a probability from 0 to 1, got {threshold}")
        self.run = run
        self.threshold = threshold  # given by the person; None: judged by the labeled images
        self.last_threshold = threshold  # in use
        self.propagate = propagate
        _ = run.model, run.support  # for their errors, before hours of reading

    def look(self, squares: Tensor) -> Outputs:
        """What the method says of one batch.   squares (n, 3, size, size) uint8"""
        if self.run.facts.feature_dims:
            raise ValueError(
                f"{self.run.path} was trained on features of {self.run.facts.feature_dims} dimensions; give"
                " it an .npz or .npy file of such features, not images"
            )
        if len(self.run.facts.normalize.mean) == 1:  # a run on grayscale images
            squares = image_ops.grayscale(squares.float()).round().to(torch.uint8)
        return self.run.outputs(squares)

    def judge(self, outputs: Outputs, keys: Tensor) -> Verdicts:
        """The final outputs. With propagate, labels spread through all these images, Eq. (12).

        keys (n,): numbers that depend on the pixels alone, so that the result does not depend on the order
        """
        if not self.propagate or len(outputs.embedding) == 0:
            self.last_threshold = self.run.threshold if self.threshold is None else self.threshold
            return Verdicts(outputs, self.last_threshold)
        support, kernel = self.run.support, self.run.kernel
        posterior = pool_posterior(outputs.embedding, support.embeddings, support.one_hot, kernel, keys=keys)
        if kernel.prior_temperature is None:  # the posterior is 1 everywhere: it cannot tell who is in-class
            self.last_threshold = self.run.threshold if self.threshold is None else self.threshold
            return Verdicts(outputs._replace(probs=posterior.probs), self.last_threshold)
        threshold = self.threshold
        if threshold is None:  # of the score in use: the posterior, each labeled image judged without itself
            threshold = kept_quantile(
                held_out_in_domain(outputs.embedding, support.embeddings, support.labels, kernel, keys=keys)
            )
        self.last_threshold = threshold
        propagated = outputs._replace(probs=posterior.probs, in_domain=posterior.in_domain)
        return Verdicts(propagated, threshold)

    def predictions(self, verdicts: Verdicts, names: Sequence[str]) -> Iterator[Prediction]:
        """One prediction for each row of the outputs."""
        run, outputs = self.run, verdicts.outputs
        closest: Neighbors = nearest(outputs.embedding, run.support.embeddings, 1)
        confidence, label = outputs.probs.max(dim=1)
        for row, name in enumerate(names):
            yield Prediction(
                path=name,
                label=run.class_names[int(label[row])],
                confidence=float(confidence[row]),
                in_domain=float(outputs.in_domain[row]),
                out_of_class=bool(outputs.in_domain[row] < verdicts.threshold),
                nearest=self._labeled_name(int(closest.position[row, 0])),
                similarity=float(closest.similarity[row, 0]),
                probabilities=tuple(outputs.probs[row].tolist()),
            )

    def _labeled_name(self, position: int) -> str:
        facts = self.run.facts
        return (
            facts.labeled_names[position] if facts.labeled_names else str(int(facts.split.indices[position]))
        )


class _Looked(NamedTuple):
    """A batch that the network has seen."""

    names: list[str]
    outputs: Outputs
    keys: Tensor  # (n,)


def predict_files(
    predictor: Predictor, files: Sequence[ImageRef] | FeatureTable
) -> Iterator[Prediction | Unreadable | None]:
    """Predictions. Without propagation one batch is in memory at a time. With it, the outputs of all
    images are, and None is yielded for each image that was looked at, to show progress.
    """
    looked: list[_Looked] = []
    batches: Iterator[_Looked | Unreadable]
    if isinstance(files, FeatureTable):
        batches = _look_at_rows(predictor, files)
    else:
        batches = _look_at_files(predictor, files)
    for batch in batches:
        if isinstance(batch, Unreadable):
            yield batch
        elif predictor.propagate:
            looked.append(batch)
            yield from [None] * len(batch.names)
        else:
            yield from predictor.predictions(predictor.judge(batch.outputs, batch.keys), batch.names)
    if looked:
        together = Outputs(*map(torch.cat, zip(*(batch.outputs for batch in looked), strict=True)))
        names = [name for batch in looked for name in batch.names]
        verdicts = predictor.judge(together, torch.cat([batch.keys for batch in looked]))
        yield from predictor.predictions(verdicts, names)


def _look_at_files(predictor: Predictor, files: Sequence[ImageRef]) -> Iterator["_Looked | Unreadable"]:
    squares: list[NDArray[np.uint8]] = []
    names: list[str] = []
    size, batch = predictor.run.config.data.image_size, predictor.run.batch_of()
    for file, square in zip(files, read_squares(files, size), strict=True):
        if isinstance(square, UnreadableError):
            yield Unreadable(str(file), str(square))
            continue
        squares.append(square)
        names.append(str(file))
        if len(squares) == batch:
            yield _look(predictor, squares, names)
            squares, names = [], []
    if squares:
        yield _look(predictor, squares, names)


def _look_at_rows(predictor: Predictor, table: FeatureTable) -> Iterator["_Looked"]:
    """Features of the kind that the run was trained on, or those of its frozen backbone."""
    run = predictor.run
    dims, own = encoder_of(run.model).feature_dims, table.features.shape[1]
    if not run.config.model.frozen:
        raise ValueError(f"{run.path} takes images, not features: it has trained its whole network")
    if own != dims:
        raise ValueError(f"{run.path} takes features of {dims} dimensions, got {own}; use the same backbone")
    for rows in torch.arange(len(table)).split(BATCH):
        part = table.features[rows]
        digests = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest() for row in part]
        names = [table.names[row] for row in rows.tolist()]
        yield _Looked(names, run.outputs(FeatureRows(part)), _numbers(digests))


def _numbers(digests: Sequence[bytes]) -> Tensor:
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])


def _look(predictor: Predictor, squares: Sequence[NDArray[np.uint8]], names: list[str]) -> _Looked:
    digests = [hashlib.blake2b(square.tobytes(), digest_size=8).digest() for square in squares]
    outputs = predictor.look(stack_squares(squares, predictor.run.config.data.image_size))
    return _Looked(names, outputs, _numbers(digests))


def predict(
    run: Path | str | Run,
    images: ImageSource,
    *,
    threshold: float | None = None,
    propagate: bool = False,
    device: str | None = None,
    console: Console | None = None,
) -> list[Prediction]:
    """Label images with a trained run.

    Args:
        run: A run folder.
        images: A folder or .npz file; or paths, Pillow images, arrays (h, w) or (h, w, 3) of uint8; or one
            image, or one array of images (n, h, w) or (n, h, w, 3). An array (h, w, 3) is one image. Features
            (n, d), as an array, .npz or .npy file, for runs on features or on a frozen backbone.
        threshold: In-domain probability below which an image is out-of-class; by default judged by the
            labeled images, each without itself.
        propagate: Let labels spread through all these images: better labels from a large pool.
        device: Where to compute; by default as the run was trained.
        console: Where warnings go; standard error by default.

    Returns:
        One prediction for each image, in order.

    Raises:
        ValueError: An image cannot be read (`ropaws predict` lists such files and labels the others), or an
            array is not of uint8.
    """
    return predict_images(
        open_run(run, device=device, console=console), images, threshold=threshold, propagate=propagate
    )


def predict_images(
    run: Run, images: ImageSource, *, threshold: float | None = None, propagate: bool = False
) -> list[Prediction]:
    """As predict."""
    predictor = Predictor(run, threshold=threshold, propagate=propagate)
    if (table := feature_table(images)) is not None:
        found = predict_files(predictor, table)
        return [prediction for prediction in found if isinstance(prediction, Prediction)]
    if isinstance(images, Path | str):  # one image, or all of a folder
        listed = list_unlabeled(Path(images)).images
        images = [image if isinstance(image, Path) else image.open() for image in listed]
    size = run.config.data.image_size
    squares, names = [], []
    for image in _one_by_one(images):
        squares.append(square_pixels(image, size))
        names.append(str(image) if isinstance(image, Path | str) else "")
    if not squares:
        return []
    looked = _look(predictor, squares, names)
    return list(predictor.predictions(predictor.judge(looked.outputs, looked.keys), names))


def feature_table(source: ImageSource) -> FeatureTable | None:
    """The features of a file or array; None for images."""
    if isinstance(source, Path | str):
        path = Path(source)
        return read_feature_table(path) if path.is_file() and is_feature_file(path) else None
    if isinstance(source, np.ndarray) and source.ndim == 2 and source.dtype.kind == "f":
        check_feature_array(source, "features")
        return FeatureTable(feature_rows(source), ("",) * len(source))
    return None


def _one_by_one(images: Image.Image | Iterable[ImageLike] | NDArray[Any]) -> Iterable[ImageLike]:
    """A single image is a list of one."""
    if isinstance(images, Image.Image):
        return [images]
    if isinstance(images, np.ndarray):
        is_image = images.ndim == 2 or (images.ndim == 3 and images.shape[2] in CHANNELS)
        return [images] if is_image else images
    return images


def _array_image(array: NDArray[Any]) -> Image.Image:
    """An array as an image; nothing is guessed of its range."""
    if array.dtype != np.uint8:
        raise ValueError(
            f"an image as an array has values from 0 to 255 in uint8, got {array.dtype}; if they are from 0"
            " to 1, give (255 * array).round().astype(np.uint8)"
        )
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] not in CHANNELS):
        raise ValueError(f"an image as an array must be (h, w) or (h, w, 1, 3 or 4), got shape {array.shape}")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def square_pixels(image: ImageLike, size: int) -> NDArray[np.uint8]:
    """The central square of an image as the network gets it.   ->  (size, size, 3)"""
    if isinstance(image, Path | str):
        try:
            return read_square(Path(image), size)
        except UnreadableError as error:
            raise ValueError(f"{image} cannot be read ({error})") from None
    if not isinstance(image, Image.Image | np.ndarray):
        raise ValueError(f"an image is a path, a Pillow image or a NumPy array, got {type(image).__name__}")
    opened = image if isinstance(image, Image.Image) else _array_image(image)
    return np.asarray(square_of(opened, size))
