"""The figures of the paper's tables: accuracy, confidence, calibration, detection."""

from torch import Tensor

from ropaws.batch import Outputs
from ropaws.evaluation.calibration import expected_calibration_error
from ropaws.evaluation.ood import detection


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
    """The same, with the calibration of in-class images and the detection of out-of-class ones.

    outputs of n images, truth (n,) class or -1 for out-of-class
    """
    known = truth >= 0
    found = accuracy_and_confidence(outputs.probs, truth)
    found["ece"] = expected_calibration_error(outputs.probs[known], truth[known])
    if not known.all():
        found["in_domain_auroc"] = detection(outputs.in_domain, known).auroc
        found.update(detection(outputs.score, known)._asdict())
    return found
