"""`ropaws finetune`: choose settings on held-out training images, train, test once."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ropaws.data.files import drop_unreadable_tests
from ropaws.data.sources import load_corpus
from ropaws.evaluation.calibration import expected_calibration_error
from ropaws.evaluation.fine_tune import (
    Classifier,
    FineTuneConfig,
    LabeledImages,
    class_probabilities,
    fine_tune,
    hold_out,
    plain_view,
)
from ropaws.folder import check_same_data
from ropaws.trained import Trained, load_run, read_run_config
from ropaws.training.checkpoint import write_atomically, write_json
from ropaws.training.progress import watch_files

RATES, EPOCHS = (0.01, 0.02, 0.05, 0.1, 0.2), (30, 50)  # the paper's sweep
RESULTS = {False: "finetune.json", True: "linear.json"}


def finetune(
    run: Path | str,
    *,
    linear: bool = False,
    rates: Sequence[float] = RATES,
    epochs: Sequence[int] = EPOCHS,
    batch: int = 1024,
    device: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Fine-tune a run's network on its labelled images, or with linear train a probe on it.

    Learning rate and epochs are chosen on a fifth of the labelled images, then all of them are trained
    on. Test images are looked at once, at the end. Written to RUN/finetune.json (linear.json), with the
    network in RUN/finetuned.safetensors.
    """
    run = Path(run)
    console = console or Console(stderr=True)
    corpus = load_corpus(read_run_config(run).data, watch=watch_files(console))
    trained = load_run(run, device=device)
    check_same_data(run, trained.facts, corpus)
    split = trained.facts.split
    data = LabeledImages(corpus.train_images[split.indices], split.labels)
    base = FineTuneConfig(rate=rates[0], epochs=epochs[0], batch=batch, linear=linear)
    sweep = [replace(base, rate=rate, epochs=count) for rate, count in itertools.product(rates, epochs)]
    tried = _try_all(trained, data, sweep, watch_files(console))
    best = max(tried, key=lambda row: row[1])[0] if tried else sweep[0]
    model = _tune(trained, data, best)
    results: dict[str, Any] = {
        "chosen": asdict(best),
        "sweep": [{**asdict(config), "held_out_accuracy": accuracy} for config, accuracy in tried],
    }
    corpus = drop_unreadable_tests(corpus)
    if len(corpus.test_images):
        results |= _test(trained, model, corpus.test_images, corpus.test_labels)
    if not linear:
        _save(run, model)
    write_json(run / RESULTS[linear], results)
    return results


def _try_all(
    trained: Trained,
    data: LabeledImages,
    sweep: list[FineTuneConfig],
    watch: Callable[[Iterable[Any], str, int], Iterable[Any]],
) -> list[tuple[FineTuneConfig, float]]:
    """Accuracy of each setting on held-out labelled images; nothing to choose by where no class has two."""
    kept, held = hold_out(data.labels, seed=trained.config.train.seed)
    if len(held) == 0 or len(sweep) == 1:
        return []
    part = LabeledImages(data.images[kept], data.labels[kept])
    rows = []
    for config in watch(sweep, "Choosing settings", len(sweep)):
        probs = _probabilities(trained, _tune(trained, part, config), data.images[held])
        rows.append((config, float((probs.argmax(dim=1) == data.labels[held]).float().mean())))
    return rows


def _tune(trained: Trained, data: LabeledImages, config: FineTuneConfig) -> Classifier:
    return fine_tune(
        trained.model,
        data,
        config,
        classes=len(trained.facts.class_names),
        view=plain_view(trained.config.augment),
        normalize=trained.facts.normalize,
        seed=trained.config.train.seed,
    )


def _probabilities(trained: Trained, model: Classifier, images: Any) -> torch.Tensor:
    size = trained.config.augment.size
    return class_probabilities(model, images, size=size, normalize=trained.facts.normalize)


def _test(trained: Trained, model: Classifier, images: Any, labels: torch.Tensor) -> dict[str, float]:
    probs = _probabilities(trained, model, images)
    inside = labels >= 0
    confidence, predicted = probs.max(dim=1)
    results = {
        "accuracy": float((predicted == labels)[inside].float().mean()),
        "confidence_in": float(confidence[inside].mean()),
        "ece": expected_calibration_error(probs[inside], labels[inside]),
    }
    if not bool(inside.all()):
        results["confidence_out"] = float(confidence[~inside].mean())
    return results


def _save(run: Path, model: Classifier) -> None:
    from safetensors.torch import save_file

    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(run / "finetuned.safetensors", lambda path: save_file(state, path))
