"""One function a published run; its docstring says what to expect and what it costs."""

from collections.abc import Callable
from dataclasses import replace

from ropaws.config import RunConfig, TrainConfig
from ropaws.data.augment import AugmentConfig
from ropaws.data.samplers import SupportConfig
from ropaws.data.sources import DataConfig
from ropaws.methods import RoPAWS
from ropaws.models import ModelConfig
from ropaws.naming import nearest
from ropaws.training.optim import OptimConfig


def demo() -> RunConfig:
    """Embedded Fashion-MNIST pile, 5 classes, half of it out-of-class, 4 labels a class.

    Two minutes on two CPU cores; `ropaws demo` compares the methods on it, and the README has figures.
    """
    return RunConfig(
        method=RoPAWS(prior_temperature="auto", typical_prior=0.4, reweight_entropy=True),
        model=ModelConfig(backbone="small"),
        data=DataConfig(source="fashion-demo", labels_per_class=4),
        augment=AugmentConfig(size=28, small_crops=2, small_size=18),
        support=SupportConfig(images_per_class=4, views=4),
        optim=OptimConfig(start=0.4, peak=1.6, end=0.016, warmup=40),
        train=TrainConfig(steps=400, batch=128, checkpoint_every=50),
    )


def cifar10_4() -> RunConfig:
    """CIFAR-10, 4 labels a class. Paper: RoPAWS 88.7 +- 2.2 %, PAWS 85.7 +- 2.4 %.

    WRN-28-2, 600 epochs = 117,000 steps of 256, 8 views: about a day on one current GPU.
    """
    return _cifar10(labels_per_class=4, images_per_class=4, views=32)


def cifar10_25() -> RunConfig:
    """CIFAR-10, 25 labels a class. Paper: RoPAWS 94.7 +- 0.3 %, PAWS 92.4 +- 2.1 %.

    WRN-28-2, 600 epochs = 117,000 steps of 256, 8 views: about a day on one current GPU.
    """
    return _cifar10(labels_per_class=25, images_per_class=16, views=8)


def cifar10_400() -> RunConfig:
    """CIFAR-10, 400 labels a class. Paper: RoPAWS 95.7 +- 0.2 %, PAWS 95.1 +- 0.5 %.

    WRN-28-2, 600 epochs = 117,000 steps of 256, 8 views: about a day on one current GPU.
    """
    return _cifar10(labels_per_class=400, images_per_class=64, views=2)


def _cifar10(*, labels_per_class: int, images_per_class: int, views: int) -> RunConfig:
    """The common part; the support always has 1280 rows."""
    epoch = 50_000 // 256
    return RunConfig(
        method=RoPAWS(prior_temperature=0.1),
        model=ModelConfig(backbone="wrn-28-2"),
        data=DataConfig(source="cifar10", labels_per_class=labels_per_class),
        augment=AugmentConfig(),
        support=SupportConfig(images_per_class=images_per_class, views=views),
        optim=OptimConfig(start=0.8, peak=3.2, end=0.032, warmup=10 * epoch),
        train=TrainConfig(steps=600 * epoch, batch=256),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "cifar10-4": cifar10_4,
    "cifar10-25": cifar10_25,
    "cifar10-400": cifar10_400,
}


def get(name: str) -> RunConfig:
    """The config of a recipe."""
    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}, did you mean {nearest(name, RECIPES)!r}? See `ropaws recipes`"
        )
    return RECIPES[name]()


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=seed))
