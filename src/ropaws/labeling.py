"""Labels for pictures: class, how sure, and whether the picture belongs to any class at all."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ropaws import equations as eq
from ropaws.data import image_ops
from ropaws.data.listing import list_unlabeled
from ropaws.data.pictures import Picture, UnreadableError, read_square, read_squares, square_of
from ropaws.data.stacks import stack_squares
from ropaws.evaluation.soft_nn import predict_probs
from ropaws.folder import LabeledEmbeddings, load_support
from ropaws.trained import Trained, in_domain_border, load_run

BATCH = 256


class Prediction(NamedTuple):
    """What a run says of one picture."""

    path: str  # empty for pictures that are not files
    label: str
    confidence: float  # probability of that class, among the classes
    in_domain: float  # probability of belonging to any of the classes
    out_of_class: bool  # in_domain below the threshold
    nearest: str  # the most similar labelled picture
    similarity: float  # to it, -1 to 1
    probabilities: tuple[float, ...]  # in the order of the run's class names


class Unreadable(NamedTuple):
    path: str
    reason: str


@dataclass(frozen=True)
class Predictor:
    """A run made ready for pictures."""

    trained: Trained
    support: LabeledEmbeddings
    prior_temperature: float
    threshold: float
    propagate: bool = False  # let the pictures of a batch vote for one another, Eq. (12)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.trained.facts.class_names

    @property
    def picture_size(self) -> int:
        return self.trained.config.data.picture_size

    def __call__(self, squares: Tensor, names: Sequence[str]) -> list[Prediction]:
        """Predict one batch.   squares (n, 3, size, size) uint8"""
        if len(self.trained.facts.normalize.mean) == 1:  # a run on grey images
            squares = image_ops.greyscale(squares.float()).round().to(torch.uint8)
        points = self.trained.embed(squares)
        votes = F.one_hot(self.support.labels, len(self.class_names)).to(points.dtype)
        similarity, nearest = eq.cosine(points, self.support.embeddings).max(dim=1)
        temperature = self.trained.config.method.temperature
        if self.propagate:
            probs, in_domain = eq.ropaws_posterior(
                points,
                self.support.embeddings,
                votes,
                temperature=temperature,
                prior_temperature=self.prior_temperature,
            )
        else:
            probs = predict_probs(
                points,
                self.support.embeddings,
                self.support.labels,
                classes=len(self.class_names),
                temperature=temperature,
            )
            in_domain = eq.in_domain_prior(
                points, self.support.embeddings, temperature=self.prior_temperature
            )
        confidence, label = probs.max(dim=1)
        files = self.trained.facts.labeled_names
        return [
            Prediction(
                path=name,
                label=self.class_names[int(label[i])],
                confidence=float(confidence[i]),
                in_domain=float(in_domain[i]),
                out_of_class=bool(in_domain[i] < self.threshold),
                nearest=files[int(nearest[i])]
                if files
                else str(int(self.trained.facts.split.indices[nearest[i]])),
                similarity=float(similarity[i]),
                probabilities=tuple(probs[i].tolist()),
            )
            for i, name in enumerate(names)
        ]


def load_predictor(
    run: Path | str, *, threshold: float | None = None, propagate: bool = False, device: str | None = None
) -> Predictor:
    """A run, with the threshold given or the one that suits its labelled images."""
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a probability from 0 to 1, got {threshold}")
    run = Path(run)
    trained = load_run(run, device=device)
    support = load_support(run)
    border = in_domain_border(trained.config.method, support)
    chosen = border.threshold if threshold is None else threshold
    return Predictor(trained, support, border.prior_temperature, chosen, propagate)


def predict_files(predictor: Predictor, pictures: Sequence[Picture]) -> Iterator[Prediction | Unreadable]:
    """Predictions, a batch in memory at a time."""
    squares: list[NDArray[np.uint8]] = []
    names: list[str] = []
    size = predictor.picture_size
    for picture, square in zip(pictures, read_squares(pictures, size), strict=True):
        if isinstance(square, UnreadableError):
            yield Unreadable(str(picture), str(square))
            continue
        squares.append(square)
        names.append(str(picture))
        if len(squares) == BATCH:
            yield from predictor(stack_squares(squares, size), names)
            squares, names = [], []
    if squares:
        yield from predictor(stack_squares(squares, size), names)


def _square(image: Path | str | Image.Image | NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    if isinstance(image, Path | str):
        try:
            return read_square(Path(image), size)
        except UnreadableError as error:
            raise ValueError(f"{image} cannot be read ({error})") from None
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return np.asarray(square_of(picture, size))


def predict(
    run: Path | str,
    images: Path | str | Iterable[Path | str | Image.Image | NDArray[np.uint8]],
    *,
    threshold: float | None = None,
    propagate: bool = False,
    device: str | None = None,
) -> list[Prediction]:
    """Labels for pictures: a folder or .npz, or paths, Pillow images, arrays (h, w[, 3]) of uint8.

    A path that cannot be read raises ValueError; `ropaws predict` lists such files and goes on.
    """
    predictor = load_predictor(run, threshold=threshold, propagate=propagate, device=device)
    if isinstance(images, Path | str):  # one picture, or all of a folder
        listed = list_unlabeled(Path(images)).pictures
        images = [picture if isinstance(picture, Path) else picture.open() for picture in listed]
    size = predictor.picture_size
    squares, names = [], []
    for image in images:
        squares.append(_square(image, size))
        names.append(str(image) if isinstance(image, Path | str) else "")
    predictions: list[Prediction] = []
    for start in range(0, len(squares), BATCH):
        stop = start + BATCH
        predictions += predictor(stack_squares(squares[start:stop], size), names[start:stop])
    return predictions
