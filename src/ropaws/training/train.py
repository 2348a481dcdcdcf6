"""train(config), resume(run): build the parts, drive the loop. A run is a folder."""

import contextlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from ropaws import __version__
from ropaws.config import RunConfig, check_repeatable, differences, from_json, to_json, with_steps
from ropaws.data.augment import Normalization
from ropaws.data.corpus import Corpus
from ropaws.data.files.reading import ImageFiles
from ropaws.data.files.streaming import ImageStack
from ropaws.data.loaders import BatchStream
from ropaws.data.sources import DataConfig, load_corpus
from ropaws.distributed import (
    Place,
    any_process,
    joined,
    place,
    planned_place,
    same_everywhere,
    wait_for_all,
)
from ropaws.methods import encoder_of, method_name
from ropaws.models import check_model
from ropaws.runs.atomic import read_json, refuse_link, write_json
from ropaws.runs.facts import (
    DataFacts,
    check_parents,
    check_same_data,
    check_target,
    read_facts,
    save_support,
    write_facts,
    write_unreadable,
)
from ropaws.runs.layout import CHECKPOINT, CONFIG, ENVIRONMENT, METRICS, UNREADABLE, WITHOUT_EFFECT
from ropaws.runs.lock import locked
from ropaws.runs.run import Run, read_run_config
from ropaws.terminal import Terminal
from ropaws.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    restore,
    save_checkpoint,
    save_model,
    save_snapshot,
    weight_bytes,
    weights_are_finite,
)
from ropaws.training.hardware import (
    LoadWatch,
    Precision,
    choose_device,
    keep_freed_memory,
    threads_for,
)
from ropaws.training.interrupt import stop_between_steps
from ropaws.training.loop import Taken, TrainingDivergedError, finish, fit
from ropaws.training.optim import learning_rate
from ropaws.training.parts import Parts, build, prepare, seconds_per_step, stream_of, with_features
from ropaws.training.progress import show_progress, watch_files
from ropaws.training.trackers import Trackers, check_trackers, drop_metrics_from, open_trackers

COLLAPSE_WARNING = (
    "Warning: the network hardly separates the labeled images, so its labels mean little. Train longer"
    " (--budget or --train.steps), or with milder views (--augment.solarize 0 --augment.equalize 0)."
)
COLLAPSED = 0.98  # mean similarity of the labeled images above which the network has collapsed


class TrainingStopped(KeyboardInterrupt):
    """Training ended early on request; everything up to the last step is saved."""

    def __init__(self, run: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; resume with `ropaws train --resume {run}`")


class TrainedRun(NamedTuple):
    """A run that has just been trained, and its images, which need not be read again."""

    path: Path
    corpus: Corpus


def train(
    config: RunConfig,
    out: Path | str,
    *,
    budget: float | None = None,
    choices: Sequence[str] = (),
    console: Console | None = None,
) -> Path:
    """Train a model. The result is a run folder with config, split, metrics, checkpoint and model.

    Started several times by torchrun or SLURM, the processes share the work; the first one writes.

    Args:
        config: All settings, for example from `ropaws.recipes`.
        out: The run folder; must not hold a run yet.
        budget: Seconds to train for, from which the number of steps is computed.
        choices: Reasons for the settings, kept with the run.
        console: Where progress goes; standard error by default.

    Returns:
        The run folder.

    Raises:
        ValueError: A setting or the data is wrong. Nothing has been written.
        TrainingStopped: Ctrl-C or SIGTERM; everything is saved, and `resume` continues.
        TrainingDivergedError: The loss is not a number any more; the last good checkpoint is kept.
    """
    return train_run(config, out, budget=budget, choices=choices, console=console).path


def train_run(
    config: RunConfig,
    out: Path | str,
    *,
    budget: float | None = None,
    choices: Sequence[str] = (),
    console: Console | None = None,
    files: ImageFiles | None = None,
    corpus: Corpus | None = None,
    normalize: Normalization | None = None,
    in_class: Tensor | None = None,
) -> TrainedRun:
    """As train.

    files, corpus: the image files of the run, or its images, if they are read already. normalize: of another
    run whose weights this one starts from; by default as its pretrained weights, or else its images, ask.
    in_class (n,): which training images belong to a known class, if the caller knows; for the log alone.
    """
    run = Path(out)
    with writing(run):
        return _train_run(
            run,
            config,
            budget,
            choices,
            console,
            files=files,
            corpus=corpus,
            normalize=normalize,
            in_class=in_class,
        )


@contextlib.contextmanager
def writing(run: Path) -> Iterator[None]:
    """Lock a run folder; of several processes of a run only the first one writes."""
    check_parents(run)
    with locked(run) if planned_place().rank == 0 else contextlib.nullcontext():
        yield


def _train_run(
    run: Path,
    config: RunConfig,
    budget: float | None,
    choices: Sequence[str],
    console: Console | None,
    *,
    files: ImageFiles | None,
    corpus: Corpus | None,
    normalize: Normalization | None,
    in_class: Tensor | None,
) -> TrainedRun:
    check_target(run)
    check_repeatable(config)
    check_trackers(config.train.log)
    check_model(config.model)
    if config.data.split is not None and not config.data.split.is_file():
        raise FileNotFoundError(
            f"data.split: no file at {config.data.split}; every run has one: RUN/split.txt"
        )
    device = choose_device(config.train.device, planned_place().local_rank)
    with joined(device) as at, threads_for(config.train.threads):
        console = _console(console, at)
        # All that can be wrong with the settings and the data is found before anything is written.
        corpus = corpus or _load_in_turn(config.data, console, at, files)
        parts = prepare(config, corpus, device, console, normalize)
        if config.model.init is not None:
            choices = (*choices, _describe_init(config, parts.left_out))
            console.print(choices[-1], highlight=False)
        if budget is not None:
            config, why = _within_budget(config, parts, budget)
            choices = (*choices, why)
            console.print(choices[-1], highlight=False)
        if at.rank == 0:
            _start_folder(run, config, parts, choices, at)
        if parts.corpus.unreadable:
            unreadable = f"{len(parts.corpus.unreadable)} unreadable images left out"
            console.print(f"{unreadable}, listed in {run / UNREADABLE}")
        _fit(run, config, parts, console, start=0, seconds=0.0, in_class=in_class)
    return TrainedRun(run, parts.corpus)


def _within_budget(config: RunConfig, parts: Parts, budget: float) -> tuple[RunConfig, str]:
    """As many steps as fit; on frozen features no more than the settings say, which are enough."""
    fitting = max(1, int(budget / seconds_per_step(config, parts)))
    if not config.model.frozen:
        config = with_steps(config, fitting)
    elif fitting >= config.train.steps:
        steps = f"{config.train.steps} steps of {config.train.batch}"
        return config, f"{steps}: a head on frozen features needs no more, whatever the budget"
    else:
        config = replace(config, train=replace(config.train, steps=fitting))
    return config, f"{fitting} steps of {config.train.batch}: what fits into {budget:.0f} s"


def resume(run: Path | str, *, console: Console | None = None) -> Path:
    """Continue a run that was interrupted. Weights and losses are those of an uninterrupted one.

    Args:
        run: The run folder.
        console: Where progress goes; standard error by default.

    Returns:
        The run folder.

    Raises:
        ValueError: The folder is damaged, or its data or settings have changed.
    """
    return resume_run(run, console=console).path


def resume_run(
    run: Path | str,
    *,
    console: Console | None = None,
    corpus: Corpus | None = None,
    in_class: Tensor | None = None,
) -> TrainedRun:
    """As resume; corpus and in_class as for train_run."""
    run = Path(run)
    read_run_config(run)  # before the folder is locked, which would create it
    with writing(run):
        return _resume_run(run, console, corpus, in_class)


def _resume_run(
    run: Path, console: Console | None, corpus: Corpus | None, in_class: Tensor | None
) -> TrainedRun:
    config = read_run_config(run)
    facts = read_facts(run)
    device = choose_device(config.train.device, planned_place().local_rank)
    with joined(device) as at, threads_for(config.train.threads):
        console = _console(console, at)
        corpus = corpus or _load_in_turn(config.data, console, at)
        check_same_data(run, facts, corpus)
        parts = build(config, corpus, facts, device, _read_precision(run), console)
        checkpoint = load_checkpoint(
            run,
            device,
            lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
            weights=weight_bytes(parts.model),
        )
        _check_same_run(run, config, facts, checkpoint)
        restore(checkpoint, parts.model, parts.optimizer, parts.scaler)
        if config.model.frozen:  # of the backbone as it was restored
            embedded = with_features(config, corpus, facts, encoder_of(parts.model), console)
            parts = replace(parts, corpus=embedded)
        start, seconds = checkpoint.next_step, checkpoint.seconds
        _fit(run, config, parts, console, start=start, seconds=seconds, in_class=in_class)
    return TrainedRun(run, parts.corpus)


def _read_precision(run: Path) -> Precision:
    """In which the run was started; another one would give other numbers."""
    environment = read_json(run / ENVIRONMENT, inside=run)
    precision = environment.get("precision", "fp32") if isinstance(environment, dict) else None
    if precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"{run / ENVIRONMENT} is damaged (precision {str(precision)[:40]!r}); restore it")
    known: Precision = precision
    return known


def _console(console: Console | None, at: Place) -> Console:
    """Only the first process speaks."""
    return (console or Terminal(stderr=True)) if at.rank == 0 else Terminal(quiet=True)


def _load_in_turn(data: DataConfig, console: Console, at: Place, files: ImageFiles | None = None) -> Corpus:
    """The first process goes first: it may have to download, or to fill the cache."""
    if at.rank > 0:
        wait_for_all()
    corpus = load_corpus(data, files=files, watch=watch_files(console))
    if at.rank == 0:
        wait_for_all()
    return corpus


def _check_same_run(run: Path, config: RunConfig, facts: DataFacts, checkpoint: Checkpoint) -> None:
    """A checkpoint of other settings or data would be loaded into the wrong run."""
    made_by = checkpoint.made_by
    try:
        made_with = to_json(from_json(made_by["config"]))
    except ValueError as error:
        raise ValueError(f"{run / CHECKPOINT} is damaged (made_by.config: {error})") from None
    changed = differences(made_with, to_json(config), free=WITHOUT_EFFECT)
    if made_by["digest"] != facts.digest:
        changed.append("the training images are others")
    elif made_by["split"] != facts.split.indices.tolist():
        changed.append("the labeled images are others")
    if checkpoint.next_step > config.train.steps:
        changed.append(f"its next step is {checkpoint.next_step} of {config.train.steps}")
    if changed:
        raise ValueError(
            f"the checkpoint of {run} was made by other settings: {'; '.join(changed)}."
            " Put them back, or train a new run"
        )


def _describe_init(config: RunConfig, left: Sequence[str]) -> str:
    unused = f"; left out: {', '.join(left[:6])}{' ...' if len(left) > 6 else ''}" if left else ""
    return f"{' and '.join(config.method.init)} starts from {config.model.init}{unused}"


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


def _fit(
    run: Path,
    config: RunConfig,
    parts: Parts,
    console: Console,
    *,
    start: int,
    seconds: float,
    in_class: Tensor | None,
) -> None:
    """Drive the loop: save, log, show; stop between steps when asked to."""
    writes, total = place().rank == 0, config.train.steps
    stream = stream_of(config, parts)
    stream.unreadable.update(parts.corpus.unreadable)
    shown = show_progress(
        _steps(config, parts, stream, start, in_class),
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
        watch = LoadWatch() if _computes_alone(parts) else None
        for taken in shown:
            done, seconds = taken.step + 1, time.perf_counter() - began
            trackers.write(_row(taken, seconds, parts.device))
            if watch is not None and (advice := watch.advice()):
                console.print(advice, highlight=False, soft_wrap=True)
            stop = any_process(request.signal is not None, parts.device)
            if done % config.train.checkpoint_every == 0 or done == total or stop:
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
    finish(parts.model, config.method, stream.whole_pool(total))
    if writes:
        _finish(run, config, parts, console, len(stream.unreadable) - len(parts.corpus.unreadable))
    wait_for_all()


def _steps(
    config: RunConfig, parts: Parts, stream: BatchStream, start: int, in_class: Tensor | None
) -> Iterator[Taken]:
    """The loop, with the same weights in all processes."""
    if parts.device.type == "cpu":
        keep_freed_memory()
    same_everywhere(parts.model)
    if config.train.compile and not config.model.frozen:
        encoder_of(parts.model).backbone.compile()  # in place: the names of the weights stay
    return fit(
        parts.model,
        config.method,
        stream.batches(start, config.train.steps),
        parts.optimizer,
        learning_rate(config.optim, config.train.steps),
        parts.scaler,
        stream.pool_pass,
        None if in_class is None else in_class.to(parts.device),
    )


def _computes_alone(parts: Parts) -> bool:
    """On the CPU, without processes of its own beside it, which would look like other programs."""
    reads = isinstance(parts.corpus.train_images, ImageStack)
    return parts.device.type == "cpu" and place().size == 1 and not reads


def _finish(run: Path, config: RunConfig, parts: Parts, console: Console, replaced: int) -> None:
    """The model, and the labeled images as it sees them."""
    save_model(run, parts.model)
    finished = Run(run, device=str(parts.device), console=console)
    vars(finished).update(facts=parts.facts, model=parts.model.eval())
    support = finished.embed(parts.corpus.train_images, parts.facts.split.indices)
    save_support(run, support, parts.facts.split)
    if replaced:
        console.print(f"{replaced} unreadable images were replaced by others, listed in {run / UNREADABLE}")
    if float((support @ support.T).mean()) > COLLAPSED:
        console.print(COLLAPSE_WARNING, highlight=False)


def _open_trackers(run: Path, config: RunConfig, start: int) -> Trackers:
    for name in (METRICS, *config.train.log):  # files and folders inside the run
        refuse_link(run / name)
    drop_metrics_from(run / METRICS, start)
    return open_trackers(run, METRICS, config.train.log, start=start, config=to_json(config))


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
