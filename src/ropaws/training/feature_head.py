"""How a head on features is trained, in runs and in the estimator alike.

The numbers won on data that is in no table: `python benchmarks/head_trials.py`, docs/features.md.
"""

from collections.abc import Sequence

from ropaws.data.augment import AugmentConfig
from ropaws.data.image_ops import Interpolation
from ropaws.data.samplers import SupportConfig
from ropaws.methods import RoPAWS
from ropaws.training.optim import OptimConfig

METHOD = RoPAWS(prior="pool", sharpen_temperature=0.5)
OPTIM = OptimConfig(name="adam", peak=1e-3, start=1e-3, end=0.0, warmup=0, weight_decay=0.0)
STEPS = 300
BATCH = 256
DIMS = 256  # principal components that the head starts as
RANDOM_VIEWS = 4  # of each image, computed once
SUPPORT_VIEWS = 4
SUPPORT_IMAGES = 80  # labeled images per step to aim for
MOST_PER_CLASS = 16
MOST_CLASSES = 100  # per step


def cached_view(size: int, interpolation: Interpolation) -> AugmentConfig:
    """The random views whose features are kept: all of one size, as small crops take theirs from them too."""
    return AugmentConfig(
        size=size,
        scale=(0.5, 1.0),
        small_crops=2,
        small_size=size,
        small_scale=(0.5, 1.0),
        solarize=0.0,
        equalize=0.0,
        interpolation=interpolation,
    )


def head_support(counts: Sequence[int], *, views: int = SUPPORT_VIEWS) -> SupportConfig:
    """The labeled batch that suits these numbers of labels per class."""
    classes = min(len(counts), MOST_CLASSES)
    typical = sorted(counts)[len(counts) // 2]
    images = max(1, min(MOST_PER_CLASS, typical, SUPPORT_IMAGES // classes))
    return SupportConfig(
        classes=None if classes == len(counts) else classes, images_per_class=images, views=views
    )
