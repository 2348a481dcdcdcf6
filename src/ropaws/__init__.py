"""Open-set semi-supervised learning from uncurated data: RoPAWS, PAWS and other methods in PyTorch.

Public names are imported when they are first used, so that `ropaws --help` and worker processes that only
decode images do not load torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from ropaws import equations, recipes
    from ropaws.classify.estimator import RoPAWSClassifier
    from ropaws.embedding.embedder import Embedder, embed
    from ropaws.methods import PAWS, FineTune, Method, RoPAWS, Supervised
    from ropaws.pool.listing import Pool
    from ropaws.run.config import RunConfig
    from ropaws.run.evaluate import evaluate
    from ropaws.run.export_model import export
    from ropaws.run.finetune import finetune
    from ropaws.run.model_card import model_card
    from ropaws.run.own_data import train_on
    from ropaws.run.predict import Prediction, predict
    from ropaws.run.run import Run
    from ropaws.run.suggest import first_suggestions, suggest
    from ropaws.run.train import resume, train

__all__ = [
    "PAWS",
    "Embedder",
    "FineTune",
    "Method",
    "Pool",
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
    "Embedder": "embedding.embedder",
    "FineTune": "methods",
    "Method": "methods",
    "PAWS": "methods",
    "Pool": "pool.listing",
    "Prediction": "run.predict",
    "RoPAWS": "methods",
    "RoPAWSClassifier": "classify.estimator",
    "Run": "run.run",
    "RunConfig": "run.config",
    "Supervised": "methods",
    "embed": "embedding.embedder",
    "evaluate": "run.evaluate",
    "export": "run.export_model",
    "finetune": "run.finetune",
    "first_suggestions": "run.suggest",
    "model_card": "run.model_card",
    "predict": "run.predict",
    "resume": "run.train",
    "suggest": "run.suggest",
    "train": "run.train",
    "train_on": "run.own_data",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"ropaws.{_MODULES[name]}"), name)
    if name in ("equations", "recipes"):
        return importlib.import_module(f"ropaws.{name}")
    raise AttributeError(f"module 'ropaws' has no attribute {name!r}")
