"""Every method beside PAWS and RoPAWS with settings for the tiny data: all of them keep the same promises.

tests/methods/test_rivals.py and tests/test_distributed.py go through this table.
"""

from dataclasses import dataclass, field
from typing import Any

from ropaws.methods import Method
from ropaws.methods.fixmatch import FixMatch


@dataclass(frozen=True)
class Rival:
    """A method, the run that it starts from, and how it learns the tiny data."""

    method: Method
    teacher: Method | None = None  # of a run that `--init` names
    optim: dict[str, Any] = field(default_factory=dict)  # other optimizer settings than the method's own
    steps: int = 60  # in which it learns the tiny data


RIVALS = {
    "fixmatch": Rival(FixMatch(confidence=0.6)),
}
