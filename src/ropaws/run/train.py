"""train(config), resume(run): build the state, drive the loop. A run is a folder."""

import contextlib
import functools
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from ropaws import __version__
from ropaws.core.distributed import (
    Rank,
    any_process,
    check_same,
    joined,
    naming_lost_peers,
    place,
    planned_place,
    wait_for_all,
)
from ropaws.core.files import locked, read_json, refuse_link, write_json
from ropaws.core.hardware import (
    LoadWatch,
    Precision,
    choose_device,
    choose_precision,
    keep_freed_memory,
    threads_for,
)
from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.core.optimizers import learning_rate
from ropaws.core.run_layout import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    PLACES,
    UNREADABLE,
    WITHOUT_EFFECT,
)
from ropaws.core.terminal import Terminal, counted, tell, watch_files
from ropaws.embedding.backbones import check_model, view_sizes
from ropaws.methods import encoder_of, method_name
from ropaws.pool.augment import Normalization
from ropaws.pool.content import named_keys, remedies
from ropaws.pool.corpus import Corpus, ImageFiles, Images, ImageStack
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.run.config import (
    RunConfig,
    check_repeatable,
    differences,
    from_json,
    located,
    recorded,
    to_json,
    with_absolute_paths,
    with_steps,
)
from ropaws.run.manifest import (
    DataFacts,
    check_parents,
    check_same_data,
    check_sources,
    check_target,
    digest_images,
    read_facts,
    save_support,
    write_facts,
    write_unreadable,
)
from ropaws.run.run import Run, read_run_config
from ropaws.run.train_state import TrainState, build, prepare, seconds_per_step, stream_of, with_features
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
from ropaws.training.loaders import BatchStream
from ropaws.training.loop import (
    StepResult,
    Trackers,
    TrainingDivergedError,
    check_trackers,
    drop_metrics_from,
    finish,
    fit,
    open_trackers,
    show_progress,
    stop_between_steps,
)

COLLAPSE_WARNING = (
    "Warning: the network hardly separates the labeled images, so its labels mean little. Train longer"
    " (--budget or --train.steps), or with milder views (--augment.solarize 0 --augment.equalize 0)."
)
COLLAPSED = 0.98  # mean similarity of the labeled images above which the network has collapsed


class TrainingStopped(KeyboardInterrupt):
    """Training ended early on request; everything up to the last step is saved."""

    def __init__(self, run: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; resume with `ropaws train --resume {run}`")


@dataclass
class TrainInputs:
    """What a caller has at hand already, so that training need not read it again.

    Attributes:
        files: The image files of the run, as they were listed.
        corpus: The images of the run. Training puts those here that it has read.
        normalize: The normalization of another run whose weights this one starts from; by default as its
            pretrained weights, or else its images, ask.
        in_class: (n,) which training images belong to a known class; for the log alone.
    """

    files: ImageFiles | None = None
    corpus: Corpus | None = None
    normalize: Normalization | None = None
    in_class: Tensor | None = None


def train(
    config: RunConfig,
    out: Path | str,
    *,
    budget: float | None = None,
    choices: Sequence[str] = (),
    console: Console | None = None,
    inputs: TrainInputs | None = None,
) -> Path:
    """Train a model. The result is a run folder with config, split, metrics, checkpoint and model.

    Started several times by torchrun or SLURM, the processes share the work; the first one writes.

    Args:
        config: All settings, for example from `ropaws.recipes`.
        out: The run folder; must not hold a run yet.
        budget: Seconds to train for, from which the number of steps is computed.
        choices: Reasons for the settings, kept with the run.
        console: Where progress goes; standard error by default.
        inputs: Images that are in memory already, and the like.

    Returns:
        The run folder.

    Raises:
        ValueError: A setting or the data is wrong. Nothing has been written.
        TrainingStopped: Ctrl-C or SIGTERM; everything is saved, and `resume` continues.
        TrainingDivergedError: The loss is not a number any more; the last good checkpoint is kept.
    """
    run, inputs = Path(out), inputs or TrainInputs()
    with writing(run):
        check_target(run)
        config = _checked(with_absolute_paths(config))
        device = choose_device(config.train.device, planned_place().local_rank)
        with joined(device) as at, threads_for(config.train.threads):
            console = _console(console, at)
            # All that can be wrong with the settings and the data is found before anything is written.
            state = _prepare(config, device, inputs, console, at)
            config, choices = _explain(config, state, budget, choices, console)
            if at.rank == 0:
                _start_folder(run, config, state, choices, at)
            if state.corpus.unreadable:
                unreadable = f"{counted(len(state.corpus.unreadable), 'unreadable image')} left out"
                need = remedies(reason for _, reason in state.corpus.unreadable)
                console.print(f"{unreadable}, listed in {run / UNREADABLE}{need}", markup=False)
            _fit(run, config, state, console, in_class=inputs.in_class)
    return run


@contextlib.contextmanager
def writing(run: Path) -> Iterator[None]:
    """Lock a run folder; of several processes of a run only the first one writes. A lost one is named."""
    check_parents(run)
    lock = locked(run) if planned_place().rank == 0 else contextlib.nullcontext()
    with lock, naming_lost_peers(lambda: _how_to_go_on(run)):
        yield


def _how_to_go_on(run: Path) -> str:
    if (run / CONFIG).exists():
        return f"resume with as many processes as you like: `ropaws train --resume {run}`"
    return "start all of them again"


def _checked(config: RunConfig) -> RunConfig:
    """Raise an error for settings that would fail only after the data have been read."""
    check_repeatable(config)
    check_trackers(config.train.log)
    check_model(config.model)
    view_sizes(config.model, config.augment.size)
    if config.data.split is not None and not config.data.split.is_file():
        raise FileNotFoundError(
            f"data.split: no file at {config.data.split}; every run has one: RUN/split.txt"
        )
    return config


def _prepare(
    config: RunConfig, device: torch.device, inputs: TrainInputs, console: Console, at: Rank
) -> TrainState:
    """Read the images, and build what training needs."""
    corpus = inputs.corpus
    if corpus is None:
        corpus = _load_in_turn(config.data, console, at, inputs.files)
        for line in corpus.notes if inputs.files is None else ():  # who has listed the files has said it
            tell(console, line)
    _check_same_data_everywhere(config, corpus, choose_precision(config.train.precision, device))
    state = prepare(config, corpus, device, console, inputs.normalize)
    inputs.corpus = state.corpus
    return state


def _explain(
    config: RunConfig, state: TrainState, budget: float | None, choices: Sequence[str], console: Console
) -> tuple[RunConfig, list[str]]:
    """The settings within the budget, and the reasons for all choices. The new reasons are shown."""
    new = [] if config.model.init is None else [_describe_init(config, state.left_out)]
    if budget is not None:
        config, why = _within_budget(config, state, budget)
        new.append(why)
    for line in new:
        console.print(line, highlight=False)
    return config, [*choices, *new]


def _within_budget(config: RunConfig, state: TrainState, budget: float) -> tuple[RunConfig, str]:
    """Set as many steps as fit; on frozen features no more than the settings say, which are enough."""
    fitting = max(1, int(budget / seconds_per_step(config, state)))
    if not config.model.frozen:
        config = with_steps(config, fitting)
    elif fitting >= config.train.steps:
        steps = f"{config.train.steps} steps of {config.train.batch}"
        return config, f"{steps}: a head on frozen features needs no more, whatever the budget"
    else:
        config = replace(config, train=replace(config.train, steps=fitting))
    return config, f"{fitting} steps of {config.train.batch}: what fits into {budget:.0f} s"


def resume(run: Path | str, *, console: Console | None = None, inputs: TrainInputs | None = None) -> Path:
    """Continue a run that was interrupted. Weights and losses are those of an uninterrupted one.

    Args:
        run: The run folder.
        console: Where progress goes; standard error by default.
        inputs: Images that are in memory already.

    Returns:
        The run folder.

    Raises:
        ValueError: The folder is damaged, or its data or settings have changed.
    """
    run, inputs = Path(run), inputs or TrainInputs()
    read_run_config(run)  # before the folder is locked, which would create it
    with writing(run):
        config = read_run_config(run)
        facts = read_facts(run)
        device = choose_device(config.train.device, planned_place().local_rank)
        usual = torch.get_num_threads()
        with joined(device) as at, threads_for(config.train.threads, _read_threads(run)):
            console = _console(console, at)
            if (threads := torch.get_num_threads()) != usual:
                console.print(f"Resumes with {threads} of {usual} threads, as it began, to round alike")
            if inputs.corpus is None:
                check_sources(run, config.data)
                inputs.corpus = _load_in_turn(config.data, console, at)
            state, checkpoint = _restore(run, config, facts, inputs.corpus, device, console)
            inputs.corpus = state.corpus
            _fit(run, config, state, console, since=checkpoint, in_class=inputs.in_class)
    return run


def _restore(
    run: Path,
    config: RunConfig,
    facts: DataFacts,
    corpus: Corpus,
    device: torch.device,
    console: Console,
) -> tuple[TrainState, Checkpoint]:
    """Training as it was when the last checkpoint was saved."""
    precision = _read_precision(run)
    _check_same_data_everywhere(config, corpus, precision)
    check_same_data(run, facts, corpus)
    state = build(config, corpus, facts, device, precision, console)
    checkpoint = load_checkpoint(
        run,
        functools.partial(tell, console),
        weights=weight_bytes(state.model),
    )
    _check_same_run(run, config, facts, checkpoint)
    restore(checkpoint, state.model, state.optimizer, state.scaler)
    if config.model.frozen:  # of the backbone as it was restored
        embedded = with_features(config, corpus, facts, encoder_of(state.model), console)
        state = replace(state, corpus=embedded)
    return state, checkpoint


def _read_precision(run: Path) -> Precision:
    """The precision in which the run was started; another one would give other numbers."""
    precision = _environment(run).get("precision")
    if precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"{run / ENVIRONMENT} is damaged (precision {str(precision)[:40]!r}); restore it")
    known: Precision = precision
    return known


def _read_threads(run: Path) -> int | None:
    """Threads with which the run was started; None for one of several processes, which share the cores."""
    environment = _environment(run)
    threads, alone = environment.get("threads"), environment.get("processes") == planned_place().size == 1
    return threads if alone and isinstance(threads, int) and threads > 0 else None


def _environment(run: Path) -> dict[str, Any]:
    """What the run was started with; empty where the file holds anything else."""
    found = read_json(run / ENVIRONMENT, inside=run)
    return found if isinstance(found, dict) else {}


def _console(console: Console | None, at: Rank) -> Console:
    """Only the first process speaks."""
    return (console or Terminal(stderr=True)) if at.rank == 0 else Terminal(quiet=True)


def _load_in_turn(data: DataConfig, console: Console, at: Rank, files: ImageFiles | None = None) -> Corpus:
    """The first process goes first: it may have to download, or to fill the cache."""
    if at.rank > 0:
        wait_for_all()
    corpus = load_corpus(data, files=files, watch=watch_files(console))
    if at.rank == 0:
        wait_for_all()
    return corpus


PATH_SETTINGS = PLACES | {"data.root", "data.cache", "data.feature_cache"}


def _check_same_data_everywhere(config: RunConfig, corpus: Corpus, precision: Precision) -> None:
    """The processes may have disks of their own, with other files; they would train on them without a word.

    What names a thing best comes first: other files lead to other labels and settings.
    """
    if place().size == 1:
        return  # digests take time
    names = corpus.train_names or tuple(f"image {row}" for row in range(len(corpus.train_images)))
    labels = zip(names, corpus.train_labels.tolist(), strict=True)
    classes = [*corpus.class_names, OUT_OF_CLASS_NAME, "no class"]  # of -2, and of UNLABELED, the last
    # Where files are may differ: what is in them is compared.
    settings = {
        f"{part}.{name}": value
        for part, of in to_json(config).items()
        for name, value in of.items()
        if f"{part}.{name}" not in PATH_SETTINGS
    }
    split = config.data.split
    check_same(
        {
            "training images": names,
            "classes": corpus.class_names,
            "labels": [f"{name}: {classes[label]}" for name, label in labels],
            "contents of training images": _contents(corpus.train_images, names, corpus.train_keys),
            "contents of test images": [digest_images(corpus.test_images)],
            "label splits": [] if split is None else split.read_text(encoding="utf-8").splitlines(),
            "settings": [f"--{name} {of}" for name, of in settings.items() if name not in WITHOUT_EFFECT],
            "precisions": [f"--train.precision {precision}"],
        }
    )


def _contents(images: Images, names: Sequence[str], keys: NDArray[np.uint8] | None) -> list[str]:
    """Image by image as far as each can be told by itself, so that a difference names the image."""
    if keys is not None:
        return named_keys(names, keys)
    if isinstance(images, ImageStack):  # to read every image for this would take too long
        sizes = [
            f"{file.stat().st_size} bytes" if isinstance(file, Path) else "a row" for file in images.files
        ]
        return [f"{name} ({size})" for name, size in zip(names, sizes, strict=True)]
    return [digest_images(images)]


def _check_same_run(run: Path, config: RunConfig, facts: DataFacts, checkpoint: Checkpoint) -> None:
    """A checkpoint of other settings or data would be loaded into the wrong run."""
    made_by = checkpoint.made_by
    try:
        made_with = to_json(from_json(located(made_by["config"], run)))
    except ValueError as error:
        raise ValueError(f"{run / CHECKPOINT} is damaged (made_by.config: {error})") from None
    # The images may be elsewhere now; whether they are the same is said by their digest.
    changed = differences(made_with, to_json(config), free=WITHOUT_EFFECT | PLACES)
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


def _start_folder(run: Path, config: RunConfig, state: TrainState, choices: Sequence[str], at: Rank) -> None:
    """What the run is made from. The config comes last: a folder that has one can be resumed."""
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS).unlink(missing_ok=True)
    write_facts(run, state.facts)
    write_unreadable(run, dict(state.corpus.unreadable))
    write_json(
        run / ENVIRONMENT,
        {
            "ropaws": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(state.device),
            "precision": state.precision,
            "processes": at.size,
            "threads": torch.get_num_threads(),
            "choices": list(choices),
        },
    )
    _save(run, config, state, next_step=0, seconds=0.0)
    write_json(run / CONFIG, recorded(config, run))


def _save(run: Path, config: RunConfig, state: TrainState, *, next_step: int, seconds: float) -> None:
    made_by = {
        "config": recorded(config, run),
        "digest": state.facts.digest,
        "split": state.facts.split.indices.tolist(),
        "ropaws": __version__,
    }
    save_checkpoint(
        run,
        Checkpoint(
            state.model.state_dict(),
            state.optimizer.state_dict(),
            state.scaler.state_dict(),
            next_step,
            seconds,
            made_by,
        ),
    )


def _fit(
    run: Path,
    config: RunConfig,
    state: TrainState,
    console: Console,
    *,
    since: Checkpoint | None = None,
    in_class: Tensor | None,
) -> None:
    """Drive the loop: save, log, show; stop between steps when asked to."""
    start, seconds = (0, 0.0) if since is None else (since.next_step, since.seconds)
    writes, total = place().rank == 0, config.train.steps
    stream = stream_of(config, state)
    stream.unreadable.update(state.corpus.unreadable)
    shown = show_progress(
        _steps(config, state, stream, start, in_class),
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
        watch = LoadWatch() if _computes_alone(state) else None
        for taken in shown:
            done, seconds = taken.step + 1, time.perf_counter() - began
            trackers.write(_row(taken, seconds, state.device))
            if watch is not None and (advice := watch.advice()):
                console.print(advice, highlight=False, soft_wrap=True)
            stop = any_process(request.signal is not None, state.device)
            if done % config.train.checkpoint_every == 0 or done == total or stop:
                _check_finite(state, taken)
                if writes:
                    _save(run, config, state, next_step=done, seconds=seconds)
                    write_unreadable(run, stream.unreadable)
            if writes and config.train.keep_every and done % config.train.keep_every == 0:
                save_snapshot(run, state.model, done)
            if stop:
                wait_for_all()  # no process ends before the checkpoint is whole
                raise TrainingStopped(run, taken.step)
    finish(state.model, config.method, stream.whole_pool(total))
    if writes:
        _finish(run, config, state, console, len(stream.unreadable) - len(state.corpus.unreadable))
    wait_for_all()


def _check_finite(state: TrainState, taken: StepResult) -> None:
    """Raise an error before weights are saved that no training can continue from."""
    if not weights_are_finite(state.model):
        raise TrainingDivergedError("a weight is no longer finite", taken.step, taken.losses, taken.rate)


def _steps(
    config: RunConfig, state: TrainState, stream: BatchStream, start: int, in_class: Tensor | None
) -> Iterator[StepResult]:
    """The loop, with the backbone compiled where that is asked for."""
    if state.device.type == "cpu":
        keep_freed_memory()
    if config.train.compile and not config.model.frozen:
        encoder_of(state.model).backbone.compile()  # in place: the names of the weights stay
    return fit(
        state.model,
        config.method,
        stream.batches(start, config.train.steps),
        state.optimizer,
        learning_rate(config.optim, config.train.steps),
        state.scaler,
        stream.pool_pass,
        None if in_class is None else in_class.to(state.device),
    )


def _computes_alone(state: TrainState) -> bool:
    """Does this process compute on the CPU alone, without workers that would look like other programs?"""
    reads = isinstance(state.corpus.train_images, ImageStack)
    return state.device.type == "cpu" and place().size == 1 and not reads


def _finish(run: Path, config: RunConfig, state: TrainState, console: Console, replaced: int) -> None:
    """The model, and the labeled images as it sees them."""
    save_model(run, state.model)
    finished = Run(run, device=str(state.device), console=console)
    vars(finished).update(facts=state.facts, model=state.model.eval())
    support = finished.embed(state.corpus.train_images, state.facts.split.indices)
    save_support(run, support, state.facts.split)
    if replaced:
        console.print(f"Unreadable images were replaced by others ({replaced}), listed in {run / UNREADABLE}")
    if float((support @ support.T).mean()) > COLLAPSED:
        console.print(COLLAPSE_WARNING, highlight=False)


def _open_trackers(run: Path, config: RunConfig, start: int) -> Trackers:
    for name in (METRICS, *config.train.log):  # files and folders inside the run
        refuse_link(run / name)
    drop_metrics_from(run / METRICS, start)
    return open_trackers(run, METRICS, config.train.log, start=start, config=to_json(config))


def _row(taken: StepResult, seconds: float, device: torch.device) -> dict[str, Any]:
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
