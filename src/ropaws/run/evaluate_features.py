"""A run beside plain classifiers on the features of its own backbone, and what more labels would bring."""

import hashlib
from typing import Any, cast

import torch
from torch import Tensor

from ropaws.classify.classifier import ClassifierSettings
from ropaws.classify.head import STEPS, LabeledRows
from ropaws.classify.logistic import fit_logistic
from ropaws.classify.soft_nn import max_similarity
from ropaws.core.features import main_points
from ropaws.insight.accuracy_estimate import binomial_interval
from ropaws.insight.held_out import (
    Measured,
    accuracy,
    centered,
    difference,
    held_out,
    held_out_refits,
    logistic,
    soft_nn,
)
from ropaws.insight.learning_curve import LEAST, Curve, curve_on_tests, learning_curve
from ropaws.insight.metrics import detection
from ropaws.methods import RoPAWS
from ropaws.run.manifest import model_digest
from ropaws.run.results import CurveFigures, Evaluation, LearningCurve, Rival
from ropaws.run.run import Run

MOST_LABELS, MOST_WORK = 10_000, 500_000  # labels, and labels times classes, that take minutes at most
TESTS, CURVE_TESTS = 20_000, 2_000  # test images that are looked at, at most
REFIT_POOL = 4096  # unlabeled images of a fit that labels are held out of
VERSION = 3  # of these figures: others are computed again


def compare_on_features(run: Run, results: Evaluation) -> dict[str, Any]:
    """Logistic regression and soft nearest neighbors on the backbone's features, beside the run itself.

    On the test images, or else on labels that are held out. Earlier results of the same model and data stay:
    they need the images, which may be gone.
    """
    made_from = _fingerprint(run)
    if _made_from(results) == made_from:
        return {}
    for name in ("features", "learning_curve"):  # of another model
        cast(dict[str, Any], results).pop(name, None)
    labels, classes = run.support.labels, run.support.classes
    if len(labels) > MOST_LABELS or len(labels) * classes > MOST_WORK:
        raise ValueError(
            f"logistic regression on the features of {len(labels):,} labels of {classes:,} classes would"
            " take hours"
        )
    labeled = run.features(run.corpus.train_images, run.facts.split.indices)
    chosen = _tests(run)
    tests = run.features(run.corpus.test_images, chosen) if len(chosen) else labeled[:0]
    found: dict[str, Any] = {"made_from": made_from, "dims": labeled.shape[1]}
    found["frozen"] = run.config.model.frozen
    if (run.test.labels[chosen] >= 0).any():
        found |= _on_tests(run, labeled, tests, chosen)
    elif run.config.model.frozen and int(torch.bincount(labels).max()) > 1:  # else they have seen the labels
        found |= _on_labels(run, labeled)
    return {"features": found, "learning_curve": _learning_curve(run, labeled, tests, chosen)}


def _made_from(results: Evaluation) -> object:
    found: object = results.get("features")
    return found.get("made_from") if isinstance(found, dict) else None


def _fingerprint(run: Run) -> str:
    """A fingerprint of the model, the labels and the tests; it needs no images."""
    state = hashlib.blake2b(digest_size=16)
    state.update(f"{VERSION} {model_digest(run.path)} {run.facts.digest} {run.kernel.temperature}".encode())
    for values in (run.support.labels, run.test.labels, run.test.outputs.probs, run.test.outputs.score):
        state.update(values.contiguous().numpy().tobytes())
    return state.hexdigest()


def _tests(run: Run) -> Tensor:
    """The test images to look at.   ->  (t,)"""
    count = len(run.test.labels)
    if len(run.corpus.test_images) != count:
        raise ValueError(f"the test images have changed; `ropaws evaluate {run.path}` looks at them again")
    return _sample(torch.arange(count), TESTS)


def _sample(rows: Tensor, most: int) -> Tensor:
    if len(rows) <= most:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order[:most].sort().values]


def _on_tests(run: Run, labeled: Tensor, tests: Tensor, chosen: Tensor) -> dict[str, Any]:
    labels, classes, truth = run.support.labels, run.support.classes, run.test.labels[chosen]
    probs = fit_logistic(labeled, labels, classes=classes)(tests)
    support, queries = centered(labeled, labeled), centered(tests, labeled)
    predicted = {
        "own": run.test.outputs.probs[chosen].argmax(dim=1),
        "logistic": probs.argmax(dim=1),
        "soft_nn": soft_nn(support, labels, queries, classes),
    }
    scores = {
        "own": run.test.outputs.score[chosen],
        "logistic": probs.amax(dim=1),
        "soft_nn": max_similarity(queries, support),
    }
    known = truth >= 0
    right = {name: guess[known] == truth[known] for name, guess in predicted.items()}
    rivals = {name: _rival(accuracy(found), len(found)) for name, found in right.items()}
    if not known.all():
        for name, score in scores.items():
            rivals[name]["auroc"] = detection(score, known).auroc
    gain = difference(right["own"], right["logistic"])
    return {"on": "test", "images": int(known.sum()), **rivals, "gain": gain.value, "gain_error": gain.error}


def _on_labels(run: Run, labeled: Tensor) -> dict[str, Any]:
    """Each label is judged by fits to others. A run has a figure of its own where it can be fitted anew."""
    labels, classes = run.support.labels, run.support.classes
    right = {
        "logistic": held_out(labeled, labels, logistic, classes=classes),
        "soft_nn": held_out(centered(labeled, labeled), labels, soft_nn, classes=classes),
    }
    found: dict[str, Any] = {"on": "labels", "images": len(right["logistic"])}
    if isinstance(run.method, RoPAWS) and run.method.prior == "pool" and run.config.model.frozen:
        right["own"] = _refitted(run, run.method)
        gain = difference(right["own"], right["logistic"])
        found |= {"gain": gain.value, "gain_error": gain.error}
    return found | {name: _rival(accuracy(part), len(part)) for name, part in right.items()}


def _refitted(run: Run, method: RoPAWS) -> Tensor:
    """Whether each label is right in a run that has not seen it; of a large pool a sample takes part."""
    split, images = run.facts.split, run.corpus.train_images
    others = torch.ones(len(images), dtype=torch.bool)
    others[split.indices] = False
    rows = torch.cat([split.indices, _sample(others.nonzero().squeeze(1), REFIT_POOL)])
    settings = ClassifierSettings(
        head=len(rows) > len(split.indices) and run.support.classes > 1,
        steps=STEPS // 3,
        label_ratio=method.label_ratio,
        regression_share=method.regression_share,
        class_prior=method.class_prior,
    )
    labeled = LabeledRows(torch.arange(len(split.indices)), split.labels, run.support.classes)
    return held_out_refits(main_points(run.features(images, rows)), labeled, settings)


def _rival(found: Measured, images: int) -> Rival:
    low, high = binomial_interval(round(found.value * images), images, level=0.9)
    return {"accuracy": found.value, "error": found.error, "low": low, "high": high}


def _learning_curve(run: Run, labeled: Tensor, tests: Tensor, chosen: Tensor) -> LearningCurve:
    labels, classes, truth = run.support.labels, run.support.classes, run.test.labels[chosen]
    found: LearningCurve = {"least": LEAST}
    inside = _sample((truth >= 0).nonzero().squeeze(1), CURVE_TESTS)
    curves = {
        "test": curve_on_tests(labeled, labels, tests[inside], truth[inside], classes=classes),
        "held_out": learning_curve(labeled, labels, classes=classes),
    }
    for name, curve in curves.items():
        if curve is not None:
            found[name] = _figures(curve)  # type: ignore[literal-required]
    return found


def _figures(curve: Curve) -> CurveFigures:
    found: CurveFigures = {
        "labels_per_class": curve.labels_per_class,
        "images": curve.images,
        "draws": curve.draws,
        "series": {},
    }
    for name, series in curve.series.items():
        found["series"][name] = {
            "accuracy": [point.value for point in series.accuracy],
            "error": [point.error for point in series.accuracy],
        }
        if series.last is not None:
            found["series"][name] |= {"gain": series.last.value, "gain_error": series.last.error}
    return found
