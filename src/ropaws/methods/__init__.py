"""Methods: one file each. A method is a frozen dataclass that is its own settings, below one base class.

Their classes are imported when they are first used: a run needs one of them.
"""

import importlib
from typing import TYPE_CHECKING

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.methods.method import Method, encoder_of
from ropaws.methods.registry import CLASSES, METHODS, import_method, make_method, method_class, method_name

if TYPE_CHECKING:
    from ropaws.methods.byol import BYOL
    from ropaws.methods.ccssl import CCSSL
    from ropaws.methods.cross_entropy import CrossEntropy
    from ropaws.methods.ds3l import DS3L
    from ropaws.methods.fine_tune import FineTune
    from ropaws.methods.fixmatch import FixMatch
    from ropaws.methods.iomatch import IOMatch
    from ropaws.methods.moco_v2 import MoCoV2
    from ropaws.methods.mpl import MPL
    from ropaws.methods.opencos import OpenCoS
    from ropaws.methods.openmatch import OpenMatch
    from ropaws.methods.paws import PAWS
    from ropaws.methods.prosub import ProSub
    from ropaws.methods.pseudo_label import PseudoLabel
    from ropaws.methods.realmix import RealMix
    from ropaws.methods.ropaws import RoPAWS
    from ropaws.methods.self_training import SelfTraining
    from ropaws.methods.simclr import SimCLR
    from ropaws.methods.supervised import Supervised
    from ropaws.methods.swav import SwAV
    from ropaws.methods.uasd import UASD
    from ropaws.methods.uda import UDA

__all__ = [
    "BYOL",
    "CCSSL",
    "DS3L",
    "METHODS",
    "MPL",
    "PAWS",
    "UASD",
    "UDA",
    "CrossEntropy",
    "FineTune",
    "FixMatch",
    "IOMatch",
    "LabeledEmbeddings",
    "Method",
    "MoCoV2",
    "OpenCoS",
    "OpenMatch",
    "ProSub",
    "PseudoLabel",
    "RealMix",
    "RoPAWS",
    "SelfTraining",
    "SimCLR",
    "Supervised",
    "SwAV",
    "encoder_of",
    "import_method",
    "make_method",
    "method_class",
    "method_name",
]


def __getattr__(name: str) -> object:
    for method, kind in CLASSES.items():
        if name == kind:
            return METHODS[method]
        if name == method.replace("-", "_"):  # the module
            return importlib.import_module(f"ropaws.methods.{name}")
    raise AttributeError(f"module 'ropaws.methods' has no attribute {name!r}")
