"""One cell of a benchmark: a method on a task with some labels and a seed, trained and tested."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from ropaws.bench.entries import JUDGES, Data, Network, Phase, Task, base_config, phases_of, warmed
from ropaws.core.features import main_directions, principal_components
from ropaws.core.files import read_json, write_json
from ropaws.core.labels import OUT_OF_CLASS
from ropaws.core.records import Outputs
from ropaws.core.run_layout import CHECKPOINT, CONFIG, METRICS, MODEL, SNAPSHOTS
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import build_encoder, load_init, pretrained_normalization
from ropaws.insight.metrics import accuracy_and_confidence, balanced_accuracy, detection, evaluation_figures
from ropaws.methods import Method
from ropaws.methods.classifier import FIXMATCH_OPTIM
from ropaws.pool.augment import View
from ropaws.pool.sources import choose_split, write_split
from ropaws.run.config import RunConfig, embedder_of, to_json, with_method
from ropaws.run.run import Run
from ropaws.run.train import TrainInputs, resume, train
from ropaws.training.checkpoint import snapshots


def images_per_step(config: RunConfig, method: Method, classes: int) -> float:
    """Views that the network sees in a step, in images of full size: a small crop counts by its pixels.

    Features of cached views count as one image each. A second network of a method (a teacher, a target) does
    not count: it is a cost that seconds show.
    """
    large = config.augment.size
    unlabeled = sum(
        _share(view, large, config.model.frozen) for view in method.views(config.augment).values()
    )
    support = config.support
    labeled = (support.classes or classes) * support.images_per_class * support.views
    return config.train.batch * unlabeled + (labeled if method.uses_labels else 0)


def _share(view: View, large: int, frozen: bool) -> float:
    size = getattr(view, "size", large)
    return 1.0 if frozen else float(size * size) / (large * large)


def steps_for(config: RunConfig, method: Method, classes: int, images: float, *, reference: int) -> int:
    """Steps in which a method sees so many images.

    Without unlabeled images at most twice the steps of the reference: a few labels are learned long before.
    """
    steps = max(1, round(images / images_per_step(config, method, classes)))
    return steps if method.views(config.augment) else min(steps, 2 * reference)


RESULT = "result.json"
POINTS = 10  # of the curves over training
CURVE_TESTS = 1000  # in-class test images that the curve of accuracy is counted on, at most
UNLIMITED = 10**9  # steps, where time decides


@dataclass(frozen=True)
class Budget:
    """How long every method trains."""

    steps: int = 400  # of RoPAWS; the others see as many images
    seconds: float | None = None  # instead: as many steps as fit into this time
    curve: int = 4  # points at which the accuracy is measured, the last step included
    views: int = 4  # random views of each image, on frozen features


class Cell(NamedTuple):
    """What is trained and tested."""

    data: Data
    labels: int
    seed: int
    method: str

    @property
    def setting(self) -> str:
        """The row of the table: all methods and seeds of it are compared."""
        return f"{self.data.name}, {self.labels} labels"

    def folder(self, out: Path) -> Path:
        method = self.method.replace(">", "+").replace(":", ".")
        return out / "cells" / self.data.name / f"labels{self.labels}" / f"seed{self.seed}" / method


# Of the SGD of the FixMatch family on frozen features, where 0.03 leaves a linear classifier of a few hundred
# steps too unsure for a pseudo-label; chosen with benchmarks/rival_trials.py on data of no table.
FEATURES_RATE = 0.3

KEYS = {"data": str, "labels": int, "seed": int, "method": str, "figures": dict, "images": int,
        "seconds": float, "given": list, "selection": list, "curve": list}  # fmt: skip


def read_result(path: Path) -> dict[str, Any] | None:
    """The result of a cell; None where there is none, or a damaged one."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in KEYS.items())
    known = whole and isinstance(found["figures"].get("accuracy"), float)
    result: dict[str, Any] | None = found if known else None
    return result


def split_file(out: Path, cell: Cell, task: Task) -> Path:
    """The labeled images, drawn once for all methods from the seed of the cell."""
    path = out / "labels" / f"{cell.data.name}-{cell.labels}-seed{cell.seed}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        data = replace(cell.data.config(), labels_per_class=cell.labels)
        write_split(path, choose_split(task.corpus, data, seed=cell.seed))
    return path


def run_cell(
    cell: Cell,
    task: Task,
    network: Network,
    budget: Budget,
    out: Path,
    base: RunConfig | None = None,
    methods: Mapping[str, Method] | None = None,
    weight_decay: float | None = None,
) -> dict[str, Any]:
    """Train and test; what an earlier call has done is not done again.

    base, methods, weight_decay: of a protocol, the settings that all methods share, those of single methods,
    and the weight decay of the FixMatch family; by default those that suit the data and the network.

    Returns:
        The content of result.json.

    Raises:
        ValueError: The method cannot run here; TrainingDivergedError is one of its kinds.
    """
    folder = cell.folder(out)
    if (found := read_result(folder / RESULT)) is not None:
        return found
    split = split_file(out, cell, task)
    data = replace(cell.data.config(), labels_per_class=None, split=split.absolute())
    if base is None:
        sizes = {"labels": cell.labels, "steps": budget.steps, "views": budget.views}
        base = base_config(task, data, network, **sizes)
    base = replace(base, data=data, train=replace(base.train, seed=cell.seed))
    judged = cell.method in JUDGES
    result = (
        _judge(cell, task, base)
        if judged
        else _train(cell, task, base, budget, folder, methods, weight_decay)
    )
    result |= {"data": cell.data.name, "labels": cell.labels, "seed": cell.seed, "method": cell.method}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULT, result)
    for run in folder.glob("[0-9]-*"):  # what no later call needs
        (run / CHECKPOINT).unlink(missing_ok=True)
        shutil.rmtree(run / SNAPSHOTS, ignore_errors=True)
    return result


def _train(
    cell: Cell,
    task: Task,
    base: RunConfig,
    budget: Budget,
    folder: Path,
    protocol: Mapping[str, Method] | None,
    weight_decay: float | None,
) -> dict[str, Any]:
    phases = phases_of(cell.method, frozen=base.model.frozen, given=protocol)
    classes = len(task.corpus.class_names)
    reference = phases_of("ropaws", frozen=base.model.frozen)[0].method
    total = budget.steps * images_per_step(base, reference, classes)
    seen, seconds, init = 0.0, 0.0, base.model.init
    given, runs = [], []
    for number, phase in enumerate(phases):
        config = phase_config(base, phase, classes, total, budget)
        config = replace(config, model=replace(config.model, init=init))
        if weight_decay is not None and dict(phase.method.optim) == dict(FIXMATCH_OPTIM):
            config = replace(config, optim=replace(config.optim, weight_decay=weight_decay))
        name = f"{number + 1}-{phase.name.replace(':', '.')}"
        run = _train_phase(config, folder / name, task, phase, budget)
        steps, spent = _length(run)
        seen += steps * images_per_step(config, phase.method, classes)
        seconds += spent
        given.append(_given(Run(run, console=Terminal(quiet=True)).config, phase, steps))
        runs.append(run)
        init = run / MODEL
    last = Run(runs[-1], corpus=task.corpus, console=Terminal(quiet=True))
    outputs = last.outputs(last.corpus.test_images)  # the run's own: frozen features come from the cache
    result = figures_of(outputs, task, last.threshold)
    per_step = images_per_step(config, phase.method, classes)
    curve = _curve(last, task, seen - steps * per_step, per_step)
    result |= {
        "images": round(seen),
        "seconds": seconds,
        "given": given,
        "selection": _selection(runs),
        "curve": [*curve, [seen, result["figures"]["accuracy"]]],
    }
    if result["selection"]:  # of the last tenth of training
        _, selected, purity = result["selection"][-1]
        result["figures"] |= {"selected": selected} | ({} if purity is None else {"purity": purity})
    return result


def phase_config(base: RunConfig, phase: Phase, classes: int, total: float, budget: Budget) -> RunConfig:
    """The settings of a phase: those that all methods share, and the optimizer that is the method's own.

    On frozen features the FixMatch family learns faster than from scratch, see FEATURES_RATE.
    """
    config = with_method(base, phase.method)
    if base.model.frozen and config.optim.schedule == "fixmatch":
        config = replace(config, optim=replace(config.optim, peak=FEATURES_RATE, start=FEATURES_RATE))
    if budget.seconds is not None:
        return replace(config, train=replace(config.train, steps=UNLIMITED))
    steps = steps_for(config, phase.method, classes, total * phase.share, reference=budget.steps)
    keep = -(-steps // budget.curve) if budget.curve > 1 else None
    every = min(base.train.checkpoint_every, max(50, steps // 4))
    train = replace(config.train, steps=steps, keep_every=keep, checkpoint_every=every)
    return replace(config, optim=warmed(config.optim, steps), train=train)


def _train_phase(config: RunConfig, run: Path, task: Task, phase: Phase, budget: Budget) -> Path:
    if (run / MODEL).exists():
        return run
    quiet, inputs = Terminal(quiet=True), TrainInputs(corpus=task.corpus, in_class=task.in_class)
    if (run / CONFIG).exists():
        return resume(run, console=quiet, inputs=inputs)
    seconds = None if budget.seconds is None else budget.seconds * phase.share
    return train(config, run, budget=seconds, console=quiet, inputs=inputs)


def _length(run: Path) -> tuple[int, float]:
    """Steps and seconds of training."""
    rows = _metrics(run)
    return len(rows), float(rows[-1]["seconds"])


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


def method_settings(method: Method) -> dict[str, Any]:
    """The fields of a method as plain values."""
    plain = to_json(RunConfig(method=method))["method"]
    return {name: value for name, value in plain.items() if name != "name"}


def _given(config: RunConfig, phase: Phase, steps: int) -> dict[str, Any]:
    """What a method was given, for the page."""
    return {
        "phase": phase.name,
        "steps": steps,
        "batch": config.train.batch,
        "method": method_settings(config.method),
        "optim": to_json(config)["optim"],
        "views": {role: type(v).__name__ for role, v in config.method.views(config.augment).items()},
    }


def figures_of(outputs: Outputs, task: Task, threshold: float) -> dict[str, Any]:
    """All figures on the test images: those of the pool's kinds first, those of unseen kinds last."""
    truth = task.corpus.test_labels
    seen = slice(0, len(truth) - task.unseen)
    near = Outputs(*(value[seen] for value in outputs))
    figures = evaluation_figures(near, truth[seen])
    predicted = near.probs.argmax(dim=1).where(near.in_domain >= threshold, OUT_OF_CLASS)
    if bool((truth[seen] < 0).any()):
        figures["balanced_accuracy"] = balanced_accuracy(predicted, truth[seen])
    if task.unseen:
        known = truth >= 0
        rows = known.clone()
        rows[-task.unseen :] = True
        found = detection(outputs.score[rows], known[rows])
        figures |= {"auroc_unseen": found.auroc, "fpr95_unseen": found.fpr95}
    return {"figures": figures}


def _selection(runs: Sequence[Path]) -> list[list[float | None]]:
    """Images seen as a share of the last phase, selected ratio, purity: means over parts of training."""
    rows = [row for row in _metrics(runs[-1]) if "selected" in row]
    points: list[list[float | None]] = []
    for number in range(POINTS):
        part = rows[number * len(rows) // POINTS : (number + 1) * len(rows) // POINTS]
        if part:
            selected = sum(row["selected"] for row in part) / len(part)
            inside = sum(row.get("selected_in_class", 0.0) for row in part) / len(part)
            known = "selected_in_class" in part[0] and selected > 0
            points.append([(number + 0.5) / POINTS, selected, inside / selected if known else None])
    return points


def _curve(run: Run, task: Task, earlier: float, per_step: float) -> list[list[float]]:
    """Images seen and accuracy at the snapshots, but for the last step."""
    truth = task.corpus.test_labels
    rows = (truth >= 0).nonzero().squeeze(1)
    rows = rows[:: max(1, -(-len(rows) // CURVE_TESTS))]
    points = []
    for step, weights in sorted(snapshots(run.path).items()):
        if step >= run.config.train.steps:
            continue
        outputs = run.at_snapshot(weights).outputs(run.corpus.test_images, rows)
        accuracy = accuracy_and_confidence(outputs.probs, truth[rows])["accuracy"]
        points.append([earlier + step * per_step, accuracy])
    return points


def _judge(cell: Cell, task: Task, base: RunConfig) -> dict[str, Any]:
    """A classifier without training, on the frozen features in their main directions."""
    began = time.perf_counter()
    rows = frozen_rows(task, base)
    split = choose_split(task.corpus, base.data, seed=0)
    labeled, classes = rows.train[split.indices], len(task.corpus.class_names)
    probs = JUDGES[cell.method](labeled, split.labels, rows.train, classes)(rows.test).float()
    confidence = probs.amax(dim=1)
    outputs = Outputs(rows.test, probs, confidence, confidence)
    return figures_of(outputs, task, 0.5) | {
        "images": 0,
        "seconds": time.perf_counter() - began,
        "given": [{"phase": cell.method, "steps": 0, "method": {}, "optim": {}, "views": {}}],
        "selection": [],
        "curve": [],
    }


class FrozenRows(NamedTuple):
    """Unit rows around the mean of the pool, in the main directions of its features."""

    train: Tensor  # (n, d)
    test: Tensor  # (t, d)


def frozen_rows(task: Task, base: RunConfig, console: Console | None = None) -> FrozenRows:
    """The rows of all images; their features stay in the cache."""
    channels = task.corpus.channels
    encoder = build_encoder(base.model, channels=channels)
    load_init(encoder, base.model, channels=channels)
    normalize = pretrained_normalization(base.model, channels=channels)
    assert normalize is not None
    found = []
    embedder = embedder_of(base, encoder.eval(), normalize, console or Terminal(quiet=True))
    for images, views in ((task.corpus.train_images, None), (task.corpus.test_images, 0)):
        found.append(embedder.features(images, views=views).features)
    mean, components = (part.float() for part in principal_components(found[0], base.model.projection_dims))
    rows = [F.normalize(main_directions(part[slice(None)], mean, components), dim=1) for part in found]
    return FrozenRows(*rows)
