"""`ropaws finetune`: choose settings on held-out labeled images, train a run with them, test it once."""

import itertools
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
from rich.console import Console
from torch import Tensor

from ropaws.core.files import locked, refuse_link, write_json
from ropaws.core.randomness import FINE_TUNE, SupportConfig, generator, steps_per_epoch
from ropaws.core.run_layout import FINETUNE_RESULTS, FINETUNED, LINEAR, LINEAR_RESULTS, MODEL, SPLIT
from ropaws.core.terminal import watch_files
from ropaws.insight.metrics import accuracy_and_confidence, evaluation_figures
from ropaws.methods import FineTune
from ropaws.pool.sources import Labeled
from ropaws.run.config import RunConfig, with_method
from ropaws.run.results import Evaluation
from ropaws.run.run import Run, open_run
from ropaws.run.train import TrainInputs, train
from ropaws.run.train_state import fit_in_memory

RATES, EPOCHS = (0.01, 0.02, 0.05, 0.1, 0.2), (30, 50)  # the paper's sweep
HELD_OUT = 0.2  # share of the labeled images on which settings are chosen


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One entry of the sweep."""

    rate: float
    epochs: int
    batch: int
    linear: bool

    def __post_init__(self) -> None:
        for name in ("rate", "epochs", "batch"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.batch < 2:
            raise ValueError(f"batch must be at least 2, as batch norm needs two images, got {self.batch}")


class SweepRow(TypedDict):
    """A setting, and its accuracy on held-out labeled images.

    Attributes:
        rate: Learning rate.
        epochs: Number of epochs.
        held_out_accuracy: Accuracy on the held-out fifth of the labeled images.
    """

    rate: float
    epochs: int
    held_out_accuracy: float


class FineTuned(Evaluation, total=False):
    """The content of finetune.json or linear.json: figures on test images as in Evaluation, and the sweep.

    Attributes:
        chosen: Learning rate, epochs, batch and kind of the setting that was used.
        sweep: All settings that were tried.
    """

    chosen: dict[str, float]
    sweep: list[SweepRow]


def finetune(
    run: Path | str | Run,
    *,
    linear: bool = False,
    rates: Sequence[float] = RATES,
    epochs: Sequence[int] = EPOCHS,
    batch: int = 1024,
    device: str | None = None,
    console: Console | None = None,
) -> FineTuned:
    """Fine-tune a run's network on its labeled images as in the paper, or train a linear probe on it.

    Learning rate and epochs are chosen on a fifth of the labeled images, then all of them are trained on.
    Test images are looked at once, at the end. The result is a run of its own in RUN/finetuned (RUN/linear),
    which can predict and be evaluated like any other.

    Args:
        run: A run folder.
        linear: Leave the network as it is and train a linear layer on it.
        rates: Learning rates to choose from.
        epochs: Numbers of epochs to choose from.
        batch: Labeled images per step.
        device: Where to compute; by default as the run was trained.
        console: Where progress goes; standard error by default.

    Returns:
        The chosen setting, the sweep, and figures on test images; also in RUN/finetune.json (linear.json).
    """
    settings = [
        Setting(rate=rate, epochs=count, batch=batch, linear=linear)
        for rate, count in itertools.product(rates, epochs)
    ]
    base = open_run(run, device=device, console=console)
    with locked(base.path):
        _ = base.model, base.corpus  # a problem with either should show before the sweep
        folder = base.path / (LINEAR if linear else FINETUNED)
        refuse_link(folder)
        tried = _try_all(base, settings)
        best = max(tried, key=lambda pair: pair[1])[0] if tried else settings[0]
        tuned = _train(base, best, folder)
        results: FineTuned = {
            "chosen": asdict(best),
            "sweep": [
                {"rate": setting.rate, "epochs": setting.epochs, "held_out_accuracy": accuracy}
                for setting, accuracy in tried
            ],
        }
        if (base.corpus.test_labels >= 0).any():
            figures = evaluation_figures(tuned.outputs(base.corpus.test_images), base.corpus.test_labels)
            results.update(figures)  # type: ignore[typeddict-item]
        write_json(base.path / (LINEAR_RESULTS if linear else FINETUNE_RESULTS), results)
    return results


def _train(base: Run, setting: Setting, folder: Path) -> Run:
    """Train beside the folder, so that the run of an earlier call is there until this one is complete."""
    fresh = folder.with_name(f".{folder.name}.new")
    refuse_link(fresh)
    shutil.rmtree(fresh, ignore_errors=True)
    inputs = TrainInputs(corpus=base.corpus, normalize=base.facts.normalize)
    train(_config(base, setting, len(base.facts.split.labels)), fresh, console=base.console, inputs=inputs)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return Run(folder, device=base.device_name, console=base.console, corpus=base.corpus)


def _try_all(run: Run, settings: Sequence[Setting]) -> list[tuple[Setting, float]]:
    """Accuracy of each setting on held-out labeled images; nothing to choose by where no class has two."""
    split = run.facts.split
    kept, held = hold_out(split.labels, seed=run.config.train.seed)
    if len(held) == 0 or len(settings) == 1:
        return []
    part = replace(run.facts, split=Labeled(split.indices[kept], split.labels[kept]), labeled_names=())
    rows = []
    for setting in watch_files(run.console)(settings, "Choosing settings", len(settings)):
        config = _config(run, setting, len(kept))
        trained = Run(run.path, device=run.device_name, console=run.console, corpus=run.corpus)
        trained.config = config
        vars(trained).update(facts=part, model=fit_in_memory(config, run.corpus, part, run.device_name))
        vars(trained)["support"] = trained.embedded_support()
        probs = trained.outputs(run.corpus.train_images, split.indices[held]).probs
        rows.append((setting, accuracy_and_confidence(probs, split.labels[held])["accuracy"]))
    return rows


def _config(run: Run, setting: Setting, labels: int) -> RunConfig:
    """The settings of a fine-tuning run that starts from the weights of a run. labels: how many it has."""
    steps = setting.epochs * steps_per_epoch(labels, setting.batch)
    config = with_method(run.config, FineTune(linear=setting.linear))
    return replace(
        config,
        model=replace(config.model, init=run.path.absolute() / MODEL),
        data=replace(run.data_config, split=run.path.absolute() / SPLIT, label_fraction=None),
        support=SupportConfig(images_per_step=setting.batch, views=1),
        optim=replace(config.optim, peak=setting.rate, start=setting.rate),
        train=replace(
            config.train,
            steps=steps,
            keep_every=None,
            log=(),
            device=run.device_name or config.train.device,
        ),
    )


def hold_out(labels: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to choose settings on: a fifth of each class that has two or more."""
    random = generator(seed, FINE_TUNE, 1)
    kept, held = [], []
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=random)]
        count = max(1, round(HELD_OUT * len(rows))) if len(rows) > 1 else 0
        held.append(rows[:count])
        kept.append(rows[count:])
    return torch.cat(kept), torch.cat(held)
