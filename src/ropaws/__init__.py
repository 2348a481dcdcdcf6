"""Robust semi-supervised learning from uncurated data: PAWS and RoPAWS in PyTorch.

Public names are imported when they are first used: worker processes that only decode pictures, and
`ropaws --help`, need not load torch.
"""

import importlib
from typing import TYPE_CHECKING

from ropaws.version import __version__

if TYPE_CHECKING:
    from ropaws import equations, recipes
    from ropaws.analysis import evaluate, suggest
    from ropaws.config import RunConfig
    from ropaws.estimator import RoPAWSClassifier
    from ropaws.in_python import train_on
    from ropaws.labeling import Prediction, predict
    from ropaws.methods import PAWS, RoPAWS, Supervised
    from ropaws.run import resume, train
    from ropaws.tuning import finetune

__all__ = [
    "PAWS",
    "Prediction",
    "RoPAWS",
    "RoPAWSClassifier",
    "RunConfig",
    "Supervised",
    "__version__",
    "equations",
    "evaluate",
    "finetune",
    "predict",
    "recipes",
    "resume",
    "suggest",
    "train",
    "train_on",
]

_HOME = {
    "PAWS": "methods",
    "Prediction": "labeling",
    "RoPAWS": "methods",
    "RoPAWSClassifier": "estimator",
    "RunConfig": "config",
    "Supervised": "methods",
    "evaluate": "analysis",
    "finetune": "tuning",
    "predict": "labeling",
    "resume": "run",
    "suggest": "analysis",
    "train": "run",
    "train_on": "in_python",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"ropaws.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"ropaws.{name}")
    raise AttributeError(f"module 'ropaws' has no attribute {name!r}")
