"""A run folder as one object. Everything in it is read, and checked, when it is first asked for."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ropaws.classify.propagation import Kernel
from ropaws.core.features import Features
from ropaws.core.files import TENSOR_FILE, check_regular
from ropaws.core.hardware import choose_device, choose_precision, half_type, keep_freed_memory
from ropaws.core.randomness import ANALYSIS, generator
from ropaws.core.records import Outputs
from ropaws.core.run_layout import CONFIG, EMBEDDINGS, MODEL
from ropaws.core.terminal import Terminal, tell, watch_files
from ropaws.embedding.backbones import Encoder, build_encoder
from ropaws.embedding.embedder import Embedder
from ropaws.embedding.feature_cache import is_feature_cache
from ropaws.embedding.frozen_features import center_features
from ropaws.methods import LabeledEmbeddings, Method, encoder_of
from ropaws.pool.augment import center_view
from ropaws.pool.content import ImageRef
from ropaws.pool.corpus import (
    Corpus,
    EmbeddedImages,
    Images,
    ImageStack,
    drop_unreadable_tests,
    features_of,
    pixels_of,
)
from ropaws.pool.listing import Pool
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.run.config import RunConfig, embedder_of, read_config, to_json
from ropaws.run.manifest import (
    DataFacts,
    check_same_data,
    check_same_tests,
    check_sources,
    load_support,
    model_digest,
    read_facts,
    save_support,
)
from ropaws.run.outputs import (
    KeptOutputs,
    LabeledOutputs,
    PoolOutputs,
    fingerprint,
    pool_truth,
    read_outputs,
    readable_among,
    write_outputs,
)
from ropaws.training.checkpoint import BESIDE, COPIES, load_model, weight_bytes

if TYPE_CHECKING:
    from ropaws.run.discover import Discovery
    from ropaws.run.export_model import ExportedFile, Format
    from ropaws.run.predict import ImageSource, Prediction
    from ropaws.run.results import Evaluation, Suggestion

POOL = 50_000  # unlabeled images that analyses look at, at most
BATCH = 512  # images that the network sees at a time, of up to LARGE pixels per side; of larger ones fewer
LARGE = 256
LONGEST_ROW = 1.001  # of an embedding, but for rounding


class Run:
    """A trained run: settings, data facts, network, and what it says of images.

    Nothing is read before it is needed: `Run("runs/mine").class_names` reads one small file, `.model` loads
    the network, `.pool` embeds the unlabeled images unless an earlier call has kept the result.

    Args:
        path: The run folder.
        device: Where to compute, such as "cpu" or "cuda:1". By default as the run was trained.
        pool: Number of unlabeled images to look at, at most; 0 for all.
        console: Where progress and warnings go; standard error by default.
        corpus: The images of the run, if they are in memory already.
        test: Where the test images are, instead of data.test of its settings. Those that a run names itself
            are used only if they are the ones it was trained with: a stranger's run may name others of yours.

    Attributes:
        path: The run folder.
        config: All settings of the run.

    Raises:
        FileNotFoundError: The path is not a run folder.
        ValueError: A setting is wrong, or config.json is damaged.
    """

    def __init__(
        self,
        path: "Path | str | Run",
        *,
        device: str | None = None,
        pool: int = POOL,
        console: Console | None = None,
        corpus: Corpus | None = None,
        test: Path | str | None = None,
    ) -> None:
        if pool < 0:
            raise ValueError(f"pool must be at least 0 (all), got {pool}")
        self.path = Path(path)
        self.device_name = device
        self.pool_limit = pool
        self.console = console or Terminal(stderr=True)
        self._given_corpus = corpus
        self._test = None if test is None else Path(test)
        self._snapshot: Path | None = None  # weights of an earlier step
        self._known: dict[int, EmbeddedImages] = {}  # images of the corpus by the number of random views
        self.config = read_run_config(self.path)
        if device is not None:
            choose_device(device)  # raises an error; with kept outputs no device would be needed

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    # What the folder holds

    @property
    def method(self) -> Method:
        """The method of the run, with its settings."""
        return self.config.method

    @cached_property
    def facts(self) -> DataFacts:
        """Classes, label split, normalization."""
        return read_facts(self.path)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The known classes, in the order of all probabilities."""
        return self.facts.class_names

    @cached_property
    def model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        return self._load_model()

    def _load_model(self) -> nn.Module:
        device = choose_device(self.device_name or self.config.train.device)
        half = half_type(choose_precision(self.config.train.precision, device))
        check_network(self.path, self.config, self.facts, self._snapshot)
        model = build_model(self.config, self.facts, half)
        load_model(self.path, model, self._snapshot)
        if device.type == "cpu":
            keep_freed_memory()
        return model.to(device).eval()

    def at_snapshot(self, weights: Path) -> "Run":
        """Return the run with the weights of an earlier step; see train.keep_every."""
        earlier = Run(
            self.path, device=self.device_name, pool=self.pool_limit, console=self.console, test=self._test
        )
        earlier._snapshot = weights
        vars(earlier).update(facts=self.facts, corpus=self.corpus)
        return earlier

    def in_full_precision(self) -> "Run":
        """Return the run in float32 on the CPU, whatever it was trained in."""
        exact = Run(
            self.path,
            device="cpu",
            pool=self.pool_limit,
            console=self.console,
            corpus=self._given_corpus,
            test=self._test,
        )
        exact.config = replace(self.config, train=replace(self.config.train, precision="fp32"))
        known = ("facts", "support", "corpus")
        vars(exact).update({name: value for name, value in vars(self).items() if name in known})
        return exact

    @cached_property
    def support(self) -> LabeledEmbeddings:
        """The labeled images as the network sees them; computed again if lost, or of another model."""
        if self._snapshot is not None:  # what the folder keeps is of the final weights
            return self.embedded_support()
        found = load_support(self.path, self.facts)
        if found is None:
            found = self.embedded_support()
            save_support(self.path, found.embeddings, self.facts.split)
        return found

    def embedded_support(self) -> LabeledEmbeddings:
        """The labeled images, embedded by the model as it is."""
        embeddings = self.embed(self.corpus.train_images, self.facts.split.indices)
        return LabeledEmbeddings(embeddings, self.facts.split.labels, len(self.class_names))

    @cached_property
    def kernel(self) -> Kernel:
        """How labels propagate through a pool: as the run was trained."""
        return self.method.kernel(self.support)

    @cached_property
    def threshold(self) -> float:
        """In-domain probability below which an image is out-of-class."""
        return self.method.threshold(self.support)

    @cached_property
    def corpus(self) -> Corpus:
        """The images; an error where they are not there any more."""
        if self._given_corpus is not None:
            return drop_unreadable_tests(self._given_corpus)
        if self._test is not None and not self._test.exists():
            raise FileNotFoundError(f"--test: no folder or table at {self._test}")
        check_sources(self.path, self.data_config)
        corpus = load_corpus(self.data_config, watch=watch_files(self.console))
        check_same_data(self.path, self.facts, corpus)
        if self._test is None:
            check_same_tests(self.path, self.facts, self.data_config, corpus)
        return drop_unreadable_tests(corpus)

    @property
    def data_config(self) -> DataConfig:
        """Where the images are. A run folder may come from a stranger: what its settings name is read, but
        nothing is downloaded, and no folder is created or filled there.
        """
        data = replace(self.config.data, cache=None, download=False)
        if self._test is not None:
            data = replace(data, test=self._test)
        if data.feature_cache is not None and not is_feature_cache(data.feature_cache):
            data = replace(data, feature_cache=None)  # the default one is used
        return data

    # What the network says

    @torch.no_grad()
    def embed(self, images: Images, indices: Tensor | None = None) -> Tensor:
        """Unit embeddings of the center views of images.

        Args:
            images: (n, channels, h, w) uint8, a tensor or images on disk.
            indices: (m,) the images to embed; all of them by default.

        Returns:
            (m, d) on the CPU. One batch is held at a time.
        """
        images, rows = self._embedded(images), torch.arange(len(images)) if indices is None else indices
        parts = [
            self.method.embed(self.model, self._view(images, part)).cpu().float()
            for part in rows.split(self.batch_of(images))
        ]
        embeddings = torch.cat(parts)
        self._check_embedding(embeddings)
        return embeddings

    def outputs(self, images: Images, indices: Tensor | None = None, *, title: str = "") -> Outputs:
        """What the method says of the center views of images; arguments as for embed.

        title: shown with a progress bar, as a large pool takes minutes.
        """
        parts = self._looked_at(images, indices, title)
        return Outputs(*map(torch.cat, zip(*parts, strict=True)))

    def probabilities(
        self, images: Images, indices: Tensor | None = None, *, title: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Of the classes (m, c) and in-domain (m,), as in outputs, without embeddings, which are large."""
        parts = [(part.probs, part.in_domain) for part in self._looked_at(images, indices, title)]
        probs, in_domain = map(torch.cat, zip(*parts, strict=True))
        return probs, in_domain

    @torch.no_grad()
    def _looked_at(self, images: Images, indices: Tensor | None, title: str) -> Iterator[Outputs]:
        """Outputs of a batch at a time, on the CPU; of no image, one without rows."""
        images, rows = self._embedded(images), torch.arange(len(images)) if indices is None else indices
        if len(rows) == 0:
            yield self.method.classify(self.support.embeddings[:0], self.support)
            return
        parted = rows.split(self.batch_of(images))
        batches: Iterable[Tensor] = watch_files(self.console)(parted, title, len(parted)) if title else parted
        support = self._support_on_device
        for part in batches:
            found = self.method.predict(self.model, self._view(images, part), support)
            outputs = Outputs(*(value.cpu().float() for value in found))  # the device holds one batch
            self._check_embedding(outputs.embedding)
            self._check_finite(*outputs[1:])
            yield outputs

    @torch.no_grad()
    def features(self, images: Images, indices: Tensor | None = None) -> Tensor:
        """What the backbone says of the center views of images; arguments as for embed.   ->  (m, f)"""
        images, rows = self._embedded(images), torch.arange(len(images)) if indices is None else indices
        encoder = encoder_of(self.model)
        batches = rows.split(self.batch_of(images))
        parts = [encoder.features(self._view(images, part)).cpu().float() for part in batches]
        return torch.cat(parts) if parts else torch.empty(0, encoder.feature_dims)

    def batch_of(self, images: Images | None = None) -> int:
        """How many images are looked at together; by default of those that are files."""
        if images is not None and features_of(images) is not None:
            return BATCH
        sides = (self.config.data.image_size,) if images is None else images.shape[2:]
        side = max(self.config.augment.size, *sides)
        return BATCH if side <= LARGE else max(1, BATCH * LARGE**2 // side**2)

    def _check_embedding(self, embedding: Tensor) -> None:
        """Similarities are cosines only between rows of unit length."""
        self._check_finite(embedding)
        if len(embedding) and float(embedding.norm(dim=1).max()) > LONGEST_ROW:
            raise ValueError(
                f"{type(self.method).__name__}.embed gives rows longer than 1; it must scale them to length 1"
            )

    def _check_finite(self, *values: Tensor) -> None:
        """Finite weights may still overflow; no analysis means anything then."""
        if not all(bool(value.isfinite().all()) for value in values):
            raise ValueError(
                f"the network of {self.path} gives values that are not finite; restore {MODEL} or train again"
            )

    @cached_property
    def _support_on_device(self) -> LabeledEmbeddings:
        device = next(self.model.parameters()).device
        support = self.support
        return LabeledEmbeddings(support.embeddings.to(device), support.labels.to(device), support.classes)

    def _view(self, images: Images, rows: Tensor) -> Tensor:
        """What the network takes: center views, or the features of a frozen backbone, cached or not."""
        device = next(self.model.parameters()).device
        if (features := features_of(images)) is not None:
            return features[rows].to(device)
        pixels, view = images[rows].to(device), self.config.augment
        if self.config.model.frozen:
            return self._center_features(pixels).to(device)
        return center_view(pixels, view.size, self.facts.normalize, view.interpolation)

    @cached_property
    def _center_features(self) -> Callable[[Tensor], Tensor]:
        return center_features(self._embedder.embedding(Pool()))

    def _embedded(self, images: Images) -> Images:
        """The images, with cached features where the backbone is frozen and they are the run's own."""
        if isinstance(images, Features) or not self.config.model.frozen:
            return pixels_of(images)
        corpus = vars(self).get("corpus")  # not read for this
        views = self.config.model.frozen_views
        if corpus is not None and images is corpus.test_images:
            views = 0  # seen in the center view alone
        elif corpus is None or images is not corpus.train_images:
            known = isinstance(images, EmbeddedImages)
            return images if known and self._made(images, views) else pixels_of(images)
        found = self._known.get(views)
        if found is None or found.pixels is not pixels_of(images):
            keys = corpus.train_keys if images is corpus.train_images else corpus.test_keys
            found = self._known[views] = self._embedder.features(images, views=views, keys=keys)
        return found

    def cached_features(self, files: Sequence[ImageRef]) -> EmbeddedImages:
        """The center views of image files, with the features of the run's frozen backbone."""
        images = ImageStack(files, self.config.data.image_size)
        return self._embedder.features(images, views=0, one_by_one=True)

    @cached_property
    def _embedder(self) -> Embedder:
        """Features of a frozen backbone from the cache, computed as far as they are not there."""
        encoder = encoder_of(self.model)
        return embedder_of(self.config, encoder, self.facts.normalize, self.console, self.data_config)

    def _made(self, images: Images, views: int) -> bool:
        """Are these features of this run's backbone and views?"""
        features = features_of(images)
        return features is not None and features.made_from == self._embedder.digest(views)

    def say(self, line: str) -> None:
        """Print a line of progress, or a warning."""
        tell(self.console, line)

    @property
    def pool(self) -> PoolOutputs:
        """What the method says of the unlabeled images."""
        return self._kept.pool

    @property
    def test(self) -> LabeledOutputs:
        """What the method says of the test images."""
        return self._kept.test

    @cached_property
    def _kept(self) -> KeptOutputs:
        """Outputs from the run folder, or from the images where those are missing or of another model."""
        kept = self._read_kept() if self._snapshot is None else None
        return kept if kept is not None and self._covers(kept.pool) else self._compute_outputs()

    def _read_kept(self) -> KeptOutputs | None:
        kept = read_outputs(self.path / EMBEDDINGS, self._made_from(), len(self.class_names))
        return kept if kept is not None and self._fits(kept) else None

    def _fits(self, kept: KeptOutputs) -> bool:
        """Are these embeddings like those of the labeled images, and positions those of training images?"""
        dims = {part.outputs.embedding.shape[1] for part in (kept.pool, kept.test)}
        known = bool((kept.pool.positions < self.facts.images).all())
        return known and dims == {self.support.embeddings.shape[1]}

    def _made_from(self) -> dict[str, str]:
        settings = json.dumps([to_json(self.config)["method"], self.config.augment.size], sort_keys=True)
        return {
            "model": model_digest(self.path),
            "data": self.facts.digest,
            "settings": hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
        }

    def _covers(self, pool: PoolOutputs) -> bool:
        """Were as many unlabeled images looked at as are asked for now?"""
        return len(pool.positions) + pool.unreadable == min(self.pool_limit or pool.size, pool.size)

    def _compute_outputs(self) -> KeptOutputs:
        kept = KeptOutputs(self._pool_outputs(), self._test_outputs(), fingerprint(self.corpus))
        if self._snapshot is None:
            write_outputs(self.path / EMBEDDINGS, kept, self._made_from())
        return kept

    def _pool_outputs(self) -> PoolOutputs:
        corpus, most = self.corpus, self.pool_limit
        everything = torch.arange(len(corpus.train_images))
        known = torch.cat([self.facts.split.indices, corpus.outside])
        unlabeled = everything[~torch.isin(everything, known)]
        chosen = unlabeled
        if 0 < most < len(unlabeled):
            order = torch.randperm(len(unlabeled), generator=generator(0, ANALYSIS))
            chosen = unlabeled[order[:most].sort().values]
        images = self._embedded(corpus.train_images)
        readable = readable_among(images, chosen)
        title = f"Looking at {len(readable):,} unlabeled images, batches"
        return PoolOutputs(
            self.outputs(corpus.train_images, readable, title=title),
            readable,
            pool_truth(corpus, self.config.data)[readable],
            len(unlabeled),
            len(chosen) - len(readable),
            tuple(corpus.train_names[i] for i in readable.tolist()) if corpus.train_names else (),
        )

    def _test_outputs(self) -> LabeledOutputs:
        images = self.corpus.test_images
        outputs = self.outputs(images, title=f"Looking at {len(images):,} test images, batches")
        return LabeledOutputs(outputs, self.corpus.test_labels)

    def refresh(self) -> None:
        """Compute the outputs again if the images are available and the test set or its labels have changed.

        Training images that have changed are an error, as the split names them by position.
        """
        if self._given_corpus is None:
            vars(self).pop("corpus", None)  # read it again: it may have changed since
        try:
            corpus = self.corpus
        except OSError as error:
            self.say(f"The images are not available ({error}); using the kept outputs.")
            return
        kept = self._read_kept()
        if kept is not None and not torch.equal(kept.fingerprint, fingerprint(corpus)):
            vars(self)["_kept"] = self._compute_outputs()

    # What people ask of a run

    def evaluate(self, only: Sequence[str] | None = None) -> "Evaluation":
        """Analyze the run; see ropaws.evaluate.

        >>> run = Run("runs/mine")
        >>> run.evaluate(only=["soft-nn"])["accuracy"] > 0.5
        True
        """
        from ropaws.run.evaluate import evaluate

        return evaluate(self, only=only)

    def predict(
        self, images: "ImageSource", *, threshold: float | None = None, propagate: bool = False
    ) -> "list[Prediction]":
        """Labels for images; see ropaws.predict.

        >>> found = Run("runs/mine").predict("photos/pool")
        >>> found[0].path, found[0].label, 0 <= found[0].in_domain <= 1
        ('photos/pool/block-0.png', 'block', True)
        """
        from ropaws.run.predict import predict

        return predict(self, images, threshold=threshold, propagate=propagate)

    def suggest(self, n: int = 50) -> "list[Suggestion]":
        """The unlabeled images most worth a label; see ropaws.suggest.

        >>> len(Run("runs/mine").suggest(2))
        2
        """
        from ropaws.run.suggest import suggest

        return suggest(self, n=n)

    def discover(
        self,
        sources: "Sequence[Path | str]" = (),
        *,
        groups: int | None = None,
        threshold: float | None = None,
    ) -> "Discovery":
        """Likely new classes: groups among the images that belong to no known class.

        Args:
            sources: Images to look at: folders, tables, .npz files; by default the run's unlabeled pool, for
                which the network is not needed again.
            groups: How many; by default as many kinds as there seem to be.
            threshold: In-domain probability below which an image is out-of-class; by default the run's.

        >>> found = Run("runs/mine").discover()
        >>> found.out_of_class >= sum(len(group.members) for group in found.groups)
        True
        """
        from ropaws.run.discover import discover

        return discover(self, sources, groups=groups, threshold=threshold)

    def report(self, out: Path | str | None = None, *, baseline: Path | str | None = None) -> Path:
        """Write one self-contained page about the run, evaluating it first if that was not done.

        Args:
            out: The page; by default RUN/report.html.
            baseline: A run of the supervised baseline to compare with; by default RUN/supervised, if any.

        Returns:
            The path of the page.

        >>> Run("runs/mine").report().name
        'report.html'
        """
        from ropaws.run.evaluate import report

        return report(self, out, baseline=baseline)

    def export(
        self,
        path: Path | str | None = None,
        *,
        format: "Format" = "onnx",
        int8: bool = False,
        threshold: float | None = None,
        names: bool = True,
        overwrite: bool = False,
    ) -> "ExportedFile":
        """Write the run as one file that labels images without ropaws; see ropaws.export.

        >>> Run("runs/mine").export("labels.onnx").path.name
        'labels.onnx'
        """
        from ropaws.run.export_model import export

        return export(
            self, path, format=format, int8=int8, threshold=threshold, names=names, overwrite=overwrite
        )


def open_run(run: "Path | str | Run", **options: Any) -> Run:
    """A Run as it is, or the run of a folder with these options."""
    return run if isinstance(run, Run) else Run(run, **options)


def read_run_config(run: Path) -> RunConfig:
    """config.json of a run folder."""
    if not (run / CONFIG).exists():
        raise FileNotFoundError(f"{run} is not a run folder: it has no {CONFIG}; `ropaws train` makes one")
    return read_config(run / CONFIG, inside=run)


def build_model(config: RunConfig, facts: DataFacts, autocast: torch.dtype | None) -> nn.Module:
    """The network of a run with random weights from torch's global generator."""
    return with_method_parts(
        config, facts, build_encoder(config.model, channels=facts.channels, autocast=autocast)
    )


def check_network(run: Path, config: RunConfig, facts: DataFacts, weights: Path | None = None) -> None:
    """Check that the network which the settings name is one that the weight file could hold, before it takes
    memory: a config of a few bytes can name one of many gigabytes.
    """
    path = weights or run / MODEL
    try:
        size = check_regular(path, TENSOR_FILE, inside=run).st_size
    except FileNotFoundError:
        return  # load_model says what to do
    try:
        with torch.device("meta"):  # takes no memory
            needed = weight_bytes(build_model(config, facts, None))
    except (NotImplementedError, RuntimeError):  # a method's own parts may need content
        return
    if needed > COPIES * size + BESIDE:
        raise ValueError(
            f"{run / CONFIG} names a network of {needed:,} bytes, but {path} has {size:,}; restore both"
        )


def with_method_parts(config: RunConfig, facts: DataFacts, encoder: Encoder) -> nn.Module:
    """The model of the method around an encoder, whose weights it may copy."""
    model = config.method.build(encoder, classes=len(facts.class_names), pool=facts.images)
    channels_last: Any = torch.channels_last
    return model.to(memory_format=channels_last)  # type: ignore[call-overload, no-any-return]
