"""What can be benchmarked: a method by its name, or several phases of which each starts from the last.

With it the data of a benchmark, and the settings that all methods share there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropaws import recipes
from ropaws.classify import head
from ropaws.classify.logistic import fit_logistic
from ropaws.core.features import Features
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, nearest
from ropaws.core.optimizers import OptimConfig
from ropaws.core.randomness import SupportConfig
from ropaws.embedding.backbones import LITE, PRETRAINED, ModelConfig, cached_view
from ropaws.embedding.pretrained import NETWORKS, known_name
from ropaws.insight.baselines import fit_sskde
from ropaws.insight.held_out import TEMPERATURE, soft_nn_probs
from ropaws.methods import BYOL, METHODS, FineTune, Method, RealMix, RoPAWS, make_method
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.corpus import Corpus, in_memory, resized
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.run.config import RunConfig, TrainConfig
from ropaws.run.outputs import pool_truth
from ropaws.run.own_data import HEAD_METHOD, HEAD_OPTIM

PRETRAINING = 0.8  # share of the budget that a self-supervised phase takes
# Methods that need another run first, with the share of the budget of each phase.
PHASES: dict[str, tuple[tuple[str, float], ...]] = {
    "byol": (("byol", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
    "moco-v2": (("moco-v2", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
    "opencos": (("simclr", 0.5), ("opencos", 0.5)),
    "self-training": (("cross-entropy", 0.3), ("self-training", 0.7)),
    "simclr": (("simclr", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
    "swav": (("swav", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
}
VARIANTS: dict[str, Method] = {
    "linear-probe": FineTune(linear=True),
    "ropaws-paper": RoPAWS(prior_temperature=0.1),
}
# Settings of short runs that differ from a method's own defaults, chosen on 20 classes of CIFAR-100 with
# others in the pool; not those of protocols, which train as long as the papers.
SHORT_RUNS: dict[str, Method] = {
    "byol": BYOL(predictor_hidden=512),  # the paper's 4,096 is for features of 512 and more
    "realmix": RealMix(unlabeled_weight=5.0),  # the paper's 75 is for a million steps
}


class Phase(NamedTuple):
    """A training run of an entry."""

    name: str
    method: Method
    share: float  # of the budget


Judge = Callable[[Tensor, Tensor, Tensor, int], Callable[[Tensor], Tensor]]
MOST_POOL = 5000  # rows of the pool that a kernel density estimate takes, evenly chosen


def _some(pool: Tensor) -> Tensor:
    return pool[:: max(1, -(-len(pool) // MOST_POOL))]


def _soft_nn(labeled: Tensor, labels: Tensor, _pool: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    return lambda rows: soft_nn_probs(labeled, labels, rows, classes, temperature=TEMPERATURE)


def _logistic(labeled: Tensor, labels: Tensor, _pool: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    return fit_logistic(labeled, labels, classes=classes).__call__


def _label_spreading(
    labeled: Tensor, labels: Tensor, pool: Tensor, classes: int
) -> Callable[[Tensor], Tensor]:
    """With a graph of 10 neighbors, on features the best of scikit-learn's semi-supervised classifiers."""
    from sklearn.semi_supervised import LabelSpreading  # slow to load

    some = _some(pool)
    known = torch.cat([labels, torch.full((len(some),), UNLABELED)]).numpy()
    model = LabelSpreading(kernel="knn", n_neighbors=min(10, len(known)), max_iter=100)
    with np.errstate(all="ignore"):  # a row that no label reaches is divided by zero
        model.fit(torch.cat([labeled, some]).numpy(), known)

    def probs(rows: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            found = torch.from_numpy(model.predict_proba(rows.numpy()))
        return found.nan_to_num(1 / classes)

    return probs


def _sskde(bandwidth: Literal["flat", "median"]) -> Judge:
    return lambda labeled, labels, pool, classes: (
        fit_sskde(labeled, labels, _some(pool), classes=classes, bandwidth=bandwidth).__call__
    )


# Classifiers without training. In: unit rows of the labeled images, their labels, unit rows of the pool,
# number of classes. Out: a function from unit rows to class probabilities.
JUDGES: dict[str, Judge] = {
    "label-spreading": _label_spreading,
    "logistic": _logistic,
    "soft-nn": _soft_nn,
    "sskde": _sskde("flat"),
    "sskde-median": _sskde("median"),
}


def phases_of(name: str, *, frozen: bool, given: Mapping[str, Method] | None = None) -> list[Phase]:
    """The phases of an entry. `first>second` trains the second method from the weights of the first.

    given: settings of a protocol, by method; then there are no short runs, and no settings for them.
    """
    if ">" in name:
        first, *rest = name.split(">")
        parts = [(first, PRETRAINING), *((part, (1 - PRETRAINING) / len(rest)) for part in rest)]
    else:
        parts = list(PHASES.get(name, ((name, 1.0),)))
    return [Phase(part, _method(part, frozen, given), share) for part, share in parts]


def _method(name: str, frozen: bool, given: Mapping[str, Method] | None) -> Method:
    if given is not None and name in given:
        return given[name]
    if name == "ropaws":  # with the improvements that the docs describe
        return HEAD_METHOD if frozen else recipes.scratch().method
    known = VARIANTS | (SHORT_RUNS if given is None else {})
    return known[name] if name in known else make_method(name)


def known_entries() -> list[str]:
    return sorted({*METHODS, *VARIANTS, *JUDGES})


def plain_name(name: str) -> str:
    """moco_v2 is moco-v2; names of a user's own stay."""
    return ">".join(part if ":" in part else part.replace("_", "-") for part in name.split(">"))


def check_entries(names: Sequence[str], *, frozen: bool) -> None:
    """Raise an error for a name that is not known, or cannot run there."""
    for name in map(plain_name, names):
        if not all(name.split(">")):
            raise ValueError(f"--methods: {name!r} must be METHOD>METHOD, such as simclr>fixmatch")
        for part in name.split(">"):
            if ":" in part:
                make_method(part)  # its errors
            elif part in JUDGES and (part != name or not frozen):
                raise ValueError(
                    f"--methods: {part} works on features alone; it needs --network pretrained, and no phases"
                )
            elif part not in known_entries():
                close = nearest(part.lower(), known_entries())
                raise ValueError(
                    f"--methods: unknown method {part!r}, did you mean {close!r}?"
                    f" Known: {', '.join(known_entries())}, or FIRST>SECOND"
                )
        first = phases_of(name, frozen=frozen)[0] if name not in JUDGES else None
        if first is not None and first.method.needs_init:
            raise ValueError(f"--methods: {first.name} in {name} needs {first.method.needs_init}")


class Network(NamedTuple):
    """The network of a benchmark: trained from scratch, or one whose frozen features all heads see."""

    name: str = "small"  # trained from scratch; "pretrained" is EfficientNet-Lite0; or a pretrained network
    init: Path = PRETRAINED  # the weights of a pretrained one

    @property
    def frozen(self) -> bool:
        return self.name != "small"

    @property
    def backbone(self) -> str:
        return LITE if self.name == "pretrained" else self.name

    @property
    def size(self) -> int:
        """Pixels per side of the views that a pretrained network sees."""
        row = NETWORKS.get(known_name(self.backbone))
        return FEATURE_SIZE if row is None or self.backbone == LITE else row.cpu_size


SUPPORT_ROWS = 80  # labeled views per step
FEATURE_SIZE = 96  # pixels per side of the views of EfficientNet-Lite0


class Task(NamedTuple):
    """Images to learn from and to test on."""

    name: str
    corpus: Corpus  # its last test images are out-of-class ones of kinds that are not in the pool
    unseen: int  # how many
    in_class: Tensor  # (n,) bool, which training images belong to a known class


@dataclass(frozen=True)
class Data:
    """Where the images of a task come from."""

    source: str
    """A named dataset or mix, or an .npz file in which class -1 is out-of-class; such a file may hold
    `unseen_images` too."""
    unseen: tuple[Path, ...] = ()  # .npz files of images of no class, for testing alone
    root: Path = Path("data")  # folder of named datasets

    @property
    def name(self) -> str:
        return Path(self.source).stem if self.source.endswith(".npz") else self.source

    def config(self) -> DataConfig:
        return DataConfig(source=self.source, root=self.root)

    def load(self) -> Task:
        corpus = load_corpus(self.config())
        if isinstance(corpus.train_images, Features):
            raise ValueError(f"--data: {self.source} holds features, and methods are compared on images")
        truth = pool_truth(corpus, self.config())
        in_class = truth >= 0  # of a file of its own: what has no class is out-of-class
        extra = [_read_unseen(path, "images", corpus) for path in self.unseen]
        if self.source.endswith(".npz"):
            with np.load(self.source, allow_pickle=False) as arrays:
                has_own = "unseen_images" in arrays
            extra += [_read_unseen(Path(self.source), "unseen_images", corpus)] if has_own else []
        unseen = sum(len(images) for images in extra)
        tests = torch.cat([in_memory(corpus.test_images), *extra])
        labels = torch.cat([corpus.test_labels, torch.full((unseen,), OUT_OF_CLASS)])
        return Task(self.name, corpus._replace(test_images=tests, test_labels=labels), unseen, in_class)


def _read_unseen(path: Path, name: str, corpus: Corpus) -> Tensor:
    """Images of no class, of kinds that are not in the pool.   ->  (k, channels, h, w)"""
    if not path.is_file():
        raise FileNotFoundError(f"--unseen: no file at {path}; it is an .npz with `images` (n, h, w, 3)")
    with np.load(path, allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays[name]) if name in arrays else torch.empty(0)
    if images.dtype != torch.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (1,), (3,)):
        raise ValueError(f"--unseen: {path} has no array `{name}` (n, h, w, 3) or (n, h, w) of uint8")
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return resized(images, corpus.train_images.shape[1:])


def base_config(
    task: Task, data: DataConfig, network: Network, *, labels: int, steps: int, views: int = 4
) -> RunConfig:
    """What all methods share: network, views, labeled batch, batch, length; as RoPAWS has them.

    views: random ones of each image, on frozen features
    """
    classes, pool = len(task.corpus.class_names), len(task.corpus.train_images)
    if network.frozen:
        return RunConfig(
            model=ModelConfig(
                backbone=network.backbone,
                init=network.init,
                frozen=True,
                frozen_views=views,
                head="linear",
                projection_dims=head.DIMS,
            ),
            data=data,
            augment=cached_view(network.size, "bicubic"),
            support=head.head_support([labels] * classes),
            optim=HEAD_OPTIM,
            train=TrainConfig(
                steps=steps, batch=min(head.BATCH, pool // 2), checkpoint_every=max(100, steps)
            ),
        )
    base, size = recipes.scratch(), min(task.corpus.train_images.shape[2:])
    augment = base.augment
    if size != augment.size:
        small = max(8, round(0.6 * size))
        augment = AugmentConfig(size=size, small_crops=2, small_size=small, solarize=0.0, equalize=0.0)
    images = min(labels, 8)
    support_views = max(1, round(SUPPORT_ROWS / (classes * images)))
    return replace(
        base,
        data=data,
        augment=augment,
        support=SupportConfig(images_per_class=images, views=support_views),
        train=replace(base.train, steps=steps, batch=min(base.train.batch, pool // 2)),
    )


def warmed(optim: OptimConfig, steps: int) -> OptimConfig:
    """Set a warm-up of a tenth of the steps, where there is one at all."""
    return replace(optim, warmup=steps // 10) if optim.warmup else optim
