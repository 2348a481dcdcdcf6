"""train(config), evaluate(run): build the parts, drive the loop. A run is a folder."""

import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ropaws.batch import Losses
from ropaws.config import RunConfig, method_name, read_config, to_json
from ropaws.data.augment import Normalization
from ropaws.data.corpus import Corpus, measure_normalization
from ropaws.data.loaders import BatchStream, TrainingData
from ropaws.data.samplers import support_indices, unlabeled_indices
from ropaws.data.sources import load_corpus
from ropaws.data.splits import Labeled, draw_split
from ropaws.evaluation.features import embed
from ropaws.evaluation.soft_nn import evaluate_soft_nn
from ropaws.models import Encoder, build_encoder
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
from ropaws.training.loop import fit
from ropaws.training.optim import LARS
from ropaws.training.progress import MetricsFile, drop_metrics_from, show_progress
from ropaws.training.schedules import warmup_cosine
from ropaws.version import __version__

CONFIG, DATA, METRICS, EVALUATION, ENVIRONMENT = (
    "config.json", "data.json", "metrics.jsonl", "evaluation.json", "environment.json",
)  # fmt: skip


class TrainingStopped(KeyboardInterrupt):
    """Training ended early on request; everything up to the last step is saved."""

    def __init__(self, run: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; go on with `ropaws train --resume {run}`")


@dataclass(frozen=True)
class Parts:
    """A run's data and network, on the device."""

    corpus: Corpus
    split: Labeled
    normalize: Normalization
    model: Encoder
    device: torch.device


def train(
    config: RunConfig, out: Path | str, *, resume: bool = False, console: Console | None = None
) -> Path:
    """Train a model; the run folder, with config, split, metrics, checkpoint and model, is the result.

    resume: go on in a folder that was trained in before, at its last checkpoint.
    Raises TrainingStopped, with all saved, when asked to stop by Ctrl-C or SIGTERM.
    """
    run = Path(out)
    console = console or Console(stderr=True)
    if not resume and (run / CONFIG).exists():
        raise FileExistsError(
            f"{run} holds a run already; choose another --out, or go on with `ropaws train --resume {run}`"
        )
    # All that can be wrong with the settings and the data is found before anything is written.
    parts = _prepare(config, read_split(run) if resume else None)
    if not resume:
        _describe(run, config, parts)
    _fit(run, config, parts, console, resume=resume)
    save_model(run, parts.model)
    return run


def resume(run: Path | str, *, console: Console | None = None) -> Path:
    """Go on with a run that was interrupted. Weights and losses are those of an uninterrupted one."""
    return train(read_config(Path(run) / CONFIG), run, resume=True, console=console)


def _prepare(config: RunConfig, split: Labeled | None) -> Parts:
    device = choose_device(config.train.device)
    corpus = load_corpus(config.data)
    if split is None:
        split = draw_split(
            corpus.train_labels,
            corpus.class_names,
            labels_per_class=config.data.labels_per_class,
            seed=config.train.seed,
        )
    # Drawn once here for their errors: a batch larger than the pool, more classes than there are.
    unlabeled_indices(0, batch=config.train.batch, pool=len(corpus.train_images), seed=config.train.seed)
    support_indices(0, split.labels, config.support, seed=config.train.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        autocast = use_bf16(config.train.precision, device)
        model = build_encoder(config.model, channels=corpus.channels, autocast=autocast).to(device)
    return Parts(corpus, split, measure_normalization(corpus.train_images), model, device)


def _describe(run: Path, config: RunConfig, parts: Parts) -> None:
    """What the run was made from, for everything downstream."""
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS).unlink(missing_ok=True)
    write_json(
        run / DATA,
        {
            "class_names": list(parts.corpus.class_names),
            "unlabeled": len(parts.corpus.train_images),
            "labeled": {"indices": parts.split.indices.tolist(), "labels": parts.split.labels.tolist()},
            "normalization": asdict(parts.normalize),
        },
    )
    write_json(
        run / ENVIRONMENT,
        {
            "ropaws": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(parts.device),
            "bf16": parts.model.autocast,
            "threads": torch.get_num_threads(),
        },
    )
    write_json(run / CONFIG, to_json(config))


def read_split(run: Path) -> Labeled:
    """The labels that a run was granted."""
    labeled = read_json(run / DATA)["labeled"]
    return Labeled(torch.tensor(labeled["indices"]), torch.tensor(labeled["labels"]))


def _fit(run: Path, config: RunConfig, parts: Parts, console: Console, *, resume: bool) -> None:
    """Drive the loop: save, log, show; stop between steps when asked to."""
    settings, total = config.optim, config.train.steps

    def learning_rate(step: int) -> float:
        return warmup_cosine(
            step,
            peak=settings.peak,
            start=settings.start,
            end=settings.end,
            warmup=settings.warmup,
            total=total,
        )

    if parts.device.type == "cpu":
        keep_freed_memory()
    optimizer = LARS(
        parts.model.parameters(),
        lr=settings.start,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        trust=settings.trust,
    )
    start, seconds = load_checkpoint(run, parts.model, optimizer) if resume else (0, 0.0)
    drop_metrics_from(run / METRICS, start)
    stream = BatchStream(
        TrainingData(
            parts.corpus.train_images.to(parts.device),
            parts.split.indices,
            parts.split.labels,
            parts.normalize,
        ),
        config.augment,
        config.support,
        config.train.batch,
        config.train.seed,
        with_views=config.method.needs_unlabeled,
    )
    steps = fit(parts.model, config.method, stream.batches(start, total), optimizer, learning_rate)
    shown = show_progress(
        ((step, losses, learning_rate(step)) for step, losses in steps),
        title=method_name(config.method),
        start=start,
        total=total,
        console=console,
    )
    began = time.perf_counter() - seconds
    metrics = MetricsFile(run / METRICS)
    try:
        with stop_between_steps() as request:
            for step, losses, rate in shown:
                seconds = time.perf_counter() - began
                metrics.write(_row(step, losses, rate, seconds))
                done = step + 1
                if done % config.train.checkpoint_every == 0 or done == total or request.signal is not None:
                    save_checkpoint(run, parts.model, optimizer, next_step=done, seconds=seconds)
                if request.signal is not None and done < total:
                    raise TrainingStopped(run, step)
    finally:
        metrics.close()


def _row(step: int, losses: Losses, rate: float, seconds: float) -> dict[str, float]:
    parts = {name: float(value) for name, value in losses.parts.items()}
    return {
        "step": step,
        "loss": float(losses.total),
        **parts,
        "learning_rate": rate,
        "seconds": round(seconds, 3),
    }


@dataclass(frozen=True)
class Trained:
    """A finished run, loaded for use."""

    config: RunConfig
    class_names: tuple[str, ...]
    split: Labeled
    normalize: Normalization
    model: Encoder


def load_run(run: Path | str, *, channels: int) -> Trained:
    """Network and data facts of a run folder."""
    run = Path(run)
    config = read_config(run / CONFIG)
    facts = read_json(run / DATA)
    device = choose_device(config.train.device)
    model = build_encoder(config.model, channels=channels, autocast=use_bf16(config.train.precision, device))
    load_model(run, model)
    normalize = Normalization(**{name: tuple(values) for name, values in facts["normalization"].items()})
    return Trained(config, tuple(facts["class_names"]), read_split(run), normalize, model.to(device).eval())


def evaluate(run: Path | str) -> dict[str, Any]:
    """Test a run with its soft nearest-neighbour classifier; written to evaluation.json too.

    All figures are fractions. The support is all labelled images, a central crop each.
    """
    run = Path(run)
    corpus = load_corpus(read_config(run / CONFIG).data)
    trained = load_run(run, channels=corpus.channels)
    if len(corpus.test_images) == 0:
        raise ValueError(f"the data of {run} has no test images; evaluation needs some with labels")
    size = trained.config.augment.size
    labeled_images = corpus.train_images[trained.split.indices]
    results: dict[str, Any] = evaluate_soft_nn(
        embed(trained.model, corpus.test_images, size=size, normalize=trained.normalize),
        corpus.test_labels,
        embed(trained.model, labeled_images, size=size, normalize=trained.normalize),
        trained.split.labels,
        classes=len(trained.class_names),
        temperature=trained.config.method.temperature,
    )
    results["seconds"] = training_seconds(run)
    write_json(run / EVALUATION, results)
    return results


def training_seconds(run: Path) -> float:
    """Seconds of training so far, from the last line of the metrics."""
    *_, last = (run / METRICS).read_text(encoding="utf-8").splitlines()
    return float(json.loads(last)["seconds"])
