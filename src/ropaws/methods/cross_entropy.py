"""Labels only: the supervised baseline of the FixMatch family (Sohn et al., NeurIPS 2020).

L = CE(w(x))

w is a weak view (flip, shifted crop). The network, its optimizer and the moving average are those of the
other classifiers of the family, so the difference to them is what the unlabeled images are worth. A run of
it may be the teacher of `self-training`.

Deviations: the labeled batch is balanced over classes; the average warms up (methods/classifier.py). No
image is rejected in training: the confidence serves as the score of in-class images.
"""

from dataclasses import dataclass

from torch import nn

from ropaws.core.records import Batch, Losses
from ropaws.methods.classifier import Averaged, ClassifierMethod, labeled_cross_entropy


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(ClassifierMethod):
    """A linear classifier that learns from weak views of the labeled images alone."""

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Averaged)
        logits = model.network.logits(model.network(batch.labeled.images))
        loss = labeled_cross_entropy(logits, batch.labeled.classes)
        return Losses(loss, {"cross_entropy": loss.detach()})
