"""Pools that outgrow one machine: labels and features by Ray Data, or by any engine that maps batches.

The work is cut into parts of the pool. A part is one parquet file that appears when it is whole, so a part
that was lost with its machine is computed again, and one that is there is never computed twice.
"""

import hashlib
import itertools
import logging
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from rich.console import Console

from ropaws.core.files import locked, read_json, write_json
from ropaws.core.terminal import Terminal, watch_files
from ropaws.embedding.embedder import Embedder
from ropaws.embedding.frozen_features import Embedding
from ropaws.pool.content import Encoded, ImageRef, Unreadable
from ropaws.pool.corpus import ImageStack
from ropaws.pool.listing import Pool
from ropaws.run.label_files import column_names, columns
from ropaws.run.manifest import model_digest
from ropaws.run.output_formats import TEXTS, Output, write_labels
from ropaws.run.predict import Predictor, predict_files
from ropaws.run.run import Run

Row = dict[str, Any]
Frame = TypeVar("Frame")

PLAN = "parts.json"  # in the output folder: what the parts are of
ERROR = "error"  # the last column: why an image could not be read, else empty


class Maker(Protocol):
    """What is done with images: the same number of rows comes out, in order."""

    def rows(self, images: Sequence[ImageRef]) -> list[Row]: ...

    def describe(self) -> Row:
        """What the rows depend on besides the images: another one has other rows."""
        ...


class Labeler:
    """A trained run as a function from batches of images to batches of labels, for any engine.

    It is small when it is pickled, and each worker loads the run once, at its first batch. A batch is a
    mapping of columns, or a pandas DataFrame: `path`, an image file that the worker can open, or `bytes`, an
    encoded image (with `path` as its name, if there is one). The columns of `ropaws predict` come back, a row
    for each image, in order, and `error`, which is empty unless the image could not be read.

        dataset.map_batches(Labeler, fn_constructor_args=("runs/mine",), concurrency=8)    # Ray Data
        frame.mapInPandas(lambda parts: map(Labeler("runs/mine"), parts), schema)           # Spark
        frame.map_partitions(Labeler("runs/mine"))                                          # Dask

    Args:
        run: The run folder; all workers see it under this path.
        threshold: In-domain probability below which an image is out-of-class; by default that of the run.
        top: Only the most likely classes, instead of one column per class.
        device: Where to compute; by default as the run was trained.
    """

    def __init__(
        self,
        run: Path | str,
        *,
        threshold: float | None = None,
        top: int | None = None,
        device: str | None = None,
    ) -> None:
        self.run = Path(run).absolute()
        self.threshold = threshold
        self.top = top
        self.device = device

    def __getstate__(self) -> Row:
        return {name: value for name, value in vars(self).items() if name != "predictor"}

    @cached_property
    def predictor(self) -> Predictor:
        """The run made ready; loaded when the first batch comes."""
        run = Run(self.run, device=self.device, console=Terminal(quiet=True))
        return Predictor(run, threshold=self.threshold)

    def __call__(self, batch: Frame) -> Frame:
        """Label a batch.

        Raises:
            ValueError: The batch has neither a column `path` nor `bytes`.
        """
        rows = self.rows(_images_of(batch))
        names = list(rows[0]) if rows else self.names
        found = {name: [row[name] for row in rows] for name in names}
        if isinstance(batch, Mapping):
            return {name: np.array(values) for name, values in found.items()}  # type: ignore[return-value]
        return type(batch)(found)  # type: ignore[call-arg]

    @property
    def names(self) -> list[str]:
        """The columns of a batch that comes back."""
        return [*column_names(self.predictor.run.class_names, self.top), ERROR]

    def rows(self, images: Sequence[ImageRef]) -> list[Row]:
        """A row for each image, in order."""
        classes = self.predictor.run.class_names
        found: dict[str, Row] = {}
        for item in predict_files(self.predictor, images):
            if isinstance(item, Unreadable):
                found[item.path] = {**self._nothing(item.path), ERROR: item.reason}
            elif item is not None:
                row = columns(item, classes, self.top)
                found[item.path] = {**row, "confidence": row["confidence"] or math.nan, ERROR: ""}
        return [found[str(image)] for image in images]

    def describe(self) -> Row:
        """See Maker."""
        return {
            "run": str(self.run),
            "weights": model_digest(self.run),
            "threshold": self.threshold,
            "top": self.top,
        }

    def _nothing(self, path: str) -> Row:
        """The row of an image that could not be read."""
        empty = {name: "" if name in TEXTS or name.startswith("top") else math.nan for name in self.names}
        return {**empty, "path": path, "out_of_class": False}


class FeatureMaker:
    """The features of images in the center view, as an engine's workers compute them.

    Args:
        embedding: Network and view, from `Embedder.embedding(pool)`, so that all workers use the same.
        cache: Folder that keeps features; by default that of each worker's machine.
    """

    def __init__(self, embedding: Embedding, cache: Path | None = None) -> None:
        self.embedder = Embedder(embedding, cache=cache, console=Terminal(quiet=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureMaker, (self.embedder.embedding(Pool()), self.embedder.cache)

    def rows(self, images: Sequence[ImageRef]) -> list[Row]:
        """A row for each image, in order: path, features, error."""
        size = self.embedder.embedding(Pool()).image_size
        found = self.embedder.features(ImageStack(images, size), views=0, one_by_one=True)
        return [
            {
                "path": str(image),
                "features": None if number in found.reasons else values,
                ERROR: found.reasons.get(number, ""),
            }
            for number, (image, values) in enumerate(zip(images, found.features[:].tolist(), strict=True))
        ]

    def describe(self) -> Row:
        """See Maker."""
        return {"features": self.embedder.digest(0)}


def _images_of(batch: Any) -> list[ImageRef]:
    names = None if "path" not in batch else [str(name) for name in batch["path"]]
    if "bytes" in batch:
        names = names or [f"row {number}" for number in range(len(batch["bytes"]))]
        return [Encoded(name, bytes(data)) for name, data in zip(names, batch["bytes"], strict=True)]
    if names is None:
        raise ValueError(f"a batch needs a column path or bytes; it has {', '.join(batch)}")
    return [Path(name) for name in names]


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where and how Ray works."""

    address: str | None = None
    """With --engine ray: a cluster, auto: the one here. By default this machine alone."""
    workers: int = 2
    """With --engine ray: processes with a network each."""
    gpus: float = 0.0
    """With --engine ray: GPUs of each worker; 0.5 lets two share one."""
    part: int = 1000
    """With --engine ray: images of a parquet file. What is there is not computed again."""

    def __post_init__(self) -> None:
        for name in ("workers", "part"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.gpus < 0:
            raise ValueError(f"--gpus must be at least 0, got {self.gpus}")


def write_parts(
    maker: Maker,
    images: Sequence[ImageRef],
    out: Path | str,
    options: RayOptions | None = None,
    console: Console | None = None,
) -> int:
    """Compute the rows of a pool with Ray Data, as parquet files of a folder. Parts that are there stay.

    Args:
        maker: What is computed: a Labeler or a FeatureMaker.
        images: Those of a pool; every worker opens them under the same path.
        out: The folder, on a disk that all workers share.
        options: Of Ray.
        console: Where progress goes; standard error by default.

    Returns:
        The number of parts that were computed now.

    Raises:
        ValueError: Ray is not installed, no cluster answers, or the folder holds parts of something else.
    """
    options = options or RayOptions()
    folder = Path(out).absolute()
    with locked(folder):
        _check_plan(folder / PLAN, _plan(maker, images, options))
        starts = [s for s in range(0, len(images), options.part) if not _place(folder, s, options).exists()]
        parts = [images[start : start + options.part] for start in starts]
        finished = _computed(maker, dict(zip(starts, parts, strict=True)), folder, options) if starts else ()
        done = len(images) - sum(map(len, parts))
        counts = itertools.chain([done], finished)
        watch = watch_files(console or Terminal(stderr=True))
        for _ in watch((None for count in counts for _ in range(count)), "Images", len(images)):
            pass
    return len(starts)


def _computed(
    maker: Maker, parts: Mapping[int, Sequence[ImageRef]], folder: Path, options: RayOptions
) -> Iterator[int]:
    """Compute parts on all workers. The number of images of each comes back when its file is there."""
    ray = _started(options)
    rows = [{"start": start, "images": pickle.dumps(list(images))} for start, images in parts.items()]
    made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        _Part,
        fn_constructor_args=(maker, folder, options),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(options.workers, len(rows))),
        num_gpus=options.gpus or None,
    )
    yield from (int(row["count"]) for row in made.iter_rows())


class _Part:
    """A worker: computes parts one after another."""

    def __init__(self, maker: Maker, folder: Path, options: RayOptions) -> None:
        self.maker = maker
        self.folder = folder
        self.options = options

    def __call__(self, batch: Row) -> Row:
        (start,), (content,) = batch["start"], batch["images"]
        images = pickle.loads(content)  # of this very job: Ray hands it on from the process that started it
        rows = iter(self.maker.rows(images))
        write_labels(_place(self.folder, int(start), self.options), rows, Output("parquet"))
        return {"count": np.array([len(images)])}


def check_parts_folder(out: Path) -> None:
    """Refuse what is no folder, before hours of computing.

    Raises:
        ValueError: It looks like a table, or a file is there.
    """
    if out.suffix or out.is_file():
        raise ValueError(f"--out: with --engine ray a folder of parquet files is written, got {out}")


def read_parts(out: Path | str) -> Iterator[Row]:
    """The rows of all parts, in the order of the pool."""
    import pyarrow.parquet

    for path in sorted(Path(out).glob("part-*.parquet")):
        yield from pyarrow.parquet.read_table(path).to_pylist()


def _place(folder: Path, start: int, options: RayOptions) -> Path:
    return folder / f"part-{start // options.part:06d}.parquet"


def _plan(maker: Maker, images: Sequence[ImageRef], options: RayOptions) -> Row:
    names = hashlib.blake2b("\0".join(map(str, images)).encode("utf-8", "surrogateescape"), digest_size=16)
    return {**maker.describe(), "images": len(images), "names": names.hexdigest(), "part": options.part}


def _check_plan(path: Path, plan: Row) -> None:
    """Write down what the parts are of, or refuse to mix them with others."""
    if not path.exists():
        write_json(path, plan)
        return
    kept = read_json(path)
    differs = sorted(name for name in {*plan, *kept} if plan.get(name) != kept.get(name))
    if differs:
        raise ValueError(
            f"--out: {path.parent} holds parts of another job ({', '.join(differs)} differ);"
            " choose another folder"
        )


def _started(options: RayOptions) -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        raise ValueError("--engine ray needs Ray; pip install 'ropaws[ray]'") from None
    if not ray.is_initialized():
        cores = {} if options.address else {"num_cpus": options.workers}
        try:
            ray.init(
                options.address, log_to_driver=False, include_dashboard=False, logging_level="error", **cores
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"--address: no Ray cluster at {options.address} ({error!s:.200})") from None
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
