"""What the analyses of a run are made from: embeddings, computed once and kept in the run folder."""

import hashlib
import json
from dataclasses import dataclass, replace
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
from ropaws.evaluation.propagation import Kernel
from ropaws.evaluation.truth import embedded_truth
from ropaws.folder import (
    DataFacts,
    LabeledEmbeddings,
    check_same_data,
    load_support,
    read_facts,
    save_support,
)
from ropaws.methods import RoPAWS
from ropaws.trained import Border, Trained, in_domain_border, load_run, read_run_config
from ropaws.training.checkpoint import MODEL, write_atomically
from ropaws.training.hardware import choose_device
from ropaws.training.progress import watch_files

EMBEDDINGS = "embeddings.safetensors"
POOL = 50_000  # unlabelled images that the analyses look at, at most
BATCH = 512
OUT, HIDDEN = UNKNOWN, UNKNOWN - 1  # truth of a pool image: of no class, or not known


class Embedded(NamedTuple):
    """The content of embeddings.safetensors."""

    pool: Tensor  # (n, d) unlabelled images, or a sample of them
    pool_index: Tensor  # (n,) their positions among the training images
    pool_truth: Tensor  # (n,) class, OUT or HIDDEN: for research, never seen by training
    pool_size: Tensor  # () how many unlabelled images there are
    test: Tensor  # (t, d)
    test_labels: Tensor  # (t,) class, or OUT


@dataclass(frozen=True)
class Material:
    """A run as the analyses see it. The images themselves are read only when a part asks for them."""

    run: Path
    config: RunConfig
    facts: DataFacts
    support: LabeledEmbeddings
    embedded: Embedded
    pool_names: tuple[str, ...] = ()  # files of the pool's images, where they are files
    device: str | None = None
    console: Console | None = None

    @property
    def classes(self) -> int:
        return len(self.facts.class_names)

    @property
    def temperature(self) -> float:
        return self.config.method.temperature

    @cached_property
    def border(self) -> Border:
        return in_domain_border(self.config.method, self.support)

    @cached_property
    def votes(self) -> Tensor:
        """Labels of the support as rows.   (l, c)"""
        return torch.nn.functional.one_hot(self.support.labels, self.classes).float()

    @cached_property
    def kernel(self) -> Kernel:
        """As the run was trained; for methods without propagation RoPAWS's defaults."""
        method = self.config.method
        known = method if isinstance(method, RoPAWS) else RoPAWS()
        return Kernel(
            temperature=self.temperature,
            prior_temperature=self.border.prior_temperature,
            label_ratio=known.label_ratio,
            self_vote=known.self_vote,
        )

    @cached_property
    def corpus(self) -> Corpus:
        """The images; an error where they are not there any more."""
        return read_images(self.run, self.config.data, self.facts, self.console)

    @cached_property
    def trained(self) -> Trained:
        return load_run(self.run, device=self.device)

    def pool_name(self, place: int) -> str:
        """File of an image of the pool, or its number."""
        return (
            self.pool_names[place] if self.pool_names else f"training image {self.embedded.pool_index[place]}"
        )


def read_images(run: Path, data: DataConfig, facts: DataFacts, console: Console | None) -> Corpus:
    corpus = load_corpus(data, watch=watch_files(console or Console(stderr=True)))
    check_same_data(run, facts, corpus)
    return drop_unreadable_tests(corpus)


def load_material(
    run: Path | str, *, pool: int = POOL, device: str | None = None, console: Console | None = None
) -> Material:
    """Embeddings from the run folder, or from the images if they are not there or not of this model.

    pool: unlabelled images to look at, at most; 0 for all.
    """
    if pool < 0:
        raise ValueError(f"pool must be at least 0 (all), got {pool}")
    run = Path(run)
    config = read_run_config(run)
    choose_device(device or config.train.device)  # for its error: with embeddings at hand none is needed
    facts = read_facts(run)
    support = _support(run, config, facts, device, console)
    made_from = {"model": _digest_file(run / MODEL), "data": facts.digest, "pool": str(pool)}
    kept = _read(run / EMBEDDINGS, made_from)
    if kept is not None:
        embedded, names = kept
        return Material(run, config, facts, support, embedded, names, device, console)
    nothing = Embedded(*[torch.empty(0)] * len(Embedded._fields))
    bare = Material(run, config, facts, support, nothing, (), device, console)
    embedded = _embed_all(bare, pool)
    everyone = bare.corpus.train_names
    names = tuple(everyone[i] for i in embedded.pool_index.tolist()) if everyone else ()
    tensors = {name: tensor.contiguous() for name, tensor in embedded._asdict().items()}
    metadata = {**made_from, "names": json.dumps(names)}
    write_atomically(run / EMBEDDINGS, lambda path: save_file(tensors, path, metadata=metadata))
    material = replace(bare, embedded=embedded, pool_names=names)
    vars(material).update(corpus=bare.corpus, trained=bare.trained)  # loaded once
    return material


def _support(
    run: Path, config: RunConfig, facts: DataFacts, device: str | None, console: Console | None
) -> LabeledEmbeddings:
    """The labelled images as the network sees them; made again from the images if the file is lost."""
    try:
        return load_support(run)
    except (FileNotFoundError, ValueError):
        trained = load_run(run, device=device)
        corpus = read_images(run, config.data, facts, console)
        save_support(run, trained.embed(corpus.train_images, facts.split.indices), facts.split)
        return load_support(run)


def _digest_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except FileNotFoundError:
        run = path.parent
        raise FileNotFoundError(
            f"no trained model at {path}; finish it with `ropaws train --resume {run}`"
        ) from None


def _read(path: Path, made_from: dict[str, str]) -> tuple[Embedded, tuple[str, ...]] | None:
    """None where the file is not there, damaged, or of another model, data or size of pool."""
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            if any(told.get(key) != value for key, value in made_from.items()):
                return None
            tensors = {name: file.get_tensor(name) for name in Embedded._fields}
            return Embedded(**tensors), tuple(json.loads(told["names"]))
    except (FileNotFoundError, SafetensorError, KeyError):
        return None


def _embed_all(material: Material, most: int) -> Embedded:
    corpus, trained = material.corpus, material.trained
    everything = torch.arange(len(corpus.train_images))
    unlabeled = everything[~torch.isin(everything, material.facts.split.indices)]
    chosen = unlabeled
    if 0 < most < len(unlabeled):
        order = torch.randperm(len(unlabeled), generator=generator(0, ANALYSIS))
        chosen = unlabeled[order[:most].sort().values]
    chosen = _readable(corpus.train_images, chosen)
    return Embedded(
        pool=_embed(trained, corpus.train_images, chosen, "Looking at unlabelled images", material.console),
        pool_index=chosen,
        pool_truth=pool_truth(corpus, material.config.data)[chosen],
        pool_size=torch.tensor(len(unlabeled)),
        test=_embed(
            trained,
            corpus.test_images,
            torch.arange(len(corpus.test_images)),
            "Looking at test images",
            material.console,
        ),
        test_labels=corpus.test_labels,
    )


def _readable(images: Images, index: Tensor) -> Tensor:
    if not isinstance(images, PictureStack):
        return index
    bad = images.unreadable(index)
    return index[torch.tensor([position not in bad for position in index.tolist()], dtype=torch.bool)]


def _embed(trained: Trained, images: Images, index: Tensor, title: str, console: Console | None) -> Tensor:
    """With a bar: a large pool takes minutes."""
    if len(index) == 0:
        return torch.empty(0, trained.config.model.projection_dims)
    parts = index.split(BATCH)
    watched = watch_files(console or Console(stderr=True))(parts, title, len(parts))
    return torch.cat([trained.embed(images, part) for part in watched])


def pool_truth(corpus: Corpus, data: DataConfig) -> Tensor:
    """What every training image is, as far as it is known: class, OUT or HIDDEN.   ->  (n,)"""
    truth = corpus.train_labels
    if data.labeled is None and data.source == "fashion-demo" and not data.extra:
        known = embedded_truth().labels  # the classes come first, then what is out-of-class
        return torch.where(known < len(corpus.class_names), known, OUT)
    made_of_known_parts = data.labeled is None and (data.source in MIXES or bool(data.extra))
    return truth if made_of_known_parts else torch.where(truth == UNKNOWN, HIDDEN, truth)
