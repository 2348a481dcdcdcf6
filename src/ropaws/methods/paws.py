"""PAWS (Assran et al., 2021): views of an image agree on soft nearest-neighbor predictions."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ropaws import equations as eq
from ropaws.classify.propagation import Kernel
from ropaws.classify.soft_nn import (
    LabeledEmbeddings,
    anchor_predictions,
    batch_class_prior,
    gather_support,
    global_mean,
)
from ropaws.core.records import Batch, Losses
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.methods.pool_calibration import JudgedMethod
from ropaws.methods.simclr import with_contrast
from ropaws.methods.supervised import with_supervision
from ropaws.pool.augment import AugmentConfig, View


@dataclass(frozen=True, kw_only=True)
class PAWS(JudgedMethod):
    """PAWS: trusts the nearest labels, also for images that belong to no class."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    sharpen_temperature: float = 0.25
    """Of the targets; lower is sharper."""
    label_smoothing: float = 0.1
    """Share of a support's label that is spread over all classes."""
    contrast_weight: float = 0.0
    """Weight of a contrastive loss beside: the two large views of an image attract, all others repel. Not in
    the paper; for short training from scratch, see docs/method.md."""
    contrast_temperature: float = 0.2
    """Of the contrastive loss."""
    supervised_weight: float = 0.0
    """Weight of the loss of the supervised baseline beside. Not in the paper; for training from scratch."""

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "sharpen_temperature", "contrast_temperature")
        check_share(self, "label_smoothing")
        check_weight(self, "contrast_weight", "supervised_weight")
        self.check_class_prior(pool=self.judge == "pool")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return augment.multi_crop()

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        supports, first, second, *crops = model([batch.labeled.images, *batch.views.values()])
        known = gather_support(supports, batch.labeled, self.label_smoothing)
        anchors = anchor_predictions([first, second, *crops], known.z, known.labels, self.temperature)
        with torch.no_grad():
            targets = torch.stack(
                [
                    eq.soft_nn(view.h, known.h, known.labels, temperature=self.temperature)
                    for view in (first, second)
                ]
            )
        mean = global_mean(anchors, None, self.sharpen_temperature)
        losses = eq.paws_loss(
            anchors,
            targets,
            sharpen_temperature=self.sharpen_temperature,
            mean=mean,
            class_prior=batch_class_prior(self.trained_class_prior(model), known.labeled),
        )
        losses = with_supervision(losses, known, weight=self.supervised_weight, temperature=self.temperature)
        return with_contrast(
            losses, first.z, second.z, weight=self.contrast_weight, temperature=self.contrast_temperature
        )

    def kernel(self, support: LabeledEmbeddings) -> Kernel:
        return Kernel(temperature=self.temperature, prior_temperature=self.in_domain_temperature(support))
