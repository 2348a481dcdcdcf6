"""A second set of batch norms for a network, so that images of another kind leave its statistics alone."""

import copy

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ropaws.methods.classifier import Network


class AuxiliaryNorms(nn.Module):
    """Weights and statistics of all batch norms of the trained part, which start as copies of the network's.

    The trained part is the backbone, or the projection head on a frozen one. Without any batch norm there, as
    in a linear head or a transformer, the network is called as it is.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        part = "projection" if network.encoder.frozen else "backbone"
        norms = {
            f"encoder.{part}.{name}": copy.deepcopy(module)
            for name, module in network.encoder.get_submodule(part).named_modules()
            if isinstance(module, _BatchNorm)
        }
        # Names of modules have no dots. As modules they are synchronized between processes like the others.
        self.norms = nn.ModuleDict({name.replace(".", "/"): norm for name, norm in norms.items()})

    def forward(self, network: Network, images: Tensor) -> Tensor:
        """Features by the network with these norms, whose statistics it updates.   ->  (n, d)"""
        own = {
            f"{name.replace('/', '.')}.{key}": value
            for name, norm in self.norms.items()
            for key, value in (*norm.named_parameters(), *norm.named_buffers())
        }
        features: Tensor = functional_call(network, own, (images,))
        return features
