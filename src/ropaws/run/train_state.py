"""The parts of a training: images, model, optimizer; built from the settings and checked at the start."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.core.distributed import check_same, gather_constants, place, synchronize_norms
from ropaws.core.features import IN_MEMORY, Features, SeveralKinds, principal_components
from ropaws.core.hardware import Precision, choose_device, choose_precision, half_type
from ropaws.core.labels import UNLABELED
from ropaws.core.optimizers import LARS, build_optimizer, learning_rate
from ropaws.core.randomness import support_indices, support_share, unlabeled_indices
from ropaws.core.run_layout import DATA
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import (
    FEATURES,
    PRETRAINED,
    build_encoder,
    init_files,
    load_init,
    pretrained_normalization,
)
from ropaws.embedding.embedder import useless_features
from ropaws.embedding.encoder import ComponentsHead, Encoder
from ropaws.embedding.weight_files import read_weights
from ropaws.methods import encoder_of, method_name
from ropaws.pool.augment import Normalization, kind_of
from ropaws.pool.corpus import (
    Corpus,
    EmbeddedImages,
    Images,
    ImageStack,
    WholeImages,
    check_unreadable,
    features_of,
    measure_normalization,
    pixels_of,
    without_features,
)
from ropaws.pool.sources import Labeled, choose_split
from ropaws.run.config import RunConfig, embedder_of
from ropaws.run.manifest import DataFacts, digest_images, read_facts
from ropaws.run.run import with_method_parts
from ropaws.training.loaders import BatchStream, TrainingData
from ropaws.training.loop import finish, fit

PROBE_STEPS = 6
NO_NORMALIZATION = Normalization((0.0,), (1.0,))  # features are taken as they are


@dataclass(frozen=True)
class TrainState:
    """What training needs, built and checked."""

    corpus: Corpus
    facts: DataFacts
    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    device: torch.device
    precision: Precision
    left_out: tuple[str, ...] = ()  # weights of model.init that were not used


def prepare(
    config: RunConfig,
    corpus: Corpus,
    device: torch.device,
    console: Console,
    normalize: Normalization | None,
) -> TrainState:
    split, corpus = _readable(choose_split(corpus, config.data, seed=config.train.seed), corpus, console)
    images = corpus.train_images
    own_features = isinstance(images, Features)
    facts = DataFacts(
        corpus.class_names,
        split,
        normalize or (NO_NORMALIZATION if own_features else _normalization(config, corpus)),
        digest_images(corpus.train_images),
        tuple(corpus.train_names[i] for i in split.indices.tolist()) if corpus.train_names else (),
        len(images),
        images.shape[1] if own_features else 0,
        digest_images(corpus.test_images),
    )
    precision = choose_precision(config.train.precision, device)
    return build(config, corpus, facts, device, precision, console, starts=True)


def _normalization(config: RunConfig, corpus: Corpus) -> Normalization:
    """The normalization that the weights expect, where it is known; else that of the images."""
    init = config.model.init
    if init is not None and init != PRETRAINED and (init.parent / DATA).is_file():
        expected: Normalization | None = read_facts(init.parent).normalize  # of the run with these weights
    else:
        expected = pretrained_normalization(config.model, channels=corpus.channels)
    if expected is None or len(expected.mean) != corpus.channels:
        return measure_normalization(pixels_of(corpus.train_images))
    return expected


def _readable(split: Labeled, corpus: Corpus, console: Console) -> tuple[Labeled, Corpus]:
    """Look at the labeled images before training, where images are read while training."""
    if not isinstance(corpus.train_images, ImageStack):  # in memory, or read before
        return split, corpus
    console.print(f"Reading {len(split.indices):,} labeled images once", highlight=False)
    bad = corpus.train_images.unreadable(split.indices)
    names = {corpus.train_names[position]: reason for position, reason in bad.items()}
    check_unreadable(names, len(split.indices))
    kept = torch.tensor([position not in bad for position in split.indices.tolist()])
    lost = set(split.labels.tolist()) - set(split.labels[kept].tolist())
    if lost:
        raise ValueError(f"class {corpus.class_names[min(lost)]!r} has no readable labeled image")
    readable = Labeled(split.indices[kept], split.labels[kept])
    return readable, corpus._replace(unreadable=corpus.unreadable + tuple(names.items()))


def build(
    config: RunConfig,
    corpus: Corpus,
    facts: DataFacts,
    device: torch.device,
    precision: Precision,
    console: Console,
    *,
    starts: bool = False,
) -> TrainState:
    """starts: from the weights of model.init, not from a checkpoint."""
    # Drawn once here for their errors: a batch larger than the pool, more classes than there are, batches
    # that the processes cannot share.
    if config.method.views(config.augment):
        unlabeled_indices(0, batch=config.train.batch, pool=len(corpus.train_images), seed=config.train.seed)
    positions, _ = support_indices(0, facts.split.labels, config.support, seed=config.train.seed)
    support_share(len(positions), config.support, place())
    _check_kind(config, corpus)
    if starts:
        _check_init(config)
    left_out: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        encoder = build_encoder(config.model, channels=facts.channels, autocast=half_type(precision))
        if starts:  # before the method copies any weight
            left_out = load_init(encoder, config.model, config.method.init, channels=facts.channels)
            corpus = with_features(config, corpus, facts, encoder.to(device), console)
            _start_head(corpus, encoder)
        model = with_method_parts(config, facts, encoder).to(device)
    if starts and config.model.init not in (None, PRETRAINED) and len(init_files(config.model.init)) == 1:
        config.method.start(model, read_weights(config.model.init))
    synchronize_norms(model, device)
    optimizer = build_optimizer(model, config.optim)
    scaler = GradScaler(device.type, enabled=precision == "fp16")
    state = TrainState(corpus, facts, model, optimizer, scaler, device, precision, tuple(left_out))
    stream_of(config, state)
    return state


def _check_kind(config: RunConfig, corpus: Corpus) -> None:
    """Features and images go with different backbones."""
    own, asked = isinstance(corpus.train_images, Features), config.model.backbone == FEATURES
    if own and not asked:
        raise ValueError(
            f"the data are features, which model.backbone={config.model.backbone} cannot take; use"
            f" --model.backbone {FEATURES}"
        )
    if asked and not own:
        raise ValueError(
            f"model.backbone={FEATURES} goes with data that are features, got images; name a network"
        )


def _check_init(config: RunConfig) -> None:
    needed = config.method.needs_init
    if needed and config.model.init in (None, PRETRAINED):
        raise ValueError(f"{method_name(config.method)} needs {needed}; give --init RUN/model.safetensors")


def with_features(
    config: RunConfig, corpus: Corpus, facts: DataFacts, encoder: Encoder, console: Console
) -> Corpus:
    """The corpus with the features of a frozen backbone, computed by all processes together."""
    if not config.model.frozen or config.model.backbone == FEATURES:
        return without_features(corpus)
    check_same({"backbone weights": [encoder.backbone_digest()]})
    views = [config.method.labeled_view(config.augment), *config.method.views(config.augment).values()]
    kinds = dict.fromkeys(kind_of(view) for view in views)  # in this order, each once
    embedded = embedder_of(config, encoder, facts.normalize, console).corpus(corpus, list(kinds))
    features = features_of(embedded.train_images)
    labels = torch.full((len(embedded.train_images),), UNLABELED)
    labels[facts.split.indices] = facts.split.labels
    if features is not None and (doubt := useless_features(features, labels.tolist())):
        console.print(f"Warning: {doubt}", highlight=False, soft_wrap=True)
    return embedded


def _start_head(corpus: Corpus, encoder: Encoder) -> None:
    """A linear head starts as the principal components of the features, unless it is another run's."""
    features, head = features_of(corpus.train_images), encoder.projection[0]
    if features is not None and isinstance(head, ComponentsHead) and not head.started:
        head.start(*principal_components(features, head.out_features))


def stream_of(config: RunConfig, state: TrainState) -> BatchStream:
    images = in_main_directions(state.corpus.train_images, encoder_of(state.model), state.model)
    if isinstance(images, torch.Tensor | WholeImages):
        images = images.to(state.device)
    split = state.facts.split
    return BatchStream(
        TrainingData(images, split.indices, split.labels, state.facts.normalize, state.corpus.outside),
        config.method.views(config.augment),
        config.method.labeled_view(config.augment),
        config.support,
        config.train.batch,
        config.train.seed,
        config.augment.size,
        device=state.device,
        interpolation=config.augment.interpolation,
    )


def fit_in_memory(config: RunConfig, corpus: Corpus, facts: DataFacts, device: str | None) -> nn.Module:
    """Train without a run folder, for settings that are tried. Returns the model, in evaluation mode."""
    chosen = choose_device(device or config.train.device)
    precision = choose_precision(config.train.precision, chosen)
    state = build(config, corpus, facts, chosen, precision, Terminal(quiet=True), starts=True)
    stream, total = stream_of(config, state), config.train.steps
    rate = learning_rate(config.optim, total)
    for _ in fit(
        state.model,
        config.method,
        stream.batches(0, total),
        state.optimizer,
        rate,
        state.scaler,
        stream.pool_pass,
    ):
        pass
    return finish(state.model, config.method, stream.whole_pool(total))


def seconds_per_step(config: RunConfig, state: TrainState) -> float:
    """Measured on a copy of the model, so that training itself starts from the same weights."""
    model = copy.deepcopy(state.model)
    stream = stream_of(config, state)
    still = LARS((weight for weight in model.parameters() if weight.requires_grad), lr=0.0)
    batches = stream.batches(0, PROBE_STEPS)
    steps = fit(model, config.method, batches, still, lambda step: 0.0, pool_pass=stream.pool_pass)
    moments = [time.perf_counter() for _ in steps]
    # From the end of the first step: it pays for buffers that the others reuse. The slowest process counts.
    seconds = torch.tensor([(moments[-1] - moments[0]) / (PROBE_STEPS - 1)], device=state.device)
    return float(gather_constants(seconds).amax())


BLOCK = 2048  # images at a time


class DirectedFeatures(Features):
    """Features whose random views are seen as the fixed part of a head sees them; the center view stays.

    Args:
        features: Of the backbone.
        direct: The fixed part of the head, (..., d) to (..., m).
    """

    def __init__(self, features: Features, direct: Callable[[Tensor], Tensor]) -> None:
        self.features = features
        self.direct = direct
        self.made_from = features.made_from
        self._held: dict[object, Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        return self.features.shape

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self.features[index]

    @property
    def view_count(self) -> int:
        return self.features.view_count

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        if kind not in self._held:
            self._held[kind] = self._all_views(kind)
        held = self._held[kind]
        return held[index] if chosen is None else held[index[:, None], chosen]

    def digest(self) -> str:
        return self.features.digest()

    def _all_views(self, kind: object) -> Tensor:
        rows = torch.arange(len(self.features)).split(BLOCK)
        return torch.cat([self.direct(self.features.views(part, kind)) for part in rows])


def in_main_directions(images: Images, encoder: Encoder, model: nn.Module | None = None) -> Images:
    """Bring the cached views of images into the directions of the encoder's head, for training.

    As they are, where there are no features, another head, too many images to hold them, or a head in the
    model (a teacher's) that has other directions.
    """
    features, head = features_of(images), encoder.projection[0]
    if features is None or not isinstance(head, ComponentsHead) or not head.takes_directions:
        return images
    kinds = len(features.kinds) if isinstance(features, SeveralKinds) else 1
    if 4 * len(features) * features.view_count * head.out_features * kinds > IN_MEMORY:
        return images
    others = [other for other in (model or encoder).modules() if isinstance(other, ComponentsHead)]
    if not all(torch.equal(o.mean, head.mean) and torch.equal(o.components, head.components) for o in others):
        return images
    mean, components = head.mean.detach().cpu(), head.components.detach().cpu()

    def direct(rows: Tensor) -> Tensor:
        return head.directions(rows, mean, components)

    directed = DirectedFeatures(features, direct)
    if isinstance(images, EmbeddedImages):
        return EmbeddedImages(images.pixels, directed, images.replaced, images.reasons)
    return directed
