"""What can be benchmarked: a method by its name, or several phases of which each starts from the last."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from ropaws import recipes
from ropaws.evaluation.held_out import TEMPERATURE, soft_nn_probs
from ropaws.evaluation.logistic import fit_logistic
from ropaws.evaluation.sskde import fit_sskde
from ropaws.methods import BYOL, METHODS, FineTune, Method, RealMix, RoPAWS, make_method
from ropaws.naming import nearest
from ropaws.training import feature_head

PRETRAINING = 0.8  # share of the budget that a self-supervised phase takes
# Methods that need another run first, with the share of the budget of each phase.
PHASES: dict[str, tuple[tuple[str, float], ...]] = {
    "byol": (("byol", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
    "moco-v2": (("moco-v2", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
    "mpl": (("mpl", 0.9), ("fine-tune", 0.1)),  # as the paper ends
    "opencos": (("simclr", 0.5), ("opencos", 0.5)),
    "self-training": (("cross-entropy", 0.3), ("self-training", 0.7)),
    "simclr": (("simclr", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
    "swav": (("swav", PRETRAINING), ("fine-tune", 1 - PRETRAINING)),
}
# Settings that differ from a method's own defaults, chosen on 20 classes of CIFAR-100 with others in the
# pool.
VARIANTS: dict[str, Method] = {
    "byol": BYOL(predictor_hidden=512),  # the paper's 4,096 is for features of 512 and more
    "linear-probe": FineTune(linear=True),
    "realmix": RealMix(unlabeled_weight=5.0),  # the paper's 75 is for runs of a million steps
    "ropaws-paper": RoPAWS(prior_temperature=0.1),
}


class Phase(NamedTuple):
    """A training run of an entry."""

    name: str
    method: Method
    share: float  # of the budget


Judge = Callable[[Tensor, Tensor, Tensor, int], Callable[[Tensor], Tensor]]
MOST_POOL = 5000  # rows of the pool that a kernel density estimate takes, evenly chosen


def _some(pool: Tensor) -> Tensor:
    return pool[:: max(1, -(-len(pool) // MOST_POOL))]


def _soft_nn(labeled: Tensor, labels: Tensor, _pool: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    return lambda rows: soft_nn_probs(labeled, labels, rows, classes, temperature=TEMPERATURE)


def _logistic(labeled: Tensor, labels: Tensor, _pool: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    return fit_logistic(labeled, labels, classes=classes).__call__


def _sskde(bandwidth: Literal["flat", "median"]) -> Judge:
    return lambda labeled, labels, pool, classes: (
        fit_sskde(labeled, labels, _some(pool), classes=classes, bandwidth=bandwidth).__call__
    )


# Classifiers without training. In: unit rows of the labeled images, their labels, unit rows of the pool,
# number of classes. Out: a function from unit rows to class probabilities.
JUDGES: dict[str, Judge] = {
    "logistic": _logistic,
    "soft-nn": _soft_nn,
    "sskde": _sskde("flat"),
    "sskde-median": _sskde("median"),
}


def phases_of(name: str, *, frozen: bool) -> list[Phase]:
    """The phases of an entry. `first>second` trains the second method from the weights of the first."""
    if ">" in name:
        first, *rest = name.split(">")
        parts = [(first, PRETRAINING), *((part, (1 - PRETRAINING) / len(rest)) for part in rest)]
    else:
        parts = list(PHASES.get(name, ((name, 1.0),)))
    return [Phase(part, _method(part, frozen=frozen), share) for part, share in parts]


def _method(name: str, *, frozen: bool) -> Method:
    if name == "ropaws":  # with the improvements that the docs describe
        return feature_head.METHOD if frozen else recipes.demo().method
    return VARIANTS[name] if name in VARIANTS else make_method(name)


def known_entries() -> list[str]:
    return sorted({*METHODS, *VARIANTS, *JUDGES})


def check_entries(names: Sequence[str], *, frozen: bool) -> None:
    """Raise an error for a name that is not known, or cannot run there."""
    for name in names:
        if not all(name.split(">")):
            raise ValueError(f"--methods: {name!r} must be METHOD>METHOD, such as simclr>fixmatch")
        for part in name.replace("_", "-").split(">"):
            if ":" not in part and part not in known_entries():
                close = nearest(part, known_entries())
                raise ValueError(
                    f"--methods: unknown method {part!r}, did you mean {close!r}?"
                    f" Known: {', '.join(known_entries())}, or FIRST>SECOND"
                )
        if name in JUDGES and not frozen:
            raise ValueError(f"--methods: {name} works on features; it needs --network pretrained")
