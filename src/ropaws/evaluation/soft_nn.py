"""The classifier of PAWS and RoPAWS at test time: all labelled images are the support."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws import equations as eq
from ropaws.evaluation.calibration import expected_calibration_error
from ropaws.evaluation.ood import detection, max_similarity


def predict_probs(
    queries: Tensor, support: Tensor, labels: Tensor, *, classes: int, temperature: float, batch: int = 4096
) -> Tensor:
    """Soft nearest-neighbour probabilities in blocks.   queries (n, d), labels (s,)  ->  (n, c)

    Where some classes have more labels than others, each class's density is the mean over its own labels,
    Eq. (4) and (5), as in training, where every support batch is balanced: a class is not likelier because
    it was labelled more often.
    """
    votes = F.one_hot(labels, classes).to(support.dtype)
    blocks = [eq.soft_nn(part, support, votes, temperature=temperature) for part in queries.split(batch)]
    probs = torch.cat(blocks)
    counts = torch.bincount(labels, minlength=classes)
    if (counts == counts[0]).all():
        return probs
    densities = probs / counts.clamp_min(1).to(probs)
    return densities / densities.sum(dim=1, keepdim=True).clamp_min(eq.TINY)


def evaluate_soft_nn(
    queries: Tensor, truth: Tensor, support: Tensor, labels: Tensor, *, classes: int, temperature: float
) -> dict[str, float]:
    """Accuracy and calibration on in-class test images; confidence and detection of the others.

    queries (n, d), truth (n,) class or -1 for out-of-class, support (s, d), labels (s,)
    All figures are fractions; those of out-of-class images are there only if such images are.
    """
    known = truth >= 0
    if not known.any():
        raise ValueError("no in-class test image to evaluate on; the test set needs labelled images")
    probs = predict_probs(queries, support, labels, classes=classes, temperature=temperature)
    confidence, predicted = probs.max(dim=1)
    results = {
        "accuracy": float((predicted[known] == truth[known]).double().mean()),
        "confidence_in": float(confidence[known].double().mean()),
        "ece": expected_calibration_error(probs[known], truth[known]),
    }
    if not known.all():
        results["confidence_out"] = float(confidence[~known].double().mean())
        results.update(detection(max_similarity(queries, support), known)._asdict())
    return results
