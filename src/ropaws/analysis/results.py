"""The content of evaluation.json: types of the results, and reading them back."""

from pathlib import Path
from typing import Any, TypedDict, cast, get_origin, get_type_hints, is_typeddict

from ropaws.analysis.suggest import Suggestion
from ropaws.runs.atomic import read_json
from ropaws.runs.layout import EVALUATION


class PropagationRow(TypedDict, total=False):
    """Label propagation among the test images after some iterations.

    Attributes:
        iterations: Number of iterations; 0 is the plain classifier, None the fixed point.
        accuracy: Accuracy of in-class test images.
        confidence_in: Mean confidence of in-class test images.
        confidence_out: Mean confidence of out-of-class test images.
    """

    iterations: int | None  # 0 is the plain classifier, None the fixed point
    accuracy: float
    confidence_in: float
    confidence_out: float


class PoolFigures(TypedDict, total=False):
    """What the unlabeled images look like. From `known` on: only where the truth is known.

    Attributes:
        size: Number of unlabeled images.
        seen: How many of them were looked at.
        threshold: In-domain probability below which an image is out-of-class.
        out_of_class: Share of images below the threshold.
        confidence: Mean confidence.
        classes: Number of images above the threshold that look like each class.
        in_domain: Histogram of the in-domain probability, 20 bins from 0 to 1.
        known: Number of images whose true class is known and among the classes.
        accuracy: Accuracy of their pseudo-labels.
        accuracy_propagated: The same after label propagation through the pool.
        truly_out_of_class: Share of images that are out-of-class.
        auroc: AUROC of the score, in-class against out-of-class.
        fpr95: False positive rate at 95 % true positive rate.
        aupr_in: Area under the precision-recall curve, in-class as positive.
        aupr_out: The same, out-of-class as positive.
    """

    size: int
    seen: int
    threshold: float
    out_of_class: float
    confidence: float
    classes: dict[str, int]
    in_domain: list[int]
    known: int
    accuracy: float
    accuracy_propagated: float
    truly_out_of_class: float
    auroc: float
    fpr95: float
    aupr_in: float
    aupr_out: float


class LabelError(TypedDict):
    """A suspected label error.

    Attributes:
        position: Among the labeled images.
        image: Among the training images.
        name: File of the image, or its number.
        label: The label as given.
        suspected: The class that the other labeled images vote for.
        own: Probability of the given label.
        other: Probability of the suspected class.
    """

    position: int
    image: int
    name: str
    label: str
    suspected: str
    own: float
    other: float


class Evaluation(TypedDict, total=False):
    """The content of evaluation.json. All figures are fractions.

    A part is missing where it was not asked for, or where the data has no images for it.

    Attributes:
        accuracy: Accuracy of in-class test images.
        confidence_in: Mean confidence of in-class test images.
        confidence_out: Mean confidence of out-of-class test images.
        ece: Expected calibration error of in-class test images, 15 bins.
        auroc: AUROC of the score, in-class against out-of-class test images.
        fpr95: False positive rate at 95 % true positive rate.
        aupr_in: Area under the precision-recall curve, in-class as positive.
        aupr_out: The same, out-of-class as positive.
        seconds: Seconds of training.
        reliability: Confidence, accuracy and count of each bin of the reliability diagram.
        histograms: Confidence and in-domain probability of in-class and out-of-class test images, 20 bins.
        threshold: In-domain probability below which an image is out-of-class.
        confusion: Counts, true class by predicted class; up to 100 classes.
        per_class: Accuracy of each class.
        propagation: Label propagation among the test images, by number of iterations.
        over_training: The same for each kept snapshot.
        baselines: Accuracy of other classifiers on the embedding: knn, logistic, sskde.
        pool: What the unlabeled images look like.
        leave_one_out: Share of the labels that the other labels agree with.
        label_errors: Suspected label errors, the clearest first.
        suggestions: What to label next, best first.
        supervised: Accuracy, ECE and AUROC of the supervised baseline.
    """

    accuracy: float
    confidence_in: float
    confidence_out: float
    ece: float
    auroc: float
    fpr95: float
    aupr_in: float
    aupr_out: float
    seconds: float
    reliability: list[dict[str, float]]
    histograms: dict[str, dict[str, list[int]]]
    threshold: float
    confusion: list[list[int]]
    per_class: dict[str, float | None]
    propagation: list[PropagationRow]
    over_training: list[dict[str, Any]]
    baselines: dict[str, float]
    pool: PoolFigures
    leave_one_out: float
    label_errors: list[LabelError]
    suggestions: list[Suggestion]
    supervised: dict[str, float]


def read_evaluation(run: Path) -> Evaluation:
    """What earlier calls have found; nothing if that is not there or damaged."""
    try:
        found = read_json(run / EVALUATION)
    except (OSError, ValueError):
        return Evaluation()
    kinds = {name: _json_type(hint) for name, hint in get_type_hints(Evaluation).items()}
    items = found.items() if isinstance(found, dict) else ()
    return cast(
        Evaluation, {name: value for name, value in items if isinstance(value, kinds.get(name, object))}
    )


def _json_type(hint: Any) -> Any:
    if hint is float:
        return int | float
    return dict if is_typeddict(hint) else get_origin(hint)
