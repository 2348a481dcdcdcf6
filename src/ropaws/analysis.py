"""evaluate(run): the paper's analyses of a trained run, a part each; evaluation.json is their result."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ropaws.evaluation.baselines import knn_predictions, logistic_predictions
from ropaws.evaluation.calibration import reliability
from ropaws.evaluation.confusion import class_accuracy, confusion_matrix
from ropaws.evaluation.doubts import doubtful_labels
from ropaws.evaluation.ood import detection, max_similarity
from ropaws.evaluation.propagation import choose_voters, pool_posterior
from ropaws.evaluation.soft_nn import evaluate_soft_nn, predict_probs
from ropaws.evaluation.sskde import fit_sskde
from ropaws.folder import CONFIG, EVALUATION, SPLIT, LabeledEmbeddings, training_seconds
from ropaws.gallery import PICTURES, add_thumbnails, draw_gallery
from ropaws.material import HIDDEN, OUT, POOL, Material, load_material
from ropaws.methods import Supervised
from ropaws.naming import nearest
from ropaws.run import resume, train
from ropaws.suggesting import suggestions
from ropaws.trained import load_run
from ropaws.training.checkpoint import MODEL, read_json, snapshots, write_json

ITERATIONS = (1, 2, 3, 5, 10, None)  # of the propagation table; None is the fixed point
ALL_VOTE = 10_000  # test images up to which all of them vote for one another, as in the paper
MEMORY = 1 << 29  # bytes for votes that are kept between iterations
SSKDE_POINTS = 4096  # labelled images, and unlabelled ones, that SSKDE looks at: its time is quadratic
MOST_WORK = 500_000  # labels times classes up to which logistic regression is a matter of minutes
MATRIX_CLASSES = 100  # up to which the whole confusion matrix is written
BARS = 20  # of the histograms
SUGGESTIONS = 50
BASELINE = "supervised"  # folder inside the run, with a run on the labels alone
Figures = dict[str, Any]


def evaluate(
    run: Path | str,
    *,
    only: Sequence[str] | None = None,
    pool: int = POOL,
    device: str | None = None,
    console: Console | None = None,
) -> Figures:
    """Analyse a run; what was found is written to evaluation.json (and pictures.json) too.

    All figures are fractions. only: names of PARTS; None for all but those that train. pool: unlabelled
    images to look at, at most; 0 for all. Embeddings are kept in the run folder, so that a later call needs
    no images; with only=None it looks whether the test set is still the same. Then, too, a part that fails
    is named and left out, as are those that need test images where the data has none.
    """
    run, names = Path(run), _checked(only)
    console = console or Console(stderr=True)
    material = load_material(run, pool=pool, device=device, console=console)
    if only is None:
        material.renew()
    if any(name in NEED_TESTS for name in names) and not (material.embedded.test_labels >= 0).any():
        if only is not None:
            raise ValueError(
                f"the data of {run} has no test images with a class; {', '.join(only)} needs some"
            )
        names = [name for name in names if name not in NEED_TESTS]
    earlier = read_evaluation(run)
    kept = NEED_IMAGES_RESULTS if only is None else earlier
    results = {name: earlier[name] for name in kept if name in earlier}
    seconds = training_seconds(run)
    if seconds is not None:
        results["seconds"] = seconds
    for name in names:
        # Training has a progress bar of its own.
        with contextlib.nullcontext() if name in COSTLY else console.status(f"{name} ..."):
            try:
                results.update(PARTS[name](material, results))
            except Exception as error:
                if only is not None:
                    raise
                line = f"{name} left out: {error}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        write_json(run / EVALUATION, results)  # what takes long is not lost with what comes after
    return results


def _checked(only: Sequence[str] | None) -> list[str]:
    if only is None:
        return [name for name in PARTS if name not in COSTLY]
    for name in only:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise ValueError(f"unknown part {name!r}, did you mean {nearest(name, PARTS)!r}? Known: {known}")
    return [name for name in PARTS if name in only]


def read_evaluation(run: Path) -> Figures:
    """What earlier calls have found; nothing if that is not there or damaged."""
    try:
        found = read_json(run / EVALUATION)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _soft_nn(material: Material, _: Figures) -> Figures:
    """The figures of the paper's tables: accuracy, confidence, calibration, detection."""
    return dict(
        evaluate_soft_nn(
            material.embedded.test,
            material.embedded.test_labels,
            material.support.embeddings,
            material.support.labels,
            classes=material.classes,
            temperature=material.temperature,
        )
    )


def _reliability(material: Material, _: Figures) -> Figures:
    """Bins of confidence and accuracy, and histograms of confidence and in-domain probability."""
    truth = material.embedded.test_labels
    known = truth >= 0
    probs = material.probs(material.embedded.test)
    scores = material.in_domain(material.embedded.test)
    confidence = probs.amax(dim=1)
    kinds = {"in": known, "out": ~known}
    return {
        "reliability": [item._asdict() for item in reliability(probs[known], truth[known])],
        "histograms": {
            name: {
                "confidence": _histogram(confidence[rows]),
                "in_domain": _histogram(scores[rows]),
            }
            for name, rows in kinds.items()
            if rows.any()
        },
        "threshold": material.border.threshold,
    }


def _histogram(values: Tensor) -> list[int]:
    number = (values.double() * BARS).long().clamp(0, BARS - 1)
    counts: list[int] = torch.bincount(number, minlength=BARS).tolist()
    return counts


def _confusion(material: Material, _: Figures) -> Figures:
    truth = material.embedded.test_labels
    known = truth >= 0
    predicted = material.probs(material.embedded.test[known]).argmax(dim=1)
    matrix = confusion_matrix(predicted, truth[known], classes=material.classes)
    accuracies = class_accuracy(matrix)
    found: Figures = {"per_class": dict(zip(material.facts.class_names, accuracies, strict=True))}
    return {"confusion": matrix.tolist(), **found} if material.classes <= MATRIX_CLASSES else found


def _propagation(material: Material, _: Figures) -> Figures:
    """The paper's table: soft-NN, then label propagation among the test images, step by step."""
    table = propagation_table(material, material.embedded.test, material.support.embeddings)
    return {"propagation": table}


def _snapshots(material: Material, _: Figures) -> Figures:
    """The same over training, from the weights that train.keep_every has kept."""
    rows = [_at_snapshot(material, steps, path) for steps, path in snapshots(material.run).items()]
    return {"over_training": rows} if rows else {}


def propagation_table(material: Material, test: Tensor, support: Tensor) -> list[Figures]:
    """A row for each number of iterations; 0 is the plain soft-NN, None the fixed point."""
    truth = material.embedded.test_labels
    kernel = material.kernel(LabeledEmbeddings(support, material.support.labels))
    plain = predict_probs(
        test,
        support,
        material.support.labels,
        classes=material.classes,
        temperature=material.temperature,
    )
    rows = [{"iterations": 0, **_figures(plain, truth)}]
    for iterations in ITERATIONS:
        posterior = pool_posterior(
            test,
            support,
            material.votes,
            kernel,
            iterations=iterations,
            voters=ALL_VOTE,
            memory=MEMORY,
        )
        rows.append({"iterations": iterations, **_figures(posterior.probs, truth)})
    return rows


def _figures(probs: Tensor, truth: Tensor) -> Figures:
    known = truth >= 0
    confidence, predicted = probs.max(dim=1)
    found = {
        "accuracy": float((predicted[known] == truth[known]).double().mean()),
        "confidence_in": float(confidence[known].double().mean()),
    }
    if not known.all():
        found["confidence_out"] = float(confidence[~known].double().mean())
    return found


def _at_snapshot(material: Material, steps: int, path: Path) -> Figures:
    trained = load_run(material.run, device=material.device, snapshot=path)
    corpus = material.corpus
    test = trained.embed(corpus.test_images)
    support = trained.embed(corpus.train_images, material.facts.split.indices)
    known = material.embedded.test_labels >= 0
    found: Figures = {"steps": steps, "propagation": propagation_table(material, test, support)}
    if not known.all():
        found["auroc"] = detection(max_similarity(test, support), known).auroc
    return found


def _baselines(material: Material, _: Figures) -> Figures:
    """Other classifiers on the same embedding: what of the result is the embedding's merit?

    With very many labels those that would take hours are left out.
    """
    truth = material.embedded.test_labels
    known = truth >= 0
    queries, truth = material.embedded.test[known], truth[known]
    support, labels = material.support
    pool = material.embedded.pool
    predictions = {"knn": torch.from_numpy(knn_predictions(support, labels, queries))}
    if len(labels) * material.classes <= MOST_WORK:
        predictions["logistic"] = torch.from_numpy(logistic_predictions(support, labels, queries))
    if len(labels) <= SSKDE_POINTS:
        some = pool[choose_voters(len(pool), SSKDE_POINTS)]
        density = fit_sskde(support, labels, some, classes=material.classes)
        predictions["sskde"] = density(queries).argmax(dim=1)
    found = {name: float((guess == truth).double().mean()) for name, guess in predictions.items()}
    return {"baselines": found}


def _pool(material: Material, _: Figures) -> Figures:
    """What the unlabelled images look like; and, where the truth is known, how right that is."""
    embedded = material.embedded
    if len(embedded.pool) == 0:
        return {}
    probs = material.probs(embedded.pool)
    scores = material.in_domain(embedded.pool)
    inside = scores >= material.border.threshold
    confidence, predicted = probs.max(dim=1)
    names = material.facts.class_names
    counts = torch.bincount(predicted[inside], minlength=material.classes).tolist()
    found: Figures = {
        "size": int(embedded.pool_size),
        "seen": len(embedded.pool),
        "threshold": material.border.threshold,
        "out_of_class": float((~inside).double().mean()),
        "confidence": float(confidence.double().mean()),
        "classes": dict(zip(names, counts, strict=True)),
        "in_domain": _histogram(scores),
    }
    known = embedded.pool_truth >= 0
    if known.any():
        propagated = pool_posterior(
            embedded.pool, material.support.embeddings, material.votes, material.kernel()
        ).probs
        truth = embedded.pool_truth[known]
        found["known"] = int(known.sum())
        found["accuracy"] = float((predicted[known] == truth).double().mean())
        found["accuracy_propagated"] = float((propagated.argmax(dim=1)[known] == truth).double().mean())
    told = embedded.pool_truth != HIDDEN
    out = embedded.pool_truth == OUT
    if known.any() and out.any():
        found["truly_out_of_class"] = float(out[told].double().mean())
        similarity = max_similarity(embedded.pool[told], material.support.embeddings)
        found.update(detection(similarity, ~out[told])._asdict())
    return {"pool": found}


def _labels(material: Material, _: Figures) -> Figures:
    """The labels themselves: leave-one-out accuracy, and those that their neighbours doubt."""
    support, labels = material.support
    if len(labels) < 2:
        return {}
    settings = {"classes": material.classes, "temperature": material.temperature}
    doubts = doubtful_labels(support, labels, **settings)  # type: ignore[arg-type]
    # A class with one label has no other that could agree with it.
    judged = int((torch.bincount(labels, minlength=material.classes)[labels] > 1).sum())
    found: Figures = {"leave_one_out": 1 - len(doubts) / judged} if judged else {}
    names, index = material.facts.class_names, material.facts.split.indices.tolist()
    files = material.facts.labeled_names
    return {
        **found,
        "doubts": [
            {
                "position": item.position,
                "image": index[item.position],
                "name": files[item.position] if files else f"training image {index[item.position]}",
                "label": names[item.label],
                "suspected": names[item.suspected],
                "own": item.own,
                "other": item.other,
            }
            for item in doubts
        ],
    }


def _suggestions(material: Material, _: Figures) -> Figures:
    return {"suggestions": suggestions(material, SUGGESTIONS)}


def _pictures(material: Material, results: Figures) -> Figures:
    """Thumbnails, nearest neighbours and t-SNE, to a file of their own."""
    write_json(material.run / PICTURES, draw_gallery(material, results))
    return {}


def suggest(
    run: Path | str,
    *,
    n: int = SUGGESTIONS,
    pool: int = POOL,
    device: str | None = None,
    console: Console | None = None,
) -> list[Figures]:
    """Unlabelled images most worth a label, best first: rank, image, name, kind, reason ...

    They replace the suggestions of RUN/evaluation.json, and so those of the report.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    material = load_material(run, pool=pool, device=device, console=console)
    found = suggestions(material, n)
    results = read_evaluation(material.run)
    write_json(material.run / EVALUATION, {**results, "suggestions": found})
    try:
        add_thumbnails(material, [item["image"] for item in found])
    except (OSError, ValueError) as error:
        line = f"The report will lack thumbnails of new suggestions: {error}"
        material.console.print(line, highlight=False, markup=False, soft_wrap=True)
    return found


def _supervised(material: Material, _: Figures) -> Figures:
    """The same network, steps and labels without the unlabelled images: what did they bring?

    A run of its own in RUN/supervised; one that was interrupted goes on.
    """
    folder = material.run / BASELINE
    if not (folder / MODEL).exists():
        if (folder / CONFIG).exists():
            resume(folder, console=material.console)
        else:
            config = material.config
            data = replace(config.data, split=material.run / SPLIT, label_fraction=None)
            settings = replace(config.train, keep_every=None)
            train(
                replace(config, method=Supervised(), data=data, train=settings),
                folder,
                console=material.console,
            )
    found = evaluate(
        folder, only=("soft-nn",), pool=material.pool, device=material.device, console=material.console
    )
    return {"supervised": {name: found[name] for name in ("accuracy", "ece", "auroc") if name in found}}


# Each gets the material, and what the parts before it have found.
PARTS: dict[str, Callable[[Material, Figures], Figures]] = {
    "soft-nn": _soft_nn,
    "reliability": _reliability,
    "confusion": _confusion,
    "propagation": _propagation,
    "baselines": _baselines,
    "pool": _pool,
    "labels": _labels,
    "suggestions": _suggestions,
    "snapshots": _snapshots,
    "pictures": _pictures,
    "supervised": _supervised,
}
COSTLY = ("supervised",)  # only when asked for
NEED_TESTS = ("soft-nn", "reliability", "confusion", "propagation", "baselines", "snapshots", "supervised")
NEED_IMAGES_RESULTS = ("over_training", "supervised")
