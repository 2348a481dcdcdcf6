"""The content of evaluation.json: types of the results, and reading them back."""

from pathlib import Path
from typing import Any, TypedDict, cast, get_origin, get_type_hints, is_typeddict

from ropaws.core.files import read_json
from ropaws.core.run_layout import EVALUATION, GALLERY


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


class ShareFigures(TypedDict):
    """A share of the pool with the range in which it likely lies.

    Attributes:
        estimate: The share itself.
        low: Lower end of the range.
        high: Upper end of the range.
    """

    estimate: float
    low: float
    high: float


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
        in_class_share: Share that belongs to the classes, as far as the method estimates it.
        share_doubt: How wrong the flag may be, in words, as the share is uncertain; empty where it is not.
        class_prior: How frequent each class is in that part; without it they are taken for equally frequent.
        known: Number of images whose true class is known and among the classes.
        accuracy: Accuracy of their pseudo-labels.
        accuracy_propagated: The same after label propagation through the pool.
        truly_out_of_class: Share of images that are out-of-class.
        in_domain_auroc: AUROC of the in-domain probability, in-class against out-of-class.
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
    in_class_share: ShareFigures
    share_doubt: str
    class_prior: dict[str, ShareFigures]
    known: int
    accuracy: float
    accuracy_propagated: float
    truly_out_of_class: float
    in_domain_auroc: float
    auroc: float
    fpr95: float
    aupr_in: float
    aupr_out: float


class Rival(TypedDict, total=False):
    """One classifier among several on the same images.

    Attributes:
        accuracy: Its accuracy.
        error: Standard error of the accuracy.
        low: Lower end of its exact 90 % interval.
        high: Upper end of it.
        auroc: AUROC of its score, in-class against out-of-class test images.
    """

    accuracy: float
    error: float
    low: float
    high: float
    auroc: float


class FeatureFigures(TypedDict, total=False):
    """The run beside plain classifiers on the features of its backbone.

    Attributes:
        made_from: Fingerprint of the model and the data.
        dims: Number of features.
        frozen: Whether the backbone stayed as it was, so that the features have not seen the labels.
        on: "test" for test images, "labels" for labeled images that were held out.
        images: Number of in-class images.
        own: The run itself; on labels, fitted anew without those that are judged, where that is possible.
        logistic: Logistic regression on the features.
        soft_nn: Soft nearest neighbors on the features.
        gain: Accuracy of the run minus that of logistic regression.
        gain_error: Standard error of the gain, from the images on which the two differ.
    """

    made_from: str
    dims: int
    frozen: bool
    on: str
    images: int
    own: Rival
    logistic: Rival
    soft_nn: Rival
    gain: float
    gain_error: float


class SeriesFigures(TypedDict, total=False):
    """One classifier over labels per class.

    Attributes:
        accuracy: Accuracy for each number of labels, mean over draws.
        error: Standard error of each.
        gain: What the last doubling added.
        gain_error: Standard error of the gain.
    """

    accuracy: list[float]
    error: list[float]
    gain: float
    gain_error: float


class CurveFigures(TypedDict):
    """A learning curve on one set of images.

    Attributes:
        labels_per_class: 1, 2, 4 and so on.
        images: Number of distinct images that were tested on.
        draws: Random choices of labels.
        series: By classifier: logistic, soft_nn.
    """

    labels_per_class: list[int]
    images: int
    draws: int
    series: dict[str, SeriesFigures]


class LearningCurve(TypedDict, total=False):
    """Accuracy over labels per class; a curve is missing where there are too few labels or no images.

    Attributes:
        least: Labels per class that a curve on held-out labels needs.
        test: On test images.
        held_out: On labeled images that were held out.
    """

    least: int
    test: CurveFigures
    held_out: CurveFigures


class LabelError(TypedDict):
    """A suspected label error.

    Attributes:
        position: Among the labeled images.
        image: Among the training images.
        name: File of the image, or its number.
        label: The label as given.
        suspected: The class that the other labeled images speak for.
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


class Suggestion(TypedDict):
    """An unlabeled image that is worth a label."""

    rank: int  # from 1
    image: int  # position among the training images
    name: str  # file, or number
    kind: str  # "in-class"
    reason: str
    in_domain: float  # probability of belonging to any class
    stands_for: int  # images of the pool that it represents


class NewClassFigures(TypedDict):
    """A group of out-of-class images that may be a class of its own.

    Attributes:
        group: Its number, from 1, the largest first.
        size: Number of images.
        nearest: The known class that most of them look like.
        nearest_share: How many of them do.
        images: The most typical ones: positions among the training images.
        names: Files of these, or numbers.
    """

    group: int
    size: int
    nearest: str
    nearest_share: float
    images: list[int]
    names: list[str]


class Evaluation(TypedDict, total=False):
    """The content of evaluation.json. All figures are fractions.

    A part is missing where it was not asked for, or where the data has no images for it.

    Attributes:
        accuracy: Accuracy of in-class test images.
        confidence_in: Mean confidence of in-class test images.
        confidence_out: Mean confidence of out-of-class test images.
        ece: Expected calibration error of in-class test images, 15 bins.
        in_domain_auroc: AUROC of the in-domain probability, in-class against out-of-class test images.
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
        features: The run beside plain classifiers on the features of its backbone.
        learning_curve: Accuracy over labels per class.
        pool: What the unlabeled images look like.
        leave_one_out: Share of the labels that the other labels agree with.
        label_check: How many labels the others contradict, and how many of these chance explains.
        label_errors: Suspected label errors, more than chance explains, the most suspect first.
        suggestions: What to label next, best first.
        new_classes: Groups of out-of-class images, the largest first.
        supervised: Accuracy, ECE and AUROC of the supervised baseline.
    """

    accuracy: float
    confidence_in: float
    confidence_out: float
    ece: float
    in_domain_auroc: float
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
    features: FeatureFigures
    learning_curve: LearningCurve
    pool: PoolFigures
    leave_one_out: float
    label_check: dict[str, float]
    label_errors: list[LabelError]
    suggestions: list[Suggestion]
    new_classes: list[NewClassFigures]
    supervised: dict[str, float]


def read_evaluation(run: Path) -> Evaluation:
    """What earlier calls have found; nothing if that is not there or damaged."""
    try:
        found = read_json(run / EVALUATION, inside=run)
    except (OSError, ValueError):
        return Evaluation()
    kinds = {name: _json_type(hint) for name, hint in get_type_hints(Evaluation).items()}
    items = found.items() if isinstance(found, dict) else ()
    return cast(
        Evaluation, {name: value for name, value in items if isinstance(value, kinds.get(name, object))}
    )


def is_evaluated(run: Path) -> bool:
    """Was the whole of `ropaws evaluate` run, and not a part of it?"""
    return "suggestions" in read_evaluation(run) and (run / GALLERY).exists()


def _json_type(hint: Any) -> Any:
    if hint is float:
        return int | float
    return dict if is_typeddict(hint) else get_origin(hint)
