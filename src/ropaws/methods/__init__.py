"""Methods: one file each. A method is a frozen dataclass that is its own settings, below one base class."""

from ropaws.methods.fine_tune import FineTune
from ropaws.methods.fixmatch import FixMatch
from ropaws.methods.method import Method, encoder_of
from ropaws.methods.paws import PAWS
from ropaws.methods.registry import METHODS, import_method, make_method, method_class, method_name
from ropaws.methods.ropaws import RoPAWS
from ropaws.methods.soft_nn import LabeledEmbeddings
from ropaws.methods.supervised import Supervised

__all__ = [
    "METHODS",
    "PAWS",
    "FineTune",
    "FixMatch",
    "LabeledEmbeddings",
    "Method",
    "RoPAWS",
    "Supervised",
    "encoder_of",
    "import_method",
    "make_method",
    "method_class",
    "method_name",
]
