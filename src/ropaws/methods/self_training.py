"""Self-training by distillation (Su et al., CVPR 2021): a student learns the soft labels of a fixed teacher.

L = (1 - alpha) CE(w(x)) + alpha T^2 mean_{x, u} KL(softmax(t / T) || softmax(s / T))

t and s are the logits of teacher and student for the same weak view w (flip, shifted crop); the second mean
is over the labeled and the unlabeled images. There is no threshold: a weak teacher's doubt is its protection
against images of no class. The teacher is the averaged network of an earlier run with a linear classifier,
in evaluation mode; most simply one trained with the labels alone:

    ropaws train ... --method cross-entropy --out runs/teacher
    ropaws train ... --method self-training --init runs/teacher/model.safetensors --out runs/student

Defaults are the paper's: alpha 0.7, T 1, a student from random weights, SGD with Nesterov momentum at 0.03,
weight decay 0.001, half a cosine to 0, as many unlabeled as labeled images per step.

Deviations: views are those of FixMatch instead of crops of random size; teacher and student have one
architecture; where the paper starts the student from ImageNet or MoCo weights, `warm_start` starts it from
the teacher's network; tests use a moving average; the labeled batch is balanced over classes. A frozen
backbone always is the teacher's, and the student learns a projection head and a classifier on its features.
There is no detector: the confidence serves as the score of in-class images.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    kl_divergence,
    labeled_cross_entropy,
    row_mean,
)
from ropaws.methods.method import check_positive
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView

AVERAGE = "average.module."  # before the names of the network that predicts, in the weights of a run
TEACHERS = "a run with a linear classifier, such as one of cross-entropy, pseudo-label or fixmatch"


class Teacher(nn.Module):
    """A network with the shape of another. It has no gradient and stays in evaluation mode.

    Its weights are part of the model: checkpoints have them, and a resumed run needs no other file.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = Network(
            copy.deepcopy(network.encoder), {"classes": copy.deepcopy(network.heads["classes"])}
        )
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Teacher":
        """Stays in evaluation mode."""
        super().train(False)
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits of the closed-set classifier.   (n, channels, size, size) or (n, d)  ->  (n, c)"""
        return self.network.logits(self.network(images))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the averaged network of a run; what its classes do not depend on is left out."""
        wanted = {n: v for n, v in self.network.state_dict().items() if n.startswith(self._needed())}
        found = {name: weights[AVERAGE + name] for name in wanted if AVERAGE + name in weights}
        if not any(name.startswith("heads.") for name in found):
            raise ValueError(f"model.init: the weights have no classifier that could teach; name {TEACHERS}")
        misfits = [f"no {name}" for name in wanted if name not in found]
        misfits += [
            f"{name} (has {tuple(found[name].shape)}, needs {tuple(value.shape)})"
            for name, value in wanted.items()
            if name in found and found[name].shape != value.shape
        ]
        if misfits:
            raise ValueError(
                f"model.init: the teacher does not fit this run: {misfits[0]}; teacher and student need the"
                " same classes and the same --model settings"
            )
        self.network.load_state_dict(found, strict=False)

    def _needed(self) -> tuple[str, ...]:
        heads = ("encoder.projection.",) if self.network.encoder.frozen else ()
        return ("encoder.backbone.", "heads.classes.", *heads)


class StudentModel(Averaged):
    """A network that is trained, its moving average, and the teacher of both."""

    def __init__(self, network: Network, decay: float) -> None:
        super().__init__(network, decay)
        self.teacher = Teacher(network)


def distillation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of each row.   logits (n, c)  ->  (n,)"""
    return temperature**2 * kl_divergence(teacher / temperature, student / temperature)


@dataclass(frozen=True, kw_only=True)
class SelfTraining(ClassifierMethod):
    """A student learns labels, and what the classifier of another run (`--init`) says of all images."""

    distillation_share: float = 0.7
    """Share of the teacher in the loss, the rest is that of the labels (alpha)."""
    temperature: float = 1.0
    """Of both predictions where they are compared; higher is softer (T)."""
    warm_start: bool = False
    """Start the student's network, but for its classifier, from the teacher's instead of random weights."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "sgd", "peak": 0.03, "weight_decay": 1e-3}
    init: ClassVar[tuple[str, ...]] = ("teacher",)
    needs_init: ClassVar[str] = f"a teacher: {TEACHERS}"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature")
        if not 0 <= self.distillation_share <= 1:
            raise ValueError(f"method.distillation_share must be from 0 to 1, got {self.distillation_share}")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return {"weak": WeakView(size=augment.size)}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return StudentModel(Network(encoder, self.heads(encoder.trained_dims, classes)), self.ema)

    def start(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        assert isinstance(model, StudentModel)
        model.teacher.load(weights)
        if self.warm_start:
            model.encoder.load_state_dict(model.teacher.network.encoder.state_dict())

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, StudentModel)
        network = model.network
        images = torch.cat([batch.labeled.images, batch.views["weak"]])
        student = network.logits(network(images))
        known = labeled_cross_entropy(student[: len(batch.labeled.classes)], batch.labeled.classes)
        taught = row_mean(distillation(model.teacher(images), student, self.temperature))
        total = (1 - self.distillation_share) * known + self.distillation_share * taught
        return Losses(total, {"cross_entropy": known.detach(), "distillation": taught.detach()})
