"""The runs of the paper: one function each, whose docstring says what to expect and what it costs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ropaws.core.optimizers import OptimConfig
from ropaws.core.randomness import SupportConfig
from ropaws.embedding.backbones import ModelConfig
from ropaws.methods import RoPAWS
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.sources import DataConfig
from ropaws.run.config import RunConfig, TrainConfig


def demo() -> RunConfig:
    """Embedded Fashion-MNIST pool, 5 classes, half of it out-of-class, 4 labels per class.

    Below two minutes on one CPU core; `ropaws demo` compares the methods on it, and the README has figures.
    """
    base = scratch()
    assert isinstance(base.method, RoPAWS)
    return replace(
        base,
        method=replace(base.method, contrast_weight=1.0, judge="pool"),
        # Two large views that differ much serve the contrast better than small crops do, at less cost.
        augment=replace(base.augment, scale=(0.4, 1.0), small_crops=0),
    )


def scratch() -> RunConfig:
    """Short training of the small network, as `ropaws bench` gives it to all methods; no recipe by name.

    The demo was trained like this until its methods got a contrastive loss; `ropaws bench` keeps it, so that
    its figures stay comparable.
    """
    return RunConfig(
        method=RoPAWS(prior_temperature="auto", typical_prior=0.4, reweight_entropy=True),
        model=ModelConfig(backbone="small"),
        data=DataConfig(source="fashion-demo", labels_per_class=4),
        augment=AugmentConfig(size=28, small_crops=2, small_size=18),
        support=SupportConfig(images_per_class=4, views=4),
        optim=OptimConfig(start=0.4, peak=1.6, end=0.016, warmup=25),
        train=TrainConfig(steps=250, batch=128, checkpoint_every=50),
    )


def cifar10_4() -> RunConfig:
    """CIFAR-10, 4 labels per class. Paper: RoPAWS 88.7 ± 2.2 %, PAWS 85.7 ± 2.4 %.

    WRN-28-2, 600 epochs = 117,000 steps of 256, 8 views: about a day on one current GPU.
    """
    return cifar("cifar10", 50_000, labels_per_class=4)


def cifar10_25() -> RunConfig:
    """CIFAR-10, 25 labels per class. Paper: RoPAWS 94.7 ± 0.3 %, PAWS 92.4 ± 2.1 %.

    WRN-28-2, 600 epochs = 117,000 steps of 256, 8 views: about a day on one current GPU.
    """
    return cifar("cifar10", 50_000, labels_per_class=25)


def cifar10_400() -> RunConfig:
    """CIFAR-10, 400 labels per class. Paper: RoPAWS 95.7 ± 0.2 %, PAWS 95.1 ± 0.5 %.

    WRN-28-2, 600 epochs = 117,000 steps of 256, 8 views: about a day on one current GPU.
    """
    return cifar("cifar10", 50_000, labels_per_class=400)


def cifar10_cifar100_4() -> RunConfig:
    """CIFAR-10 and all of CIFAR-100 as out-of-class, 4 labels per class.

    The paper has no figure for it.
    234,000 steps of 256: twice the cost of cifar10-4, about two days on one current GPU.
    """
    return cifar("cifar10+cifar100", 100_000, labels_per_class=4)


def cifar10_cifar100_25() -> RunConfig:
    """CIFAR-10 and all of CIFAR-100 as out-of-class, 25 labels per class.

    Paper: RoPAWS 85.6 ± 3.0 %, PAWS 78.7 ± 2.9 %.
    234,000 steps of 256: twice the cost of cifar10-25, about two days on one current GPU.
    """
    return cifar("cifar10+cifar100", 100_000, labels_per_class=25)


def cifar10_cifar100_400() -> RunConfig:
    """CIFAR-10 and all of CIFAR-100 as out-of-class, 400 labels per class.

    Paper: RoPAWS 93.9 ± 0.1 %, PAWS 91.2 ± 0.3 %.
    234,000 steps of 256: twice the cost of cifar10-400, about two days on one current GPU.
    """
    return cifar("cifar10+cifar100", 100_000, labels_per_class=400)


def cifar10_tiny_4() -> RunConfig:
    """CIFAR-10 and all of Tiny-ImageNet as out-of-class, 4 labels per class.

    The paper has no figure for it.
    351,000 steps of 256: three times the cost of cifar10-4, about three days on one current GPU.
    """
    return cifar("cifar10+tiny-imagenet", 150_000, labels_per_class=4)


def cifar10_tiny_25() -> RunConfig:
    """CIFAR-10 and all of Tiny-ImageNet as out-of-class, 25 labels per class.

    Paper: RoPAWS 83.1 ± 1.8 %, PAWS 60.4 ± 5.3 %.
    351,000 steps of 256: three times the cost of cifar10-25, about three days on one current GPU.
    """
    return cifar("cifar10+tiny-imagenet", 150_000, labels_per_class=25)


def cifar10_tiny_400() -> RunConfig:
    """CIFAR-10 and all of Tiny-ImageNet as out-of-class, 400 labels per class.

    The paper has no figure for it.
    351,000 steps of 256: three times the cost of cifar10-400, about three days on one current GPU.
    """
    return cifar("cifar10+tiny-imagenet", 150_000, labels_per_class=400)


def cifar10_svhn_4() -> RunConfig:
    """CIFAR-10 and all of SVHN's training set as out-of-class, 4 labels per class.

    The paper has no figure for it.
    288,600 steps of 256: two and a half times the cost of cifar10-4.
    """
    return cifar("cifar10+svhn", 123_257, labels_per_class=4)


def cifar10_svhn_25() -> RunConfig:
    """CIFAR-10 and all of SVHN's training set as out-of-class, 25 labels per class.

    Paper: RoPAWS 81.2 ± 0.4 %, PAWS 47.1 ± 0.4 %.
    288,600 steps of 256: two and a half times the cost of cifar10-25.
    """
    return cifar("cifar10+svhn", 123_257, labels_per_class=25)


def cifar10_svhn_400() -> RunConfig:
    """CIFAR-10 and all of SVHN's training set as out-of-class, 400 labels per class.

    The paper has no figure for it.
    288,600 steps of 256: two and a half times the cost of cifar10-400.
    """
    return cifar("cifar10+svhn", 123_257, labels_per_class=400)


def cifar100_svhn_25() -> RunConfig:
    """CIFAR-100 and all of SVHN's training set as out-of-class, 25 labels per class.

    Paper: RoPAWS 51.5 ± 1.7 %, PAWS 36.9 ± 0.2 %.
    72,000 steps of 1,024 with a support of 12,800: about three days on one current GPU.
    """
    return cifar("cifar100+svhn", 123_257, labels_per_class=25, batch=1024)


def cifar100_tiny_25() -> RunConfig:
    """CIFAR-100 and all of Tiny-ImageNet as out-of-class, 25 labels per class.

    Paper: RoPAWS 59.8 ± 1.3 %, PAWS 46.0 ± 0.5 %.
    87,600 steps of 1,024 with a support of 12,800: about four days on one current GPU.
    """
    return cifar("cifar100+tiny-imagenet", 150_000, labels_per_class=25, batch=1024)


def semi_inat_curated() -> RunConfig:
    """Semi-iNat 2021 with its in-class images, from scratch. Paper: RoPAWS 39.4 %, PAWS 39.2 %.

    ResNet-50 at 224 px, 800 epochs = 19,200 steps of 4,096: the paper used 64 GPUs.
    """
    return _semi_inat("semi-inat-curated", 101_057, epochs=800)


def semi_inat() -> RunConfig:
    """Semi-iNat 2021 with all its unlabeled images, from scratch. Paper: RoPAWS 43.0 %, PAWS 37.7 %.

    ResNet-50 at 224 px, 800 epochs = 62,400 steps of 4,096: the paper used 64 GPUs.
    """
    return _semi_inat("semi-inat", 322_969, epochs=800)


def semi_inat_curated_pretrained() -> RunConfig:
    """Semi-iNat 2021 with its in-class images, from SwAV's weights. Paper: RoPAWS 50.3 %, PAWS 49.7 %.

    ResNet-50 at 224 px, k = 3, 300 epochs = 7,200 steps of 4,096: the paper used 64 GPUs. Put
    swav_800ep_pretrain.pth.tar (github.com/facebookresearch/swav) into data, or name it with --init.
    """
    return _semi_inat("semi-inat-curated", 101_057, epochs=300, init=SWAV)


def semi_inat_pretrained() -> RunConfig:
    """Semi-iNat 2021 with all its unlabeled images, from SwAV's weights. Paper: RoPAWS 44.3 %, PAWS 43.0 %
    (from torchvision's supervised weights 42.4 and 42.0 %).

    ResNet-50 at 224 px, k = 3, 300 epochs = 23,400 steps of 4,096: the paper used 64 GPUs. Put
    swav_800ep_pretrain.pth.tar (github.com/facebookresearch/swav) into data, or name it with --init.
    """
    return _semi_inat("semi-inat", 322_969, epochs=300, init=SWAV)


def imagenet_1() -> RunConfig:
    """ImageNet, 1 % of the labels. Paper, after fine-tuning: RoPAWS 66.9 %, PAWS 66.5 %.

    ResNet-50 at 224 px, 300 epochs = 93,600 steps of 4,096: the paper used 64 GPUs. The split is drawn
    from the seed; the paper's own is a list of file names for --data.split.
    """
    return _imagenet(label_fraction=0.01)


def imagenet_10() -> RunConfig:
    """ImageNet, 10 % of the labels. Paper, after fine-tuning: RoPAWS 75.7 %, PAWS 75.5 %.

    ResNet-50 at 224 px, 300 epochs = 93,600 steps of 4,096: the paper used 64 GPUs. The split is drawn
    from the seed; the paper's own is a list of file names for --data.split.
    """
    return _imagenet(label_fraction=0.1)


SWAV = Path("data/swav_800ep_pretrain.pth.tar")
# labels per class -> images per class and views of each in a support batch, 128 rows per class
CIFAR_SUPPORT = {4: (4, 32), 25: (16, 8), 400: (64, 2)}


def cifar(source: str, pool: int, *, labels_per_class: int, batch: int = 256) -> RunConfig:
    """What the small-scale runs share; an epoch is as long as the pool."""
    epoch = pool // batch
    images, views = CIFAR_SUPPORT[labels_per_class]
    return RunConfig(
        method=RoPAWS(prior_temperature=0.1),
        model=ModelConfig(backbone="wrn-28-2"),
        data=DataConfig(source=source, labels_per_class=labels_per_class),
        augment=AugmentConfig(),
        support=SupportConfig(images_per_class=images, views=views),
        optim=OptimConfig(start=0.8, peak=3.2, end=0.032, warmup=10 * epoch),
        train=TrainConfig(steps=600 * epoch, batch=batch),
    )


def _semi_inat(source: str, pool: int, *, epochs: int, init: Path | None = None) -> RunConfig:
    """All labels that there are; 12 classes for each of 64 processes, 5 images each."""
    config = _large_scale(pool, epochs, power=1.0 if init is None else 3.0)
    return replace(
        config,
        model=replace(config.model, init=init),
        data=DataConfig(source=source, labels_per_class=None, image_size=IMAGE),
        support=SupportConfig(classes=768, images_per_class=5, views=1, unique_classes_per_process=True),
    )


def _imagenet(*, label_fraction: float) -> RunConfig:
    """15 classes for each of 64 processes, 7 images each."""
    return replace(
        _large_scale(1_281_167, epochs=300, power=1.0),
        data=DataConfig(source="imagenet", label_fraction=label_fraction, image_size=IMAGE),
        support=SupportConfig(classes=960, images_per_class=7, views=1, unique_classes_per_process=True),
    )


IMAGE = 256  # pixels per side that are kept of an image, for views of 224


def _large_scale(pool: int, epochs: int, *, power: float) -> RunConfig:
    """ResNet-50 with PAWS's settings for ImageNet."""
    batch = 4096
    epoch = pool // batch
    return RunConfig(
        method=RoPAWS(prior_temperature=3.0, reweight_power=power),
        model=ModelConfig(
            backbone="resnet50", projection_hidden=2048, projection_dims=2048, prediction_hidden=512
        ),
        augment=AugmentConfig(
            size=224,
            scale=(0.14, 1.0),
            small_size=96,
            small_scale=(0.05, 0.14),
            jitter_strength=1.0,
            grayscale=0.2,
            solarize=0.0,
            equalize=0.0,
            blur=0.5,
        ),
        optim=OptimConfig(start=0.3, peak=6.4, end=0.064, warmup=10 * epoch),
        train=TrainConfig(steps=epochs * epoch, batch=batch),
    )


PAPER: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "cifar10-4": cifar10_4,
    "cifar10-25": cifar10_25,
    "cifar10-400": cifar10_400,
    "cifar10-cifar100-4": cifar10_cifar100_4,
    "cifar10-cifar100-25": cifar10_cifar100_25,
    "cifar10-cifar100-400": cifar10_cifar100_400,
    "cifar10-tiny-4": cifar10_tiny_4,
    "cifar10-tiny-25": cifar10_tiny_25,
    "cifar10-tiny-400": cifar10_tiny_400,
    "cifar10-svhn-4": cifar10_svhn_4,
    "cifar10-svhn-25": cifar10_svhn_25,
    "cifar10-svhn-400": cifar10_svhn_400,
    "cifar100-svhn-25": cifar100_svhn_25,
    "cifar100-tiny-25": cifar100_tiny_25,
    "semi-inat-curated": semi_inat_curated,
    "semi-inat": semi_inat,
    "semi-inat-curated-pretrained": semi_inat_curated_pretrained,
    "semi-inat-pretrained": semi_inat_pretrained,
    "imagenet-1": imagenet_1,
    "imagenet-10": imagenet_10,
}
