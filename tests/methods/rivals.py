"""Every method beside PAWS and RoPAWS with settings for the tiny data: all of them keep the same promises.

tests/methods/test_rivals.py and tests/test_distributed.py go through this table.
"""

from dataclasses import dataclass, field
from typing import Any

from ropaws.methods import Method
from ropaws.methods.byol import BYOL
from ropaws.methods.ccssl import CCSSL
from ropaws.methods.cross_entropy import CrossEntropy
from ropaws.methods.ds3l import DS3L
from ropaws.methods.fixmatch import FixMatch
from ropaws.methods.iomatch import IOMatch
from ropaws.methods.moco_v2 import MoCoV2
from ropaws.methods.mpl import MPL
from ropaws.methods.opencos import OpenCoS
from ropaws.methods.openmatch import OpenMatch
from ropaws.methods.prosub import ProSub
from ropaws.methods.pseudo_label import PseudoLabel
from ropaws.methods.realmix import RealMix
from ropaws.methods.self_training import SelfTraining
from ropaws.methods.simclr import SimCLR
from ropaws.methods.swav import SwAV
from ropaws.methods.uasd import UASD
from ropaws.methods.uda import UDA


@dataclass(frozen=True)
class Rival:
    """A method, the run that it starts from, and how it learns the tiny data."""

    method: Method
    teacher: Method | None = None  # of a run that `--init` names
    optim: dict[str, Any] = field(default_factory=dict)  # other optimizer settings than the method's own
    steps: int = 60  # in which it learns the tiny data


RIVALS = {
    "byol": Rival(BYOL(predictor_hidden=64)),
    "ccssl": Rival(CCSSL(confidence=0.5, push=0.4)),
    "cross-entropy": Rival(CrossEntropy()),
    "ds3l": Rival(DS3L(), steps=40),
    "fixmatch": Rival(FixMatch(confidence=0.6)),
    "iomatch": Rival(IOMatch(confidence=0.6, alignment=8)),
    "moco-v2": Rival(MoCoV2()),
    "mpl": Rival(MPL(confidence=0.5, consistency_weight=1.0, student_wait=0.1, ema=0.9)),
    "opencos": Rival(OpenCoS(confidence=0.4, deviations=0.5, top_share=0.3), teacher=SimCLR()),
    "openmatch": Rival(OpenMatch(fixmatch_start=0.0)),
    "prosub": Rival(ProSub(confidence=0.6, self_weight=1.0)),
    "pseudo-label": Rival(PseudoLabel(confidence=0.45)),
    "realmix": Rival(RealMix(unlabeled_weight=5.0)),
    "self-training": Rival(SelfTraining(), teacher=CrossEntropy()),
    "simclr": Rival(SimCLR()),
    "swav": Rival(SwAV(prototypes=12)),
    "uasd": Rival(UASD()),
    "uda": Rival(UDA(confidence=0.45, annealing="linear")),
}
