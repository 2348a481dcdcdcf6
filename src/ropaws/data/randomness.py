"""Every random choice is a function of the seed, its purpose and the step.

So a run can be continued at any step without having saved the state of a generator, and changing
how much randomness one purpose takes does not move the others.
"""

import numpy as np
import torch

# Purposes. Numbers, not names: they are part of what a seed means and must not change.
SPLIT, POOL_ORDER, SUPPORT, VIEWS, SUPPORT_VIEWS, POOL, FINE_TUNE, ANALYSIS, LABELED_ORDER = range(9)
FROZEN_VIEWS = 9
METHOD = 10
POOL_SAMPLE = 11


def generator(seed: int, purpose: int, step: int = 0) -> torch.Generator:
    """A CPU generator for one purpose at one step."""
    return torch.Generator().manual_seed(step_seed(seed, purpose, step))


def step_seed(seed: int, purpose: int, step: int) -> int:
    """A seed for one purpose at one step."""
    state = np.random.SeedSequence([seed, purpose, step]).generate_state(1, np.uint64)[0]
    return int(state >> np.uint64(1))
