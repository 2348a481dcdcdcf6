"""Methods by name: those of this package, and those of a user's own as `package.module:Class`."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator, Mapping

from ropaws.core.labels import nearest
from ropaws.methods.method import Method

# The class of each method, in the module of its name.
CLASSES = {
    "byol": "BYOL",
    "ccssl": "CCSSL",
    "cross-entropy": "CrossEntropy",
    "ds3l": "DS3L",
    "fine-tune": "FineTune",
    "fixmatch": "FixMatch",
    "iomatch": "IOMatch",
    "moco-v2": "MoCoV2",
    "mpl": "MPL",
    "opencos": "OpenCoS",
    "openmatch": "OpenMatch",
    "paws": "PAWS",
    "prosub": "ProSub",
    "pseudo-label": "PseudoLabel",
    "realmix": "RealMix",
    "ropaws": "RoPAWS",
    "self-training": "SelfTraining",
    "simclr": "SimCLR",
    "supervised": "Supervised",
    "swav": "SwAV",
    "uasd": "UASD",
    "uda": "UDA",
}


class _Methods(Mapping[str, type[Method]]):
    """The methods of this package by name. A method is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[Method]:
        kind: type[Method] = getattr(importlib.import_module(_module(name)), CLASSES[name])
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(CLASSES)

    def __len__(self) -> int:
        return len(CLASSES)


def _module(name: str) -> str:
    return f"ropaws.methods.{name.replace('-', '_')}"


METHODS = _Methods()


def method_name(method: Method) -> str:
    """The name of a method in METHODS, or `package.module:Class`."""
    kind = type(method)
    place = (kind.__module__, kind.__qualname__)
    known = next((name for name, known in CLASSES.items() if place == (_module(name), known)), None)
    return known or f"{kind.__module__}:{kind.__qualname__}"


def make_method(name: str) -> Method:
    """A method by its name, with its defaults.

    A run folder may come from a stranger. A name in it must not make this process import a module: a method
    that is not of this package has to be imported before, or by `import_method`.
    """
    try:
        return method_class(name)()
    except TypeError as error:
        raise ValueError(f"method {name!r}: every setting needs a default ({error})") from None


def method_class(name: str) -> type[Method]:
    """The class of a method by its name; see make_method. moco_v2 is moco-v2."""
    if (known := name.replace("_", "-")) in CLASSES:
        return METHODS[known]
    module, _, attribute = name.partition(":")
    if not attribute:
        listed = ", ".join(METHODS)
        raise ValueError(
            f"unknown method {name!r}, did you mean {nearest(name, METHODS)!r}?"
            f" Known: {listed}, or package.module:Class"
        )
    if module not in sys.modules:
        raise ValueError(
            f"method {name!r} is not part of ropaws and is not imported because a run folder names it;"
            f" repeat it on the command line (--method {name}), or import {module} first"
        )
    kind = getattr(sys.modules[module], attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Method) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"method {name!r}: {module} has no dataclass {attribute!r} below ropaws.Method")
    return kind


def import_method(name: str) -> None:
    """Import the module of a method that a person has named; looked for in the current folder too."""
    module, _, attribute = name.partition(":")
    if not attribute or module in sys.modules:
        return
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a module of the user's raises
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"method {name!r}: {module} cannot be imported ({reason})") from None
    finally:
        sys.path.remove(os.getcwd())
