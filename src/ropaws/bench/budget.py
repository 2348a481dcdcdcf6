"""How long each method trains, so that all see the same number of images."""

from ropaws.config import RunConfig
from ropaws.data.augment import View
from ropaws.methods import Method


def images_per_step(config: RunConfig, method: Method, classes: int) -> float:
    """Views that the network sees in a step, in images of full size: a small crop counts by its pixels.

    Features of cached views count as one image each. A second network of a method (a teacher, a target) does
    not count: it is a cost that seconds show.
    """
    large = config.augment.size
    unlabeled = sum(
        _share(view, large, config.model.frozen) for view in method.views(config.augment).values()
    )
    support = config.support
    labeled = (support.classes or classes) * support.images_per_class * support.views
    return config.train.batch * unlabeled + (labeled if method.uses_labels else 0)


def _share(view: View, large: int, frozen: bool) -> float:
    size = getattr(view, "size", large)
    return 1.0 if frozen else float(size * size) / (large * large)


def steps_for(config: RunConfig, method: Method, classes: int, images: float, *, reference: int) -> int:
    """Steps in which a method sees so many images.

    Without unlabeled images at most twice the steps of the reference: a few labels are learned long before.
    """
    steps = max(1, round(images / images_per_step(config, method, classes)))
    return steps if method.views(config.augment) else min(steps, 2 * reference)
