"""Labels for images: class, confidence, and whether the image belongs to any class at all."""

import contextlib
import hashlib
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor

from ropaws import equations as eq
from ropaws.classify.calibration import matching_temperature
from ropaws.classify.propagation import (
    Electorate,
    HeldOut,
    given_in_class,
    held_out_mass,
    part_mass,
    solve_voters,
)
from ropaws.classify.soft_nn import kept_quantile
from ropaws.core.features import FeatureRows, Features
from ropaws.core.records import Outputs
from ropaws.insight.neighbors import Neighbors, nearest
from ropaws.methods import encoder_of
from ropaws.pool import image_ops
from ropaws.pool.content import ImageRef, Unreadable, UnreadableError
from ropaws.pool.corpus import Images, stack_squares
from ropaws.pool.datasets.feature_file import (
    FeatureTable,
    RowNames,
    check_feature_array,
    feature_table_of,
    is_feature_file,
    read_feature_table,
)
from ropaws.pool.decoding import read_square, read_squares, square_of
from ropaws.pool.listing import Pool, list_unlabeled
from ropaws.pool.remote import RemoteImage
from ropaws.run.run import Run, open_run

SHARPENED = (0.01, 20.0)  # temperatures of propagated votes, whose shares are often close to even
HELD = 1 << 28  # bytes of embeddings that are held; more go to a temporary file


class Verdicts(NamedTuple):
    """Outputs, with the threshold that suits their in-domain score."""

    outputs: Outputs
    threshold: float


class PoolPropagation:
    """Label propagation through a pool whose voters are known, a part of it at a time.

    Class probabilities are as sure, on average over the in-class part of the voters, as labels that were held
    out are right. Where no label can be held out, one per class, they are the shares of the votes.

    Args:
        run: Its labels and its kernel.
        voters: Those of the whole pool.
        threshold: Given by the person; None: that of the run, or, where the in-domain probability is that of
            the propagation, judged by the labeled images, each without itself.
    """

    def __init__(self, run: Run, voters: Electorate, threshold: float | None) -> None:
        self.run = run
        self.voters = voters
        support, kernel = run.support, run.kernel
        self.solved = solve_voters(voters.points, support.embeddings, support.one_hot, kernel)
        held_out = held_out_mass(voters.points, support.embeddings, support.labels, kernel)
        self.temperature = self._calibrated(held_out)
        if threshold is not None:
            self.threshold = threshold
        elif needs_plain_score(run):
            self.threshold = run.threshold
        else:  # of the score in use: the posterior
            self.threshold = kept_quantile(eq.complete_posterior(held_out.mass).in_domain)

    def _calibrated(self, held_out: HeldOut) -> float:
        """The temperature at which voters are as sure as held-out labels are right."""
        voters, classes = self.solved.mass, self.run.support.classes
        if len(held_out.labels) == 0 or classes < 2 or float(voters.sum()) <= 0:
            return 1.0
        right = float((held_out.mass.argmax(dim=1) == held_out.labels).sum())
        accuracy = (right + 0.5) / (len(held_out.labels) + 1)  # never 100 %
        target = max(accuracy, 1 / classes)
        return matching_temperature(given_in_class(voters), voters.sum(dim=1), target, bounds=SHARPENED)

    def __call__(self, embedding: Tensor, in_domain: Tensor | None, start: int) -> Verdicts:
        """Judge the images of the pool from position start on.

        embedding (n, d); in_domain (n,): of the run itself, where it has a better one than the posterior
        """
        support = self.run.support
        mass = part_mass(
            embedding,
            support.embeddings,
            support.one_hot,
            self.solved,
            self.run.kernel,
            own=self.voters.positions,
            start=start,
        )
        inside = eq.complete_posterior(mass).in_domain if in_domain is None else in_domain
        probs = eq.sharpen(given_in_class(mass), temperature=self.temperature)
        return Verdicts(Outputs(embedding, probs, inside, inside), self.threshold)


def needs_plain_score(run: Run) -> bool:
    """Does the run itself say who is in-class: by the pool it was trained on, or as the posterior cannot?"""
    return run.kernel.prior_temperature is None or run.method.in_class_share(run.model) is not None


class HeldRows:
    """Rows in the order in which they came, in memory while they are few, else in a temporary file."""

    def __init__(self) -> None:
        self.file = tempfile.SpooledTemporaryFile(HELD)  # noqa: SIM115 - closed by the caller
        self.lengths: list[int] = []

    def add(self, rows: Tensor) -> None:
        """rows (n, d) float32"""
        self.file.write(rows.contiguous().numpy().tobytes())
        self.lengths.append(len(rows))

    def close(self) -> None:
        self.file.close()

    def rows(self) -> Tensor:
        """All of them, (n, d); those in a file stay there."""
        if not self.lengths:
            return torch.empty(0, 0)
        self.file.flush()
        found = np.frombuffer(mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_COPY), np.float32)
        return torch.from_numpy(found.reshape(sum(self.lengths), -1))

    def __iter__(self) -> Iterator[Tensor]:
        """The parts as they were added."""
        total, size = sum(self.lengths), self.file.tell()
        self.file.seek(0)
        for length in self.lengths:
            part = np.frombuffer(bytearray(self.file.read(size // total * length)), np.float32)
            yield torch.from_numpy(part.reshape(length, -1))


ImageLike = ImageRef | str | Image.Image | NDArray[np.uint8]
ImageSource = Path | str | Image.Image | Iterable[ImageLike] | NDArray[np.uint8] | NDArray[np.floating[Any]]
ROWS = 4096  # rows of features that are looked at together
CACHED = 512  # image files whose features are looked up together
NO_KEYS = torch.empty(0, dtype=torch.long)
CHANNELS = (1, 3, 4)  # of an image in an array: gray, RGB, RGB with transparency


class Prediction(NamedTuple):
    """What a run says of one image."""

    path: str  # empty for images that are not files
    label: str  # empty for images that are out-of-class
    nearest_class: str  # the most likely class; that of `label`, where there is one
    confidence: float | None  # probability of `label`, among the classes; None without a label
    in_domain: float  # probability of belonging to any of the classes
    out_of_class: bool  # in_domain below the threshold
    nearest: str  # the most similar labeled image
    similarity: float  # to it, -1 to 1
    probabilities: tuple[float, ...]  # in the order of the run's class names


class Predictor:
    """A run made ready for images."""

    def __init__(self, run: Run, *, threshold: float | None = None, propagate: bool = False) -> None:
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be a probability from 0 to 1, got {threshold}")
        self.run = run
        self.threshold = threshold  # given by the person; None: judged by the labeled images
        self.last_threshold = threshold  # in use
        self.propagate = propagate
        self.held: HeldRows | None = None  # takes the embeddings of all predictions, if there is one
        _ = run.model, run.support  # for their errors, before hours of reading

    def look(self, images: Images) -> Outputs:
        """What the method says of one batch.   images (n, 3, size, size) uint8, or features"""
        return self.run.outputs(self._seen(images))

    def embedded(self, images: Images) -> tuple[Tensor, Tensor | None]:
        """What label propagation needs of one batch: embeddings, and in-domain scores where it has none."""
        if needs_plain_score(self.run):
            outputs = self.look(images)
            return outputs.embedding, outputs.in_domain
        return self.run.embed(self._seen(images)), None

    def _seen(self, images: Images) -> Images:
        """The images as the run takes them: features as they are, images in its colors."""
        if isinstance(images, Features):
            return images
        if self.run.facts.feature_dims:
            raise ValueError(
                f"{self.run.path} was trained on features of {self.run.facts.feature_dims} dimensions; give"
                " it an .npz or .npy file of such features, not images"
            )
        if len(self.run.facts.normalize.mean) == 1:  # a run on grayscale images
            return image_ops.grayscale(images[:].float()).round().to(torch.uint8)
        return images

    def judge(self, outputs: Outputs, keys: Tensor) -> Verdicts:
        """The final outputs. With propagate, labels spread through all these images, Eq. (12).

        keys (n,): numbers that depend on the pixels alone, so that the result does not depend on the order
        """
        if not self.propagate or len(outputs.embedding) == 0:
            self.last_threshold = self.run.threshold if self.threshold is None else self.threshold
            return Verdicts(outputs, self.last_threshold)
        voters = Electorate()
        voters.add(outputs.embedding, keys)
        plain = outputs.in_domain if needs_plain_score(self.run) else None
        return self.spread(voters)(outputs.embedding, plain, 0)

    def spread(self, voters: Electorate) -> PoolPropagation:
        """Label propagation by these voters of a pool."""
        spread = PoolPropagation(self.run, voters, self.threshold)
        self.last_threshold = spread.threshold
        return spread

    def predictions(self, verdicts: Verdicts, names: Sequence[str]) -> Iterator[Prediction]:
        """One prediction for each row of the outputs."""
        run, outputs = self.run, verdicts.outputs
        if self.held is not None:
            self.held.add(outputs.embedding)
        closest: Neighbors = nearest(outputs.embedding, run.support.embeddings, 1)
        confidence, label = outputs.probs.max(dim=1)
        outside = outputs.in_domain < verdicts.threshold
        # As lists: to ask a tensor for one number takes as long as all the rest.
        columns = (label, confidence, outputs.in_domain, outside, *(part[:, 0] for part in closest))
        rows = zip(*(column.tolist() for column in columns), outputs.probs.tolist(), strict=True)
        for name, (number, sure, inside, out, similarity, position, probs) in zip(names, rows, strict=True):
            yield Prediction(
                path=name,
                label="" if out else run.class_names[number],
                nearest_class=run.class_names[number],
                confidence=None if out else sure,
                in_domain=inside,
                out_of_class=out,
                nearest=self._labeled_name(position),
                similarity=similarity,
                probabilities=tuple(probs),
            )

    def _labeled_name(self, position: int) -> str:
        facts = self.run.facts
        return (
            facts.labeled_names[position] if facts.labeled_names else str(int(facts.split.indices[position]))
        )


class Batch(NamedTuple):
    """Images to look at together."""

    names: Sequence[str]
    images: Images  # (n, 3, size, size) uint8, or features
    keys: Tensor  # (n,) with propagation, else (0,)


def predict_files(
    predictor: Predictor, files: Sequence[ImageRef] | FeatureTable
) -> Iterator[Prediction | Unreadable | None]:
    """Predictions. One batch is in memory at a time; with propagation the embeddings of all images are, up to
    256 MB of them, and None is yielded for each image that was looked at, to show progress.
    """
    if predictor.propagate:
        with contextlib.closing(HeldRows()) as embeddings:
            yield from _predict_pool(predictor, files, embeddings)
        return
    for batch in batches(predictor, files):
        if isinstance(batch, Unreadable):
            yield batch
        else:
            outputs = predictor.look(batch.images)
            yield from predictor.predictions(predictor.judge(outputs, batch.keys), batch.names)


def _predict_pool(
    predictor: Predictor, files: Sequence[ImageRef] | FeatureTable, embeddings: HeldRows
) -> Iterator[Prediction | Unreadable | None]:
    """Labels spread through all images. Features are embedded twice, as that is cheaper than to keep them."""
    voters = Electorate()
    plain: list[Tensor] = []
    names: list[str] = []
    for batch in batches(predictor, files):
        if isinstance(batch, Unreadable):
            yield batch
            continue
        embedding, in_domain = predictor.embedded(batch.images)
        voters.add(embedding, batch.keys)
        if in_domain is not None:
            plain.append(in_domain)
        if not isinstance(files, FeatureTable):
            embeddings.add(embedding)
            names.extend(batch.names)
        yield from [None] * len(batch.names)
    if voters.seen == 0:
        return
    spread, scores, start = predictor.spread(voters), iter(plain), 0
    again = _embedded_rows(predictor, files) if isinstance(files, FeatureTable) else iter(embeddings)
    known = files.names if isinstance(files, FeatureTable) else names
    for embedding in again:
        verdicts = spread(embedding, next(scores, None), start)
        yield from predictor.predictions(verdicts, known[start : start + len(embedding)])
        start += len(embedding)


def batches(predictor: Predictor, files: Sequence[ImageRef] | FeatureTable) -> Iterator["Batch | Unreadable"]:
    """Images as the run takes them, a batch at a time, and those that cannot be read."""
    if isinstance(files, FeatureTable):
        yield from _row_batches(predictor, files)
        return
    facts = predictor.run.facts
    if predictor.run.config.model.frozen and not facts.feature_dims and len(facts.normalize.mean) == 3:
        yield from _cached_batches(predictor, files)
        return
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
            yield _batch(predictor, squares, names)
            squares, names = [], []
    if squares:
        yield _batch(predictor, squares, names)


def _cached_batches(predictor: Predictor, files: Sequence[ImageRef]) -> Iterator["Batch | Unreadable"]:
    """Batches of features: an image that any run has seen in this view is not decoded again."""
    for start in range(0, len(files), CACHED):
        part = files[start : start + CACHED]
        images = predictor.run.cached_features(part)
        yield from (Unreadable(str(part[row]), reason) for row, reason in sorted(images.reasons.items()))
        good = torch.tensor([row for row in range(len(part)) if row not in images.reasons], dtype=torch.long)
        for rows in good.split(predictor.run.batch_of(images)) if len(good) else ():
            features = images.features[rows]
            keys = _keys(features.numpy()) if predictor.propagate else NO_KEYS
            yield Batch([str(part[row]) for row in rows.tolist()], FeatureRows(features), keys)


def _row_batches(predictor: Predictor, table: FeatureTable) -> Iterator[Batch]:
    """Features of the kind that the run was trained on, or those of its frozen backbone."""
    run = predictor.run
    dims, own = encoder_of(run.model).feature_dims, table.features.shape[1]
    if not run.config.model.frozen:
        raise ValueError(f"{run.path} takes images, not features: it has trained its whole network")
    if own != dims:
        raise ValueError(f"{run.path} takes features of {dims} dimensions, got {own}; use the same backbone")
    for start in range(0, len(table), ROWS):
        part = table.features[start : start + ROWS]
        keys = _keys(part.numpy()) if predictor.propagate else NO_KEYS
        yield Batch(table.names[start : start + ROWS], FeatureRows(part), keys)


def _embedded_rows(predictor: Predictor, table: FeatureTable) -> Iterator[Tensor]:
    for start in range(0, len(table), ROWS):
        yield predictor.run.embed(FeatureRows(table.features[start : start + ROWS]))


def _keys(images: Iterable[NDArray[Any]]) -> Tensor:
    """A number for each image that depends on its content alone.   ->  (n,)"""
    digests = (hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])


def _batch(predictor: Predictor, squares: Sequence[NDArray[np.uint8]], names: list[str]) -> Batch:
    keys = _keys(squares) if predictor.propagate else NO_KEYS
    return Batch(names, stack_squares(squares, predictor.run.config.data.image_size), keys)


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
        propagate: Let labels spread through all these images: better labels from a large pool. Confidence is
            then calibrated by labels that are held out.
        device: Where to compute; by default as the run was trained.
        console: Where warnings go; standard error by default.

    Returns:
        One prediction for each image, in order.

    Raises:
        ValueError: An image cannot be read (`ropaws predict` lists such files and labels the others), or an
            array is not of uint8.
    """
    opened = open_run(run, device=device, console=console)
    predictor = Predictor(opened, threshold=threshold, propagate=propagate)
    if (table := feature_table(images)) is not None:
        found = predict_files(predictor, table)
        return [prediction for prediction in found if isinstance(prediction, Prediction)]
    if isinstance(images, Path | str):  # one image, or all of a folder
        return _of_files(predictor, list_unlabeled(Path(images)).images)
    if isinstance(images, list | tuple) and all(isinstance(image, Path | str) for image in images):
        return _of_files(predictor, [Path(image) for image in images])
    size = opened.config.data.image_size
    squares, names = [], []
    for image in _one_by_one(images):
        squares.append(square_pixels(image, size))
        names.append(str(image) if isinstance(image, Path | str) else "")
    if not squares:
        return []
    batch = _batch(predictor, squares, names)
    verdicts = predictor.judge(predictor.look(batch.images), batch.keys)
    return list(predictor.predictions(verdicts, names))


def _of_files(predictor: Predictor, files: Sequence[ImageRef]) -> list[Prediction]:
    found = []
    for item in predict_files(predictor, files):
        if isinstance(item, Unreadable):
            raise ValueError(f"{item.path} cannot be read ({item.reason})")
        if item is not None:
            found.append(item)
    pairs = zip(found, files, strict=True)
    return [item if isinstance(file, Path | RemoteImage) else item._replace(path="") for item, file in pairs]


def feature_table(source: ImageSource) -> FeatureTable | None:
    """The features of a file or array; None for images."""
    if isinstance(source, Path | str):
        path = Path(source)
        return read_feature_table(path) if path.is_file() and is_feature_file(path) else None
    if isinstance(source, np.ndarray) and source.ndim == 2 and source.dtype.kind == "f":
        check_feature_array(source, "features")
        return feature_table_of(source, RowNames(None, len(source)))
    return None


def listed_images(
    sources: Sequence[Path | str], say: Callable[[str], object] = lambda _: None
) -> Sequence[ImageRef] | FeatureTable:
    """The images of some sources, or the rows of one file of features.   say: told what is left out"""
    tables = [table for source in sources if (table := feature_table(source)) is not None]
    if not tables:
        pool = Pool.open(sources)
        for line in pool.notes:
            say(line)
        return pool.images
    if len(sources) > 1:
        raise ValueError("one file of features at a time: give each its own --out")
    return tables[0]


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
    if isinstance(image, str | ImageRef):
        try:
            return read_square(Path(image) if isinstance(image, str) else image, size)
        except UnreadableError as error:
            raise ValueError(f"{image} cannot be read ({error})") from None
    if not isinstance(image, Image.Image | np.ndarray):
        raise ValueError(f"an image is a path, a Pillow image or a NumPy array, got {type(image).__name__}")
    opened = image if isinstance(image, Image.Image) else _array_image(image)
    return np.asarray(square_of(opened, size))
