"""train(config), evaluate(run): build the parts, drive the loop. A run is a folder."""

import contextlib
import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim import Optimizer

from ropaws.batch import Losses
from ropaws.config import RunConfig, method_name, read_config, to_json, with_steps
from ropaws.data.corpus import Corpus, Images, measure_normalization
from ropaws.data.files import check_unreadable
from ropaws.data.loaders import BatchStream, TrainingData
from ropaws.data.samplers import support_indices, unlabeled_indices
from ropaws.data.sources import load_corpus
from ropaws.data.splits import Labeled, choose_split
from ropaws.data.stacks import PictureStack
from ropaws.evaluation.features import embed
from ropaws.evaluation.soft_nn import evaluate_soft_nn
from ropaws.folder import (
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    METRICS,
    UNREADABLE,
    DataFacts,
    check_same_data,
    digest_images,
    read_facts,
    save_support,
    training_seconds,
    write_facts,
    write_unreadable,
)
from ropaws.models import Encoder, build_encoder, load_init
from ropaws.training.checkpoint import (
    load_checkpoint,
    load_model,
    read_json,
    save_checkpoint,
    save_model,
    write_json,
)
from ropaws.training.hardware import choose_device, keep_freed_memory, use_bf16
from ropaws.training.interrupt import stop_between_steps
from ropaws.training.loop import TrainingDivergedError, fit, weights_are_finite
from ropaws.training.optim import LARS
from ropaws.training.progress import MetricsFile, drop_metrics_from, show_progress, watch_files
from ropaws.training.schedules import warmup_cosine
from ropaws.version import __version__

PROBE_STEPS = 6
COLLAPSED = 0.98  # mean similarity of the labelled images above which nothing was told apart
COLLAPSE_WARNING = (
    "Warning: the network hardly tells the labelled images apart, so its labels mean little. Train longer"
    " (--budget or --train.steps), or with milder views (--augment.solarize 0 --augment.equalize 0)."
)


class TrainingStopped(KeyboardInterrupt):
    """Training ended early on request; everything up to the last step is saved."""

    def __init__(self, run: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; go on with `ropaws train --resume {run}`")


@dataclass(frozen=True)
class Parts:
    """What training needs, built and checked."""

    corpus: Corpus
    facts: DataFacts
    model: Encoder
    optimizer: Optimizer
    device: torch.device


def train(
    config: RunConfig,
    out: Path | str,
    *,
    budget: float | None = None,
    choices: Sequence[str] = (),
    console: Console | None = None,
) -> Path:
    """Train a model; the run folder, with config, split, metrics, checkpoint and model, is the result.

    budget: seconds to train for, from which the number of steps is worked out; choices: why the
    settings are as they are, kept with the run.
    Raises TrainingStopped, with all saved, when asked to stop by Ctrl-C or SIGTERM.
    """
    run = Path(out)
    if (run / CONFIG).exists():
        raise FileExistsError(
            f"{run} holds a run already; choose another --out, or go on with `ropaws train --resume {run}`"
        )
    console = console or Console(stderr=True)
    # All that can be wrong with the settings and the data is found before anything is written.
    corpus = load_corpus(config.data, watch=watch_files(console))
    split, corpus = _readable(choose_split(corpus, config.data, seed=config.train.seed), corpus, console)
    normalize = measure_normalization(corpus.train_images)
    names = tuple(corpus.train_names[i] for i in split.indices.tolist()) if corpus.train_names else ()
    facts = DataFacts(corpus.class_names, split, normalize, digest_images(corpus.train_images), names)
    device = choose_device(config.train.device)
    parts = _build(config, corpus, facts, device, bf16=use_bf16(config.train.precision, device))
    if config.model.init is not None:
        left = load_init(parts.model, config.model, channels=corpus.channels)
        choices = (*choices, _describe_init(config.model.init, left))
    if budget is not None:
        steps = max(1, int(budget / _seconds_per_step(config, parts)))
        config, choices = (
            with_steps(config, steps),
            (*choices, f"{steps} steps: what fits into {budget:.0f} s"),
        )
    _start_folder(run, config, parts, choices)
    if corpus.unreadable:
        console.print(f"{len(corpus.unreadable)} unreadable pictures left out, listed in {run / UNREADABLE}")
    _fit(run, config, parts, console, start=0, seconds=0.0)
    return run


def resume(run: Path | str, *, console: Console | None = None) -> Path:
    """Go on with a run that was interrupted. Weights and losses are those of an uninterrupted one."""
    run = Path(run)
    config = read_config(run / CONFIG)
    facts = read_facts(run)
    console = console or Console(stderr=True)
    corpus = load_corpus(config.data, watch=watch_files(console))
    check_same_data(run, facts, corpus)
    bf16 = bool(read_json(run / ENVIRONMENT).get("bf16"))
    parts = _build(config, corpus, facts, choose_device(config.train.device), bf16=bf16)
    start, seconds = load_checkpoint(run, parts.model, parts.optimizer)
    _fit(run, config, parts, console, start=start, seconds=seconds)
    return run


def _describe_init(init: Path, left: Sequence[str]) -> str:
    unused = f"; left out: {', '.join(left[:6])}{' ...' if len(left) > 6 else ''}" if left else ""
    return f"backbone starts from {init}{unused}"


def _readable(split: Labeled, corpus: Corpus, console: Console) -> tuple[Labeled, Corpus]:
    """Where pictures are read while training: the labelled ones are looked at before."""
    if not isinstance(corpus.train_images, PictureStack):
        return split, corpus
    console.print(f"Reading {len(split.indices):,} labelled pictures once", highlight=False)
    bad = corpus.train_images.unreadable(split.indices)
    names = {corpus.train_names[position]: reason for position, reason in bad.items()}
    check_unreadable(names, len(split.indices))
    kept = torch.tensor([position not in bad for position in split.indices.tolist()])
    lost = set(split.labels.tolist()) - set(split.labels[kept].tolist())
    if lost:
        raise ValueError(f"class {corpus.class_names[min(lost)]!r} has no readable labelled picture")
    readable = Labeled(split.indices[kept], split.labels[kept])
    return readable, corpus._replace(unreadable=corpus.unreadable + tuple(names.items()))


def _build(config: RunConfig, corpus: Corpus, facts: DataFacts, device: torch.device, *, bf16: bool) -> Parts:
    # Drawn once here for their errors: a batch larger than the pool, more classes than there are.
    unlabeled_indices(0, batch=config.train.batch, pool=len(corpus.train_images), seed=config.train.seed)
    support_indices(0, facts.split.labels, config.support, seed=config.train.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = build_encoder(config.model, channels=corpus.channels, autocast=bf16).to(device)
    settings = config.optim
    optimizer = LARS(
        model.parameters(),
        lr=settings.start,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        trust=settings.trust,
    )
    return Parts(corpus, facts, model, optimizer, device)


def _seconds_per_step(config: RunConfig, parts: Parts) -> float:
    """Measured on a copy of the model, so that training itself starts from the same weights."""
    model = copy.deepcopy(parts.model)
    batches = _stream(config, parts).batches(0, PROBE_STEPS)
    steps = fit(model, config.method, batches, LARS(model.parameters(), lr=0.0), lambda step: 0.0)
    moments = [time.perf_counter() for _ in steps]
    # From the end of the first step: it pays for buffers that the others reuse.
    return (moments[-1] - moments[0]) / (PROBE_STEPS - 1)


def _start_folder(run: Path, config: RunConfig, parts: Parts, choices: Sequence[str]) -> None:
    """What the run is made from. The config comes last: a folder that has one can be resumed."""
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS).unlink(missing_ok=True)
    write_facts(run, parts.facts)
    write_unreadable(run, dict(parts.corpus.unreadable))
    write_json(
        run / ENVIRONMENT,
        {
            "ropaws": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(parts.device),
            "bf16": parts.model.autocast,
            "threads": torch.get_num_threads(),
            "choices": list(choices),
        },
    )
    save_checkpoint(run, parts.model, parts.optimizer, next_step=0, seconds=0.0)
    write_json(run / CONFIG, to_json(config))


def _fit(run: Path, config: RunConfig, parts: Parts, console: Console, *, start: int, seconds: float) -> None:
    """Drive the loop: save, log, show; stop between steps when asked to."""
    if parts.device.type == "cpu":
        keep_freed_memory()
    drop_metrics_from(run / METRICS, start)
    total, every = config.train.steps, config.train.checkpoint_every
    rate = _learning_rate(config)
    stream = _stream(config, parts)
    stream.unreadable.update(parts.corpus.unreadable)
    steps = fit(parts.model, config.method, stream.batches(start, total), parts.optimizer, rate)
    shown = show_progress(
        ((step, losses, rate(step)) for step, losses in steps),
        title=method_name(config.method),
        start=start,
        total=total,
        console=console,
    )
    began = time.perf_counter() - seconds
    metrics = MetricsFile(run / METRICS)
    # Closed on the way out, so that a progress bar ends before anything else is printed.
    with contextlib.closing(metrics), contextlib.closing(shown), stop_between_steps() as request:
        for step, losses, current in shown:
            done, seconds = step + 1, time.perf_counter() - began
            metrics.write(_row(step, losses, current, seconds))
            if done % every == 0 or done == total or request.signal is not None:
                if not weights_are_finite(parts.model):
                    raise TrainingDivergedError("a weight is no longer finite", step, losses, current)
                save_checkpoint(run, parts.model, parts.optimizer, next_step=done, seconds=seconds)
                write_unreadable(run, stream.unreadable)
            if request.signal is not None:
                raise TrainingStopped(run, step)
    save_model(run, parts.model)
    trained = Trained(config, parts.facts, parts.model.eval())
    support = trained.embed(parts.corpus.train_images, parts.facts.split.indices)
    save_support(run, support, parts.facts.split)
    if float((support @ support.T).mean()) > COLLAPSED:
        console.print(COLLAPSE_WARNING, highlight=False)


def _learning_rate(config: RunConfig) -> Callable[[int], float]:
    settings = config.optim

    def rate(step: int) -> float:
        return warmup_cosine(
            step,
            peak=settings.peak,
            start=settings.start,
            end=settings.end,
            warmup=settings.warmup,
            total=config.train.steps,
        )

    return rate


def _stream(config: RunConfig, parts: Parts) -> BatchStream:
    images = parts.corpus.train_images
    if isinstance(images, torch.Tensor):
        images = images.to(parts.device)
    split = parts.facts.split
    return BatchStream(
        TrainingData(images, split.indices, split.labels, parts.facts.normalize),
        config.augment,
        config.support,
        config.train.batch,
        config.train.seed,
        with_views=config.method.needs_unlabeled,
        device=parts.device,
    )


def _row(step: int, losses: Losses, rate: float, seconds: float) -> dict[str, float]:
    parts = {name: float(value) for name, value in losses.parts.items()}
    row = {"step": step, "loss": float(losses.total), **parts}
    return {**row, "learning_rate": rate, "seconds": round(seconds, 3)}


@dataclass(frozen=True)
class Trained:
    """A finished run, loaded for use."""

    config: RunConfig
    facts: DataFacts
    model: Encoder

    def embed(self, images: Images, indices: torch.Tensor | None = None) -> torch.Tensor:
        """Unit embeddings of the images' central squares.   (n, channels, h, w) uint8  ->  (n, d)"""
        size = self.config.augment.size
        return embed(self.model, images, indices, size=size, normalize=self.facts.normalize)


def load_run(run: Path | str, *, device: str | None = None) -> Trained:
    """Network and data facts of a run folder; on the device it was trained for, or another."""
    run = Path(run)
    config = read_config(run / CONFIG)
    facts = read_facts(run)
    place = choose_device(device or config.train.device)
    channels = len(facts.normalize.mean)
    model = build_encoder(config.model, channels=channels, autocast=use_bf16(config.train.precision, place))
    load_model(run, model)
    return Trained(config, facts, model.to(place).eval())


def evaluate(run: Path | str, *, device: str | None = None) -> dict[str, Any]:
    """Test a run with its soft nearest-neighbour classifier; written to evaluation.json too.

    All figures are fractions. The support is all labelled images, a central crop each.
    """
    run = Path(run)
    corpus = load_corpus(read_config(run / CONFIG).data, watch=watch_files(Console(stderr=True)))
    if len(corpus.test_images) == 0:
        raise ValueError(f"the data of {run} has no test images; evaluation needs some with labels")
    trained = load_run(run, device=device)
    check_same_data(run, trained.facts, corpus)
    split = trained.facts.split
    results: dict[str, Any] = evaluate_soft_nn(
        trained.embed(corpus.test_images),
        corpus.test_labels,
        trained.embed(corpus.train_images, split.indices),
        split.labels,
        classes=len(trained.facts.class_names),
        temperature=trained.config.method.temperature,
    )
    results["seconds"] = training_seconds(run)
    write_json(run / EVALUATION, results)
    return results
