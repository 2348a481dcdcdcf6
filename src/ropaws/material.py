"""What the analyses of a run are made from: embeddings, computed once and kept in the run folder."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ropaws.config import RunConfig
from ropaws.data.corpus import UNKNOWN, Corpus, Images
from ropaws.data.files import drop_unreadable_tests
from ropaws.data.randomness import ANALYSIS, generator
from ropaws.data.sources import DataConfig, load_corpus
from ropaws.data.stacks import PictureStack
from ropaws.data.uncurated import MIXES
from ropaws.evaluation.in_domain import in_domain_scores
from ropaws.evaluation.propagation import Kernel
from ropaws.evaluation.soft_nn import predict_probs
from ropaws.evaluation.truth import embedded_truth
from ropaws.folder import (
    DataFacts,
    LabeledEmbeddings,
    check_same_data,
    digest_images,
    load_support,
    model_digest,
    read_facts,
    save_support,
    support_is_current,
)
from ropaws.methods import RoPAWS
from ropaws.trained import Border, Trained, in_domain_border, load_run, read_run_config
from ropaws.training.checkpoint import write_atomically
from ropaws.training.hardware import choose_device
from ropaws.training.progress import watch_files

EMBEDDINGS = "embeddings.safetensors"
POOL = 50_000  # unlabelled images that the analyses look at, at most
BATCH = 512
OUT, HIDDEN = UNKNOWN, UNKNOWN - 1  # truth of a pool image: of no class, or not known
# Datasets without an unlabelled image of their own: what has no label there came with data.extra.
FULLY_LABELED = ("cifar10", "cifar100", "svhn", "tiny-imagenet", "fashion-mnist", "imagenet")


class Embedded(NamedTuple):
    """The content of embeddings.safetensors."""

    pool: Tensor  # (n, d) unlabelled images, or a sample of them
    pool_index: Tensor  # (n,) their positions among the training images
    pool_truth: Tensor  # (n,) class, OUT or HIDDEN: for research, never seen by training
    pool_size: Tensor  # () how many unlabelled images there are
    unreadable: Tensor  # () how many of those chosen could not be read
    test: Tensor  # (t, d)
    test_labels: Tensor  # (t,) class, or OUT
    fingerprint: Tensor  # (k,) of the tests and labels, see fingerprint()
    names: Tensor  # (k,) files of the pool's images as JSON, an empty list where they are no files


@dataclass(frozen=True)
class Material:
    """A run as the analyses see it. Embeddings and images are read when a part asks for them."""

    run: Path
    config: RunConfig
    facts: DataFacts
    pool: int = POOL  # unlabelled images to look at, at most; 0 for all
    device: str | None = None
    console: Console = field(default_factory=lambda: Console(stderr=True))

    @property
    def classes(self) -> int:
        return len(self.facts.class_names)

    @property
    def temperature(self) -> float:
        return self.config.method.temperature

    @cached_property
    def support(self) -> LabeledEmbeddings:
        """The labelled images as the network sees them; made again if lost, or of another model."""
        if not support_is_current(self.run):
            indices = self.facts.split.indices
            embeddings = self.trained.embed(self.corpus.train_images, indices)
            save_support(self.run, embeddings, self.facts.split)
        return load_support(self.run)

    @cached_property
    def border(self) -> Border:
        return in_domain_border(self.config.method, self.support)

    @cached_property
    def votes(self) -> Tensor:
        """Labels of the support as rows.   (l, c)"""
        return torch.nn.functional.one_hot(self.support.labels, self.classes).float()

    def probs(self, points: Tensor) -> Tensor:
        """Soft nearest-neighbour probabilities from the labelled images.   (n, d)  ->  (n, c)"""
        if len(points) == 0:
            return torch.empty(0, self.classes)
        return predict_probs(points, *self.support, classes=self.classes, temperature=self.temperature)

    def in_domain(self, points: Tensor) -> Tensor:
        """Probability of belonging to any class.   (n, d)  ->  (n,)"""
        return in_domain_scores(points, self.support.embeddings, self.border.prior_temperature)

    def kernel(self, support: LabeledEmbeddings | None = None) -> Kernel:
        """As the run was trained; a prior that is 'auto', or not the method's, fits the support."""
        method = self.config.method
        known = method if isinstance(method, RoPAWS) else RoPAWS(prior_temperature="auto")
        prior: float | None = None
        if known.in_domain_prior:
            prior = (
                in_domain_border(method, support or self.support).prior_temperature
                if known.prior_temperature == "auto"
                else known.prior_temperature
            )
        return Kernel(
            temperature=self.temperature,
            prior_temperature=prior,
            label_ratio=known.label_ratio,
            self_vote=known.self_vote,
        )

    @cached_property
    def corpus(self) -> Corpus:
        """The images; an error where they are not there any more."""
        corpus = load_corpus(self.config.data, watch=watch_files(self.console))
        check_same_data(self.run, self.facts, corpus)
        return drop_unreadable_tests(corpus)

    @cached_property
    def trained(self) -> Trained:
        return load_run(self.run, device=self.device)

    @cached_property
    def embedded(self) -> Embedded:
        """From the run folder, or from the images where that is not there or not of this model."""
        kept = _read(self.run / EMBEDDINGS, self._made_from())
        return kept if kept is not None and self._serves(kept) else self.embed_anew()

    def _made_from(self) -> dict[str, str]:
        return {"model": model_digest(self.run), "data": self.facts.digest}

    def _serves(self, kept: Embedded) -> bool:
        """Were as many unlabelled images looked at as are asked for now?"""
        size = int(kept.pool_size)
        return len(kept.pool) + int(kept.unreadable) == min(self.pool or size, size)

    def embed_anew(self) -> Embedded:
        """From the images, and kept."""
        embedded = _embed_all(self)
        tensors = {name: tensor.contiguous() for name, tensor in embedded._asdict().items()}
        made_from = self._made_from()
        write_atomically(self.run / EMBEDDINGS, lambda path: save_file(tensors, path, metadata=made_from))
        return embedded

    def renew(self) -> None:
        """If the images are at hand and the test set or its labels are others than before: embed anew.

        Training images that have changed are an error, as the split names them by position.
        """
        try:
            corpus = self.corpus
        except OSError as error:
            self.console.print(
                f"The images are not at hand ({error}); going on with what is kept.",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            return
        kept = _read(self.run / EMBEDDINGS, self._made_from())
        if kept is not None and not torch.equal(kept.fingerprint, fingerprint(corpus)):
            vars(self)["embedded"] = self.embed_anew()

    @cached_property
    def pool_names(self) -> tuple[str, ...]:
        return tuple(json.loads(bytes(self.embedded.names.tolist())))

    def pool_name(self, place: int) -> str:
        """File of an image of the pool, or its number."""
        return (
            self.pool_names[place] if self.pool_names else f"training image {self.embedded.pool_index[place]}"
        )


def load_material(
    run: Path | str, *, pool: int = POOL, device: str | None = None, console: Console | None = None
) -> Material:
    """A run made ready for analyses. pool: unlabelled images to look at, at most; 0 for all."""
    if pool < 0:
        raise ValueError(f"pool must be at least 0 (all), got {pool}")
    run = Path(run)
    config = read_run_config(run)
    if device is not None:
        choose_device(device)  # for its error: with embeddings at hand none is needed
    model_digest(run)  # for its error: a run that was not finished has no model
    return Material(run, config, read_facts(run), pool, device, console or Console(stderr=True))


def fingerprint(corpus: Corpus) -> Tensor:
    """Of all that the analyses take from the data beside the training images.   ->  (k,) uint8"""
    state = hashlib.blake2b(digest_images(corpus.test_images).encode(), digest_size=16)
    for labels in (corpus.test_labels, corpus.train_labels):
        state.update(labels.numpy().tobytes())
    return torch.tensor(list(state.digest()), dtype=torch.uint8)


def _read(path: Path, made_from: dict[str, str]) -> Embedded | None:
    """None where the file is not there, damaged, or of another model or data."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}) != made_from:
                return None
            return Embedded(**{name: file.get_tensor(name) for name in Embedded._fields})
    except (FileNotFoundError, SafetensorError):
        return None


def _embed_all(material: Material) -> Embedded:
    corpus, trained, most = material.corpus, material.trained, material.pool
    everything = torch.arange(len(corpus.train_images))
    unlabeled = everything[~torch.isin(everything, material.facts.split.indices)]
    chosen = unlabeled
    if 0 < most < len(unlabeled):
        order = torch.randperm(len(unlabeled), generator=generator(0, ANALYSIS))
        chosen = unlabeled[order[:most].sort().values]
    readable = _readable(corpus.train_images, chosen)
    names = [corpus.train_names[i] for i in readable.tolist()] if corpus.train_names else []
    tests = torch.arange(len(corpus.test_images))
    return Embedded(
        pool=_embed(trained, corpus.train_images, readable, "unlabelled", material.console),
        pool_index=readable,
        pool_truth=pool_truth(corpus, material.config.data)[readable],
        pool_size=torch.tensor(len(unlabeled)),
        unreadable=torch.tensor(len(chosen) - len(readable)),
        test=_embed(trained, corpus.test_images, tests, "test", material.console),
        test_labels=corpus.test_labels,
        fingerprint=fingerprint(corpus),
        # Plain ASCII: names that are not UTF-8 come back as they were.
        names=torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8),
    )


def _readable(images: Images, index: Tensor) -> Tensor:
    if not isinstance(images, PictureStack):
        return index
    bad = images.unreadable(index)
    return index[torch.tensor([position not in bad for position in index.tolist()], dtype=torch.bool)]


def _embed(trained: Trained, images: Images, index: Tensor, kind: str, console: Console) -> Tensor:
    """With a bar: a large pool takes minutes."""
    if len(index) == 0:
        return torch.empty(0, trained.config.model.projection_dims)
    parts = index.split(BATCH)
    title = f"Looking at {len(index):,} {kind} images, batches"
    watched = watch_files(console)(parts, title, len(parts))
    return torch.cat([trained.embed(images, part) for part in watched])


def pool_truth(corpus: Corpus, data: DataConfig) -> Tensor:
    """What every training image is, as far as it is known: class, OUT or HIDDEN.   ->  (n,)"""
    truth = corpus.train_labels
    if data.labeled is None and data.source == "fashion-demo" and not data.extra:
        known = embedded_truth().labels  # the classes come first, then what is out-of-class
        return torch.where(known < len(corpus.class_names), known, OUT)
    known_parts = data.source in MIXES or (bool(data.extra) and data.source in FULLY_LABELED)
    return truth if data.labeled is None and known_parts else torch.where(truth == UNKNOWN, HIDDEN, truth)
