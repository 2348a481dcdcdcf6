"""Robust semi-supervised learning from uncurated data: PAWS and RoPAWS in PyTorch."""

from ropaws import equations, recipes
from ropaws.config import RunConfig
from ropaws.methods import PAWS, RoPAWS, Supervised
from ropaws.run import evaluate, resume, train
from ropaws.version import __version__

__all__ = [
    "PAWS",
    "RoPAWS",
    "RunConfig",
    "Supervised",
    "__version__",
    "equations",
    "evaluate",
    "recipes",
    "resume",
    "train",
]
