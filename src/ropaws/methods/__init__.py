"""Methods: dataclasses that are their own settings, behind one protocol."""

from ropaws.methods.paws import PAWS
from ropaws.methods.protocol import Method, Network
from ropaws.methods.ropaws import RoPAWS
from ropaws.methods.supervised import Supervised

METHODS: dict[str, type[PAWS] | type[RoPAWS] | type[Supervised]] = {
    "paws": PAWS,
    "ropaws": RoPAWS,
    "supervised": Supervised,
}

__all__ = ["METHODS", "PAWS", "Method", "Network", "RoPAWS", "Supervised"]
