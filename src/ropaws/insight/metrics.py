"""Does a confidence of 80 % mean right in 80 of 100 cases?"""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.core.records import Outputs

BINS = 15


def expected_calibration_error(probs: Tensor, truth: Tensor) -> float:
    """ECE with 15 bins: sum of images |confidence - accuracy| / n.   probs (n, c), truth (n,)

    Confidences of exactly 1 are in one more bin, as in torchmetrics, which all published figures are from.
    """
    counts, confidence, accuracy = _binned(probs, truth, BINS + 1)
    return float((counts * (confidence - accuracy).abs()).sum() / counts.sum())


def _binned(probs: Tensor, truth: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, mean confidence and accuracy of each bin: it holds its lower edge, the last one all above it.

    probs (n, c), truth (n,)  ->  3 x (bins,)
    """
    confidence, predicted = probs.float().max(dim=1)
    edges = torch.linspace(0, 1, BINS + 1, device=confidence.device)
    number = (torch.bucketize(confidence, edges, right=True) - 1).clamp_max(bins - 1)
    counts = torch.bincount(number, minlength=bins)
    confidence, accuracy = (
        torch.bincount(number, weights=values.double(), minlength=bins) / counts.clamp_min(1)
        for values in (confidence, predicted == truth)
    )
    return counts, confidence, accuracy


class Bin(NamedTuple):
    """Predictions of about one confidence."""

    low: float
    high: float
    images: int
    confidence: float  # mean of the bin; 0 if empty
    accuracy: float


def reliability(probs: Tensor, truth: Tensor) -> list[Bin]:
    """The bins of the ECE, with confidences of exactly 1 in the last one.   probs (n, c), truth (n,)"""
    columns = zip(*(values.tolist() for values in _binned(probs, truth, BINS)), strict=True)
    return [Bin(i / BINS, (i + 1) / BINS, *found) for i, found in enumerate(columns)]


RECALL = 0.95  # of in-class images at which FPR95 is taken


class Detection(NamedTuple):
    """How well a score tells in-class from out-of-class images; all from 0 to 1."""

    auroc: float  # 0.5 is guessing
    fpr95: float  # share of out-of-class images let in where 95 % of the in-class ones are
    aupr_in: float  # area under precision and recall, in-class as the positive class
    aupr_out: float  # the same, out-of-class as the positive class


def detection(scores: Tensor, in_class: Tensor) -> Detection:
    """Measure a score on any scale that should be high in-class.   both (n,), both kinds present"""
    # Imported here: loading it takes longer than all the rest of the command line.
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    # By ranks: scikit-learn refuses infinite scores.
    ranks, inside = scores.unique(return_inverse=True)[1].cpu().numpy(), in_class.cpu().numpy()
    false_in, true_in, _ = roc_curve(inside, ranks, drop_intermediate=False)
    return Detection(
        auroc=float(roc_auc_score(inside, ranks)),
        fpr95=float(false_in[true_in >= RECALL].min()),
        aupr_in=float(average_precision_score(inside, ranks)),
        aupr_out=float(average_precision_score(~inside, -ranks)),
    )


def confusion_matrix(predicted: Tensor, truth: Tensor, *, classes: int) -> Tensor:
    """Counts; the row is the true class, the column the predicted one.   both (n,)  ->  (c, c)"""
    return torch.bincount(truth * classes + predicted, minlength=classes**2).reshape(classes, classes)


def class_accuracy(confusion: Tensor) -> list[float | None]:
    """Share of each class's images that are recognized; None for a class without a test image."""
    totals = confusion.sum(dim=1).tolist()
    right = confusion.diagonal().tolist()
    return [r / t if t else None for r, t in zip(right, totals, strict=True)]


BARS = 20


def histogram(values: Tensor) -> list[int]:
    """Counts in bars of equal width; 1 belongs to the last.   (n,)  ->  20 counts"""
    number = (values.double() * BARS).long().clamp(0, BARS - 1)
    counts: list[int] = torch.bincount(number, minlength=BARS).tolist()
    return counts


def accuracy_and_confidence(probs: Tensor, truth: Tensor) -> dict[str, float]:
    """Accuracy and mean confidence on in-class images, and confidence on out-of-class ones if there are any.

    probs (n, c), truth (n,) class or -1 for out-of-class; all figures are fractions
    """
    known = truth >= 0
    if not known.any():
        raise ValueError("no in-class test image to evaluate on; the test set needs labeled images")
    confidence, predicted = probs.max(dim=1)
    found = {
        "accuracy": float((predicted[known] == truth[known]).double().mean()),
        "confidence_in": float(confidence[known].double().mean()),
    }
    if not known.all():
        found["confidence_out"] = float(confidence[~known].double().mean())
    return found


def evaluation_figures(outputs: Outputs, truth: Tensor) -> dict[str, float]:
    """Accuracy and confidence, calibration of in-class images and detection of out-of-class ones.

    outputs of n images, truth (n,) class or -1 for out-of-class
    """
    known = truth >= 0
    found = accuracy_and_confidence(outputs.probs, truth)
    found["ece"] = expected_calibration_error(outputs.probs[known], truth[known])
    if not known.all():
        found["in_domain_auroc"] = detection(outputs.in_domain, known).auroc
        found.update(detection(outputs.score, known)._asdict())
    return found


def balanced_accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Mean share of images that are recognized, over the known classes and the out-of-class images.

    As in IOMatch: C + 1 classes that count alike. A class without a test image does not count.
    both (n,): a class, or OUT_OF_CLASS
    """
    from sklearn.metrics import recall_score

    if not len(truth):
        raise ValueError("no test image to count on")
    true, found = truth.cpu().numpy(), predicted.cpu().numpy()
    return float(recall_score(true, found, labels=truth.unique().tolist(), average="macro"))
