"""MPL, Meta Pseudo Labels (Pham et al., CVPR 2021): a teacher that hears how its pseudo-labels were received.

L = CE(S(s(u)), argmax q) + CE(T(w(x))) + lambda(t) mean_u 1[max q >= tau] H(q, T(s(u))) + h CE(T(s(u)), y^)
    with q = softmax(T(w(u)) / temperature), y^ = argmax T(s(u)), h = CE(S_before(w(x))) - CE(S_after(w(x)))

The first term trains the student S, on hard pseudo-labels of all rows; the others train the teacher T, with
UDA's consistency and the feedback h: the labels of the teacher are reinforced where a step of the student on
them lowers its loss on labeled images. Nothing flows from one network to the other. The moving average of
the student predicts. The final fine-tuning on labels is another run: `ropaws finetune`.
Defaults are the paper's for CIFAR-10: tau 0.6, temperature 0.7, lambda 8 after a linear ramp over 5,000 of
300,000 steps, label smoothing 0.15 of the labels and of the student's targets, a student that waits 3,000
steps, SGD with Nesterov momentum at 0.05, average 0.995. 128 labeled and 896 unlabeled images per step.

Cost: a second network with forward and backward pass, and two forward passes of the labeled rows: about two
and a half times FixMatch.

Deviations: one optimizer for both networks, whose step comes last: the step that the feedback measures is
tried with plain SGD of a fixed rate, before and after are measured alike (labeled rows alone, in training
mode), and teacher and student then move together. h is loss before minus loss after, as the theory has it;
the released code has the opposite sign (a setting). Both networks start with the same backbone. Ramp and
wait are shares of the run; the rate has no warm-up; no dropout before the classifier, as all chance is a
function of the step; RandAugment is that of FixMatch. Confidence serves as the score of in-class images.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.distributed import all_mean
from ropaws.core.records import Batch, Losses, Support
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    Tensors,
    handed_over,
    labeled_cross_entropy,
    linear_ramp,
    logits_with,
    masked_mean,
    sharpened,
    slopes_of,
    soft_cross_entropy,
    stepped,
    trained_weights,
    weak_and_strong,
)
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View


def improvement(student: Network, moved: Tensors, labeled: Support) -> Tensor:
    """How much lower the loss on labeled images is with the moved weights; the same in every process."""
    with torch.no_grad():
        before, after = (
            labeled_cross_entropy(logits_with(student, weights, labeled.images), labeled.classes)
            for weights in ({}, moved)
        )
        return all_mean(before - after)


class StudentTeacher(Averaged):
    """The student as `network`, its average, the teacher, and the mean of the feedback so far."""

    baseline: Tensor

    def __init__(self, student: Network, teacher: Network, decay: float) -> None:
        super().__init__(student, decay)
        self.teacher = teacher
        self.register_buffer("baseline", torch.zeros(()))


@dataclass(frozen=True, kw_only=True)
class MPL(ClassifierMethod):
    """A student learns a teacher's pseudo-labels; the teacher learns from how the student does."""

    confidence: float = 0.6
    """Probability, after sharpening, from which the teacher's own consistency counts (tau)."""
    temperature: float = 0.7
    """Of the teacher's targets; lower is sharper."""
    consistency_weight: float = 8.0
    """Weight of the teacher's consistency after the ramp (lambda)."""
    ramp: float = 1 / 60
    """Share of the run in which that weight grows linearly."""
    smoothing: float = 0.15
    """Label smoothing of labels and of what the student learns."""
    student_wait: float = 0.01
    """Share of the run in which the teacher learns alone."""
    trial_rate: float = 0.05
    """Learning rate of the student's step that the feedback measures."""
    feedback_sign: Literal[1, -1] = 1
    """1: labels that helped the student are reinforced. -1: the released code's sign."""
    baseline: float | None = None
    """Subtract a moving average from the feedback, and keep this share of it at each step, such as 0.99."""
    ema: float = 0.995
    """Share of the moving average of the student that is kept at each step; tests use the average."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "sgd", "peak": 0.05, "weight_decay": 5e-4}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "confidence", "ramp", "smoothing", "student_wait")
        check_positive(self, "temperature", "trial_rate")
        check_weight(self, "consistency_weight")
        if self.feedback_sign not in (1, -1):
            raise ValueError(f"method.feedback_sign must be 1 or -1, got {self.feedback_sign}")
        if self.baseline is not None:
            check_share(self, "baseline")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return weak_and_strong(augment)

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        student, teacher = (
            Network(own, self.heads(own.trained_dims, classes)) for own in (encoder, copy.deepcopy(encoder))
        )
        return StudentTeacher(student, teacher, self.ema)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, StudentTeacher)
        teacher, strong_images = model.teacher, batch.views["strong"]
        features = teacher.features(batch.labeled.images, batch.views["weak"], strong_images)
        labeled, weak, strong = map(teacher.logits, features)
        known = labeled_cross_entropy(labeled, batch.labeled.classes, smoothing=self.smoothing)
        targets = sharpened(weak, self.temperature)
        sure = (targets.amax(dim=1) >= self.confidence).to(targets)
        consistency = masked_mean(soft_cross_entropy(targets, strong), sure)
        weight = self.consistency_weight * linear_ramp(batch.step + 1, self.ramp * batch.steps)
        total = known + weight * consistency
        pseudo = feedback = torch.zeros_like(known)
        if batch.step >= self.student_wait * batch.steps:
            pseudo, student_term, feedback = self._student(model, batch, weak.argmax(dim=1))
            own_labels = F.cross_entropy(strong, strong.argmax(dim=1))
            total = total + student_term + self._centered(model, feedback) * own_labels
        parts = {"cross_entropy": known, "consistency": consistency, "student": pseudo, "feedback": feedback}
        return Losses(total, {name: value.detach() for name, value in parts.items()})

    def _student(self, model: StudentTeacher, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The student's loss, a term with its value and gradient, and the feedback.   targets (u,)

        Labeled images go along for batch norm. The gradient is computed once: for the trial, and for the run.
        """
        student = model.network
        _, strong = student.features(batch.labeled.images, batch.views["strong"])
        loss = F.cross_entropy(student.logits(strong), targets, label_smoothing=self.smoothing)
        weights = trained_weights(student)
        slopes = slopes_of(loss, weights)
        moved = stepped(weights, slopes, self.trial_rate)
        feedback = self.feedback_sign * improvement(student, moved, batch.labeled)
        return loss, loss.detach() + handed_over(weights, slopes), feedback

    def _centered(self, model: StudentTeacher, feedback: Tensor) -> Tensor:
        """The feedback without its mean so far, which learns of it."""
        if self.baseline is None:
            return feedback
        centered = feedback - model.baseline
        model.baseline.lerp_(feedback, 1 - self.baseline)
        return centered
