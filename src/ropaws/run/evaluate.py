"""evaluate(run): the paper's analyses of a trained run, one function per part."""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor

from ropaws.classify.classifier import ClassifierSettings
from ropaws.classify.head import STEPS, LabeledRows
from ropaws.classify.logistic import fit_logistic
from ropaws.classify.propagation import choose_voters, pool_posterior
from ropaws.classify.soft_nn import leave_one_out, max_similarity
from ropaws.core.features import main_points
from ropaws.core.files import locked, refuse_link, write_json
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, nearest
from ropaws.core.records import Outputs
from ropaws.core.run_layout import CONFIG, EVALUATION, GALLERY, MODEL, SPLIT, SUPERVISED, WITHOUT_EFFECT
from ropaws.insight.accuracy_estimate import binomial_interval
from ropaws.insight.baselines import fit_sskde, knn_predictions, logistic_predictions
from ropaws.insight.held_out import (
    LEAST,
    Curve,
    Measured,
    accuracy,
    centered,
    curve_on_tests,
    difference,
    held_out,
    held_out_refits,
    learning_curve,
    logistic,
    soft_nn,
)
from ropaws.insight.label_errors import check_labels
from ropaws.insight.metrics import (
    accuracy_and_confidence,
    class_accuracy,
    confusion_matrix,
    detection,
    evaluation_figures,
    histogram,
    reliability,
)
from ropaws.methods import RoPAWS, Supervised
from ropaws.methods.pool_calibration import JudgedMethod
from ropaws.report.run_page import write_report
from ropaws.run.config import differences, to_json, with_absolute_paths
from ropaws.run.discover import has_images
from ropaws.run.gallery import draw_gallery
from ropaws.run.manifest import model_digest, training_seconds
from ropaws.run.results import (
    CurveFigures,
    Evaluation,
    LearningCurve,
    PropagationRow,
    Rival,
    ShareFigures,
    is_evaluated,
    read_evaluation,
)
from ropaws.run.run import POOL, Run, open_run, read_run_config
from ropaws.run.suggest import SUGGESTIONS, find_suggestions
from ropaws.run.train import TrainInputs, resume, train
from ropaws.training.checkpoint import snapshots

MOST_LABELS = 10_000  # that take minutes at most
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


def pool_figures(run: Run, _: Evaluation) -> dict[str, Any]:
    """What the unlabeled images look like; and, where the truth is known, how right that is."""
    pool, outputs = run.pool, run.pool.outputs
    if len(pool.positions) == 0:
        return {}
    inside = outputs.in_domain >= run.threshold
    confidence, predicted = outputs.probs.max(dim=1)
    counts = torch.bincount(predicted[inside], minlength=len(run.class_names)).tolist()
    found: dict[str, Any] = {
        "size": pool.size,
        "seen": len(pool.positions),
        "threshold": run.threshold,
        "out_of_class": float((~inside).double().mean()),
        "confidence": float(confidence.double().mean()),
        "classes": dict(zip(run.class_names, counts, strict=True)),
        "in_domain": histogram(outputs.in_domain),
    }
    share = run.method.in_class_share(run.model)
    if share is not None:
        found["in_class_share"] = ShareFigures(estimate=share.estimate, low=share.low, high=share.high)
        found["share_doubt"] = share.doubt
    prior = run.method.estimated_class_prior(run.model) if isinstance(run.method, JudgedMethod) else None
    if prior is not None:
        ends = zip(*(part.tolist() for part in prior), strict=True)
        found["class_prior"] = {
            name: ShareFigures(estimate=estimate, low=low, high=high)
            for name, (estimate, low, high) in zip(run.class_names, ends, strict=True)
        }
    known = pool.truth >= 0
    if known.any():
        propagated = pool_posterior(
            outputs.embedding, run.support.embeddings, run.support.one_hot, run.kernel
        ).probs
        truth = pool.truth[known]
        found["known"] = int(known.sum())
        found["accuracy"] = accuracy_and_confidence(outputs.probs[known], truth)["accuracy"]
        found["accuracy_propagated"] = accuracy_and_confidence(propagated[known], truth)["accuracy"]
    told = pool.truth != UNLABELED
    out = pool.truth == OUT_OF_CLASS
    if known.any() and out.any():
        found["truly_out_of_class"] = float(out[told].double().mean())
        found["in_domain_auroc"] = detection(outputs.in_domain[told], ~out[told]).auroc
        found.update(detection(outputs.score[told], ~out[told])._asdict())
    return {"pool": found}


ITERATIONS = (1, 2, 3, 5, 10, None)  # of the propagation table; None is the fixed point
ALL_VOTE = 10_000  # test images up to which all of them vote for one another, as in the paper
MEMORY = 1 << 29  # bytes for votes that are kept between iterations
SSKDE_POINTS = 4096  # labeled images, and unlabeled ones, that SSKDE looks at: its time is quadratic
MOST_WORK = 500_000  # labels times classes up to which logistic regression is a matter of minutes
MATRIX_CLASSES = 100  # up to which the whole confusion matrix is written


def evaluate(
    run: Path | str | Run,
    *,
    only: Sequence[str] | None = None,
    pool: int = POOL,
    device: str | None = None,
    console: Console | None = None,
) -> Evaluation:
    """Analyze a run. The result is written to evaluation.json (and gallery.json) too.

    What the method says of the images is kept in the run folder, so that a later call needs no images.

    Args:
        run: A run folder, or a Run, whose own pool, device and console count then.
        only: Names of PARTS; None for all but those that train. With None, a part that fails is named and
            left out, as are those that need test images where the data has none.
        pool: Number of unlabeled images to look at, at most; 0 for all.
        device: Where to compute; by default as the run was trained.
        console: Where progress goes; standard error by default.

    Returns:
        All figures, as fractions.

    Raises:
        ValueError: A name is unknown, or a part that was asked for needs test images.
    """
    opened = open_run(run, pool=pool, device=device, console=console)
    names = _checked(only)
    model_digest(opened.path)  # raises an error for a run that is not finished
    with locked(opened.path):  # one process at a time: each adds to what evaluation.json has
        return _evaluate_parts(opened, names, only)


def _evaluate_parts(run: Run, names: list[str], only: Sequence[str] | None) -> Evaluation:
    if only is None:
        run.refresh()
    if any(name in NEED_TESTS for name in names) and not (run.test.labels >= 0).any():
        if only is not None:
            raise ValueError(
                f"the data of {run.path} has no test images with a class; {', '.join(only)} needs some"
            )
        names = [name for name in names if name not in NEED_TESTS]
    earlier = cast(dict[str, Any], read_evaluation(run.path))
    kept = NEED_IMAGES_RESULTS if only is None else earlier
    results: dict[str, Any] = {name: earlier[name] for name in kept if name in earlier}
    seconds = training_seconds(run.path)
    if seconds is not None:
        results["seconds"] = seconds
    for name in names:
        # Training has a progress bar of its own.
        with contextlib.nullcontext() if name in COSTLY else run.console.status(f"{name} ..."):
            try:
                results.update(PARTS[name](run, cast(Evaluation, results)))
            except Exception as error:
                if only is not None:
                    raise
                run.say(f"{name} left out: {error}")
        write_json(run.path / EVALUATION, results)  # what takes long is not lost with what comes after
    return cast(Evaluation, results)


def report(run: Run, out: Path | str | None = None, *, baseline: Path | str | None = None) -> Path:
    """Write the page of a run, after evaluating it where that was not done; see Run.report."""
    if not is_evaluated(run.path):
        try:
            evaluate(run)
        except Exception as error:
            # The page is made from what the folder has; it says itself what is missing.
            run.say(f"Not evaluated: {error}")
    return write_report(run.path, out, baseline=baseline)


def _checked(only: Sequence[str] | None) -> list[str]:
    if only is None:
        return [name for name in PARTS if name not in COSTLY]
    for name in only:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise ValueError(f"unknown part {name!r}, did you mean {nearest(name, PARTS)!r}? Known: {known}")
    return [name for name in PARTS if name in only]


def _soft_nn(run: Run, _: Evaluation) -> dict[str, Any]:
    """The figures of the paper's tables: accuracy, confidence, calibration, detection."""
    return {**evaluation_figures(run.test.outputs, run.test.labels)}


def _reliability(run: Run, _: Evaluation) -> dict[str, Any]:
    """Bins of confidence and accuracy, and histograms of confidence and in-domain probability."""
    truth, outputs = run.test.labels, run.test.outputs
    known = truth >= 0
    confidence = outputs.probs.amax(dim=1)
    kinds = {"in": known, "out": ~known}
    return {
        "reliability": [item._asdict() for item in reliability(outputs.probs[known], truth[known])],
        "histograms": {
            name: {
                "confidence": histogram(confidence[rows]),
                "in_domain": histogram(outputs.in_domain[rows]),
            }
            for name, rows in kinds.items()
            if rows.any()
        },
        "threshold": run.threshold,
    }


def _confusion(run: Run, _: Evaluation) -> dict[str, Any]:
    truth, classes = run.test.labels, len(run.class_names)
    known = truth >= 0
    predicted = run.test.outputs.probs[known].argmax(dim=1)
    matrix = confusion_matrix(predicted, truth[known], classes=classes)
    found: dict[str, Any] = {"per_class": dict(zip(run.class_names, class_accuracy(matrix), strict=True))}
    return {"confusion": matrix.tolist(), **found} if classes <= MATRIX_CLASSES else found


def _propagation(run: Run, _: Evaluation) -> dict[str, Any]:
    """The paper's table: the plain classifier, then label propagation among the test images, step by step."""
    return {"propagation": propagation_table(run, run.test.outputs, run.test.labels)}


def _snapshots(run: Run, _: Evaluation) -> dict[str, Any]:
    """The same over training, from the weights that train.keep_every has kept."""
    rows = [_at_snapshot(run, steps, path) for steps, path in snapshots(run.path).items()]
    return {"over_training": rows} if rows else {}


def propagation_table(run: Run, outputs: Outputs, truth: Tensor) -> list[PropagationRow]:
    """One row for each number of iterations; 0 is the plain classifier, None the fixed point."""
    rows: list[dict[str, Any]] = [{"iterations": 0, **accuracy_and_confidence(outputs.probs, truth)}]
    for iterations in ITERATIONS:
        posterior = pool_posterior(
            outputs.embedding,
            run.support.embeddings,
            run.support.one_hot,
            run.kernel,
            iterations=iterations,
            voters=ALL_VOTE,
            memory=MEMORY,
        )
        rows.append({"iterations": iterations, **accuracy_and_confidence(posterior.probs, truth)})
    return cast(list[PropagationRow], rows)


def _at_snapshot(run: Run, steps: int, path: Path) -> dict[str, Any]:
    earlier = run.at_snapshot(path)
    outputs, truth = earlier.outputs(run.corpus.test_images), run.test.labels
    known = truth >= 0
    found: dict[str, Any] = {"steps": steps, "propagation": propagation_table(earlier, outputs, truth)}
    if not known.all():
        found["auroc"] = detection(outputs.score, known).auroc
    return found


def _baselines(run: Run, _: Evaluation) -> dict[str, Any]:
    """Other classifiers on the same embedding: how much of the result is due to the embedding?

    With very many labels those that would take hours are left out.
    """
    known = run.test.labels >= 0
    queries, truth = run.test.outputs.embedding[known], run.test.labels[known]
    support, labels = run.support.embeddings, run.support.labels
    pool = run.pool.outputs.embedding
    predictions = {"knn": torch.from_numpy(knn_predictions(support, labels, queries))}
    if len(labels) * run.support.classes <= MOST_WORK:
        predictions["logistic"] = torch.from_numpy(logistic_predictions(support, labels, queries))
    if len(labels) <= SSKDE_POINTS:
        some = pool[choose_voters(len(pool), SSKDE_POINTS)]
        density = fit_sskde(support, labels, some, classes=run.support.classes)
        predictions["sskde"] = density(queries).argmax(dim=1)
    found = {name: float((guess == truth).double().mean()) for name, guess in predictions.items()}
    return {"baselines": found}


def _labels(run: Run, _: Evaluation) -> dict[str, Any]:
    """The labels themselves: leave-one-out accuracy, and suspected label errors."""
    labels = run.support.labels
    if len(labels) < 2:
        return {}
    votes = leave_one_out(run.support, temperature=run.kernel.temperature).argmax(dim=1)
    # A class with one label has no other that could agree with it.
    judged = torch.bincount(labels, minlength=len(run.class_names))[labels] > 1
    right = (votes == labels)[judged].double()
    found: dict[str, Any] = {"leave_one_out": float(right.mean())} if len(right) else {}
    check = check_labels(_label_features(run), labels, classes=run.support.classes)
    names, index = run.class_names, run.facts.split.indices.tolist()
    files = run.facts.labeled_names
    return {
        **found,
        "label_check": {"contradicted": check.contradicted, "by_chance": check.by_chance},
        "label_errors": [
            {
                "position": item.position,
                "image": index[item.position],
                "name": files[item.position] if files else f"training image {index[item.position]}",
                "label": names[item.label],
                "suspected": names[item.suspected],
                "own": item.own,
                "other": item.other,
            }
            for item in check.errors
        ],
    }


def _label_features(run: Run) -> Tensor:
    """Features to compare the labeled images by: a head has learned their labels, wrong ones too."""
    if not run.config.model.frozen:
        return run.support.embeddings
    try:
        images = run.corpus.train_images
    except (OSError, ValueError) as error:
        run.say(f"The images are not available ({error}); labels are compared in the run's embedding.")
        return run.support.embeddings
    return run.features(images, run.facts.split.indices)


def _suggestions(run: Run, results: Evaluation) -> dict[str, Any]:
    """Earlier ones stay where the images are gone: they were made of the features, not of the embedding."""
    if "suggestions" in results and not has_images(run):
        return {}
    return find_suggestions(run, SUGGESTIONS)._asdict()


def _gallery(run: Run, results: Evaluation) -> dict[str, Any]:
    """Thumbnails, nearest neighbors and t-SNE, to a file of their own."""
    shown, suggested = (_images_of(results.get(name)) for name in ("label_errors", "suggestions"))
    new = _images_of_groups(results.get("new_classes"))
    write_json(run.path / GALLERY, draw_gallery(run, shown, [*suggested, *new]))
    return {}


def _images_of(found: object) -> list[int]:
    """The training images that an earlier part has named; none where evaluation.json is damaged."""
    items = found if isinstance(found, list) else []
    images = [item.get("image") for item in items if isinstance(item, dict)]
    return [image for image in images if type(image) is int]


def _images_of_groups(found: object) -> list[int]:
    """As _images_of, of groups."""
    items = found if isinstance(found, list) else []
    lists = [group.get("images") for group in items if isinstance(group, dict)]
    return [image for images in lists if isinstance(images, list) for image in images if type(image) is int]


def _supervised(run: Run, _: Evaluation) -> dict[str, Any]:
    """The supervised baseline: the same network, steps and labels without the unlabeled images.

    A run of its own in RUN/supervised; one that was interrupted is resumed.
    """
    if not run.method.views(run.config.augment):
        raise ValueError(f"{run.path} has not seen the unlabeled images; it needs no supervised baseline")
    folder = run.path / SUPERVISED
    refuse_link(folder)
    if not (folder / MODEL).exists():
        _train_supervised(run, folder)
    baseline = Run(folder, pool=run.pool_limit, device=run.device_name, console=run.console)
    found = cast(dict[str, Any], evaluate(baseline, only=("soft-nn",)))
    return {"supervised": {name: found[name] for name in ("accuracy", "ece", "auroc") if name in found}}


def _train_supervised(run: Run, folder: Path) -> None:
    """Train on the images of the run itself. An untrusted folder does not say where caches and logs go."""
    config = run.config
    data = replace(run.data_config, split=run.path / SPLIT, label_fraction=None)
    device = run.device_name or config.train.device
    settings = replace(config.train, keep_every=None, device=device, log=())
    config = with_absolute_paths(replace(config, method=Supervised(), data=data, train=settings))
    if not (folder / CONFIG).exists():
        train(config, folder, console=run.console, inputs=TrainInputs(corpus=run.corpus))
        return
    found = read_run_config(folder)
    if differences(to_json(found), to_json(config), free=WITHOUT_EFFECT) or (
        (found.train.log, found.data.feature_cache) != ((), data.feature_cache)
    ):
        raise ValueError(f"{folder} was started with other settings; remove it, and it is trained again")
    resume(folder, console=run.console, inputs=TrainInputs(corpus=run.corpus))


# Each gets the run, and what the parts before it have found.
PARTS: dict[str, Callable[[Run, Evaluation], dict[str, Any]]] = {
    "soft-nn": _soft_nn,
    "reliability": _reliability,
    "confusion": _confusion,
    "propagation": _propagation,
    "baselines": _baselines,
    "features": compare_on_features,
    "pool": pool_figures,
    "labels": _labels,
    "suggestions": _suggestions,
    "snapshots": _snapshots,
    "gallery": _gallery,
    "supervised": _supervised,
}
COSTLY = ("supervised",)  # only when asked for
NEED_TESTS = ("soft-nn", "reliability", "confusion", "propagation", "baselines", "snapshots", "supervised")
NEED_IMAGES_RESULTS = (
    "over_training",
    "supervised",
    "features",
    "learning_curve",
    "suggestions",
    "new_classes",
)
