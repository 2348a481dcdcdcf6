"""train(config), resume(run): build the parts, drive the loop. A run is a folder."""

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
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.config import RunConfig, differences, method_name, to_json, with_steps
from ropaws.data.corpus import Corpus, measure_normalization
from ropaws.data.files import check_unreadable
from ropaws.data.loaders import BatchStream, TrainingData
from ropaws.data.samplers import support_indices, support_share, unlabeled_indices
from ropaws.data.sources import DataConfig, load_corpus
from ropaws.data.splits import Labeled, choose_split
from ropaws.data.stacks import PictureStack
from ropaws.distributed import any_process, gather_constants, joined, place, same_everywhere, wait_for_all
from ropaws.folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    UNREADABLE,
    DataFacts,
    check_same_data,
    check_target,
    digest_images,
    read_facts,
    save_support,
    write_facts,
    write_unreadable,
)
from ropaws.launch import Place, planned_place
from ropaws.models import Encoder, build_encoder, check_model, load_init
from ropaws.models.synced_norm import synchronise_norms
from ropaws.trained import Trained, collapsed, read_run_config
from ropaws.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_json,
    restore,
    save_checkpoint,
    save_model,
    save_snapshot,
    write_json,
)
from ropaws.training.hardware import (
    Precision,
    choose_device,
    choose_precision,
    half_type,
    keep_freed_memory,
)
from ropaws.training.interrupt import stop_between_steps
from ropaws.training.loop import Taken, TrainingDivergedError, fit, weights_are_finite
from ropaws.training.optim import LARS
from ropaws.training.progress import show_progress, watch_files
from ropaws.training.schedules import warmup_cosine
from ropaws.training.trackers import Trackers, check_trackers, drop_metrics_from, open_trackers
from ropaws.version import __version__

PROBE_STEPS = 6
COLLAPSE_WARNING = (
    "Warning: the network hardly tells the labelled images apart, so its labels mean little. Train longer"
    " (--budget or --train.steps), or with milder views (--augment.solarize 0 --augment.equalize 0)."
)
# Settings that may differ from the checkpoint's: they change where and how fast, not what is computed.
FREE = (
    "train.device", "train.precision", "train.checkpoint_every", "train.keep_every", "train.compile",
    "train.log",
    "data.workers", "data.cache", "data.cache_gb", "data.memory_gb", "data.download", "data.root",
)  # fmt: skip


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
    scaler: GradScaler
    device: torch.device
    precision: Precision


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
    Started several times by torchrun or SLURM, the processes share the work; the first one writes.
    Raises TrainingStopped, with all saved, when asked to stop by Ctrl-C or SIGTERM.
    """
    run = Path(out)
    check_target(run)
    check_trackers(config.train.log)
    check_model(config.model)
    if config.data.split is not None and not config.data.split.is_file():
        raise FileNotFoundError(
            f"data.split: no file at {config.data.split}; every run has one: RUN/split.txt"
        )
    device = choose_device(config.train.device, planned_place().local_rank)
    with joined(device) as at:
        console = _console(console, at)
        # All that can be wrong with the settings and the data is found before anything is written.
        corpus = _load_in_turn(config.data, console, at)
        split, corpus = _readable(choose_split(corpus, config.data, seed=config.train.seed), corpus, console)
        normalize = measure_normalization(corpus.train_images)
        names = tuple(corpus.train_names[i] for i in split.indices.tolist()) if corpus.train_names else ()
        facts = DataFacts(corpus.class_names, split, normalize, digest_images(corpus.train_images), names)
        precision = choose_precision(config.train.precision, device)
        parts = _build(config, corpus, facts, device, precision)
        if config.model.init is not None:
            left = load_init(parts.model, config.model, channels=corpus.channels)
            choices = (*choices, _describe_init(config.model.init, left))
            console.print(choices[-1], highlight=False)
        if budget is not None:
            steps = max(1, int(budget / _seconds_per_step(config, parts)))
            config = with_steps(config, steps)
            choices = (*choices, f"{steps} steps of {config.train.batch}: what fits into {budget:.0f} s")
            console.print(choices[-1], highlight=False)
        if at.rank == 0:
            _start_folder(run, config, parts, choices, at)
        if corpus.unreadable:
            unreadable = f"{len(corpus.unreadable)} unreadable pictures left out"
            console.print(f"{unreadable}, listed in {run / UNREADABLE}")
        _fit(run, config, parts, console, start=0, seconds=0.0)
    return run


def resume(run: Path | str, *, console: Console | None = None) -> Path:
    """Go on with a run that was interrupted. Weights and losses are those of an uninterrupted one."""
    run = Path(run)
    config = read_run_config(run)
    facts = read_facts(run)
    device = choose_device(config.train.device, planned_place().local_rank)
    with joined(device) as at:
        console = _console(console, at)
        corpus = _load_in_turn(config.data, console, at)
        check_same_data(run, facts, corpus)
        precision = read_json(run / ENVIRONMENT).get("precision", "fp32")
        parts = _build(config, corpus, facts, device, precision)
        checkpoint = load_checkpoint(run, device, lambda line: console.print(line, highlight=False))
        _check_same_run(run, config, facts, checkpoint)
        restore(checkpoint, parts.model, parts.optimizer, parts.scaler)
        _fit(run, config, parts, console, start=checkpoint.next_step, seconds=checkpoint.seconds)
    return run


def _console(console: Console | None, at: Place) -> Console:
    """Only the first process speaks."""
    return (console or Console(stderr=True)) if at.rank == 0 else Console(quiet=True)


def _load_in_turn(data: DataConfig, console: Console, at: Place) -> Corpus:
    """The first process goes first: it may have to download, or to fill the cache."""
    if at.rank > 0:
        wait_for_all()
    corpus = load_corpus(data, watch=watch_files(console))
    if at.rank == 0:
        wait_for_all()
    return corpus


def _check_same_run(run: Path, config: RunConfig, facts: DataFacts, checkpoint: Checkpoint) -> None:
    """A checkpoint of other settings or data would be loaded into the wrong run."""
    made_by = checkpoint.made_by
    changed = differences(made_by["config"], to_json(config), free=FREE)
    if made_by["digest"] != facts.digest:
        changed.append("the training images are others")
    elif made_by["split"] != facts.split.indices.tolist():
        changed.append("the labelled images are others")
    if changed:
        raise ValueError(
            f"the checkpoint of {run} was made by other settings: {'; '.join(changed)}."
            " Put them back, or train a new run"
        )


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


def _build(
    config: RunConfig, corpus: Corpus, facts: DataFacts, device: torch.device, precision: Precision
) -> Parts:
    # Drawn once here for their errors: a batch larger than the pool, more classes than there are, batches
    # that the processes cannot share.
    unlabeled_indices(0, batch=config.train.batch, pool=len(corpus.train_images), seed=config.train.seed)
    positions, _ = support_indices(0, facts.split.labels, config.support, seed=config.train.seed)
    support_share(len(positions), config.support, place())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = build_encoder(config.model, channels=corpus.channels, autocast=half_type(precision))
    model = model.to(device)
    synchronise_norms(model, device)
    settings = config.optim
    optimizer = LARS(
        model.parameters(),
        lr=settings.start,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        trust=settings.trust,
    )
    scaler = GradScaler(device.type, enabled=precision == "fp16")
    parts = Parts(corpus, facts, model, optimizer, scaler, device, precision)
    _stream(config, parts)
    return parts


def _seconds_per_step(config: RunConfig, parts: Parts) -> float:
    """Measured on a copy of the model, so that training itself starts from the same weights."""
    model = copy.deepcopy(parts.model)
    batches = _stream(config, parts).batches(0, PROBE_STEPS)
    steps = fit(model, config.method, batches, LARS(model.parameters(), lr=0.0), lambda step: 0.0)
    moments = [time.perf_counter() for _ in steps]
    # From the end of the first step: it pays for buffers that the others reuse. The slowest process counts.
    seconds = torch.tensor([(moments[-1] - moments[0]) / (PROBE_STEPS - 1)], device=parts.device)
    return float(gather_constants(seconds).amax())


def _start_folder(run: Path, config: RunConfig, parts: Parts, choices: Sequence[str], at: Place) -> None:
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
            "precision": parts.precision,
            "processes": at.size,
            "threads": torch.get_num_threads(),
            "choices": list(choices),
        },
    )
    _save(run, config, parts, next_step=0, seconds=0.0)
    write_json(run / CONFIG, to_json(config))


def _save(run: Path, config: RunConfig, parts: Parts, *, next_step: int, seconds: float) -> None:
    made_by = {
        "config": to_json(config),
        "digest": parts.facts.digest,
        "split": parts.facts.split.indices.tolist(),
        "ropaws": __version__,
    }
    save_checkpoint(
        run,
        Checkpoint(
            parts.model.state_dict(),
            parts.optimizer.state_dict(),
            parts.scaler.state_dict(),
            next_step,
            seconds,
            made_by,
        ),
    )


def _fit(run: Path, config: RunConfig, parts: Parts, console: Console, *, start: int, seconds: float) -> None:
    """Drive the loop: save, log, show; stop between steps when asked to."""
    writes = place().rank == 0
    if parts.device.type == "cpu":
        keep_freed_memory()
    same_everywhere(parts.model)
    if config.train.compile:
        parts.model.backbone.compile()  # in place: the names of the weights stay
    total, every = config.train.steps, config.train.checkpoint_every
    stream = _stream(config, parts)
    stream.unreadable.update(parts.corpus.unreadable)
    rate = _learning_rate(config)
    steps = fit(parts.model, config.method, stream.batches(start, total), parts.optimizer, rate, parts.scaler)
    shown = show_progress(
        steps,
        title=method_name(config.method),
        start=start,
        total=total,
        batch=config.train.batch,
        console=console,
    )
    began = time.perf_counter() - seconds
    trackers = _open_trackers(run, config, start) if writes else Trackers([])
    # Closed on the way out, so that a progress bar ends before anything else is printed.
    with contextlib.closing(trackers), contextlib.closing(shown), stop_between_steps() as request:
        for taken in shown:
            done, seconds = taken.step + 1, time.perf_counter() - began
            trackers.write(_row(taken, seconds, parts.device))
            stop = any_process(request.signal is not None, parts.device)
            if done % every == 0 or done == total or stop:
                if not weights_are_finite(parts.model):
                    what = "a weight is no longer finite"
                    raise TrainingDivergedError(what, taken.step, taken.losses, taken.rate)
                if writes:
                    _save(run, config, parts, next_step=done, seconds=seconds)
                    write_unreadable(run, stream.unreadable)
            if writes and config.train.keep_every and done % config.train.keep_every == 0:
                save_snapshot(run, parts.model, done)
            if stop:
                wait_for_all()  # no process ends before the checkpoint is whole
                raise TrainingStopped(run, taken.step)
    if writes:
        _finish(run, config, parts, console, len(stream.unreadable) - len(parts.corpus.unreadable))
    wait_for_all()


def _finish(run: Path, config: RunConfig, parts: Parts, console: Console, replaced: int) -> None:
    """The model, and the labelled images as it sees them."""
    save_model(run, parts.model)
    trained = Trained(config, parts.facts, parts.model.eval())
    support = trained.embed(parts.corpus.train_images, parts.facts.split.indices)
    save_support(run, support, parts.facts.split)
    if replaced:
        console.print(f"{replaced} unreadable pictures were replaced by others, listed in {run / UNREADABLE}")
    if collapsed(support):
        console.print(COLLAPSE_WARNING, highlight=False)


def _open_trackers(run: Path, config: RunConfig, start: int) -> Trackers:
    drop_metrics_from(run / METRICS, start)
    return open_trackers(run, METRICS, config.train.log, start=start, config=to_json(config))


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


def _row(taken: Taken, seconds: float, device: torch.device) -> dict[str, Any]:
    losses = taken.losses
    parts = {name: float(value) for name, value in losses.parts.items()}
    return {
        "step": taken.step,
        "loss": float(losses.total),
        **parts,
        "learning_rate": taken.rate,
        "seconds": round(seconds, 3),
        "data_seconds": round(taken.data_seconds, 4),
        "memory_gb": round(_peak_memory(device) / 2**30, 3),
    }


def _peak_memory(device: torch.device) -> float:
    """Most bytes so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    if platform.system() == "Windows":
        return 0.0  # has no such counter
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
