"""Open-set semi-supervised learning from uncurated data: RoPAWS, PAWS and other methods in PyTorch.

Public names are imported when they are first used, so that `ropaws --help` and worker processes that only
decode images do not load torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from ropaws import equations, recipes
    from ropaws.analysis.evaluate import evaluate
    from ropaws.analysis.finetune import finetune
    from ropaws.analysis.suggest import suggest
    from ropaws.config import RunConfig
    from ropaws.estimator import RoPAWSClassifier
    from ropaws.methods import PAWS, FineTune, Method, RoPAWS, Supervised
    from ropaws.own_data import train_on
    from ropaws.prediction.embed import embed
    from ropaws.prediction.export_model import export
    from ropaws.prediction.first_suggestions import first_suggestions
    from ropaws.prediction.model_card import model_card
    from ropaws.prediction.predict import Prediction, predict
    from ropaws.runs.run import Run
    from ropaws.training.train import resume, train

__all__ = [
    "PAWS",
    "FineTune",
    "Method",
    "Prediction",
    "RoPAWS",
    "RoPAWSClassifier",
    "Run",
    "RunConfig",
    "Supervised",
    "__version__",
    "embed",
    "equations",
    "evaluate",
    "export",
    "finetune",
    "first_suggestions",
    "model_card",
    "predict",
    "recipes",
    "resume",
    "suggest",
    "train",
    "train_on",
]

_MODULES = {
    "FineTune": "methods",
    "Method": "methods",
    "PAWS": "methods",
    "Prediction": "prediction.predict",
    "RoPAWS": "methods",
    "RoPAWSClassifier": "estimator",
    "Run": "runs.run",
    "RunConfig": "config",
    "Supervised": "methods",
    "embed": "prediction.embed",
    "evaluate": "analysis.evaluate",
    "export": "prediction.export_model",
    "finetune": "analysis.finetune",
    "first_suggestions": "prediction.first_suggestions",
    "model_card": "prediction.model_card",
    "predict": "prediction.predict",
    "resume": "training.train",
    "suggest": "analysis.suggest",
    "train": "training.train",
    "train_on": "own_data",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"ropaws.{_MODULES[name]}"), name)
    if name in ("equations", "recipes"):
        return importlib.import_module(f"ropaws.{name}")
    raise AttributeError(f"module 'ropaws' has no attribute {name!r}")
