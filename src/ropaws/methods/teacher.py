"""A classifier of an earlier run that teaches and is not trained itself."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ropaws.methods.classifier import Averaged, Network

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


class Taught(Averaged):
    """A network that is trained, its moving average, and the teacher of both."""

    def __init__(self, network: Network, decay: float) -> None:
        super().__init__(network, decay)
        self.teacher = Teacher(network)
