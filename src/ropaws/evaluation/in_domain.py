"""Does a point belong to any class at all? Temperature of the prior, and threshold, from the labels."""

import math

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.methods.ropaws import auto_prior_temperature

KEPT = 0.95  # share of the labelled points that the threshold takes for in-class
TYPICAL_PRIOR = 0.7  # for runs of methods without a prior of their own
BLOCK = 4096


def nearest_fellow(support: Tensor, labels: Tensor) -> Tensor:
    """Similarity of each labelled point to the nearest other one of its class; none for lone ones.

    support (s, d), labels (s,)  ->  (at most s,)
    """
    found = []
    for rows in torch.arange(len(support)).split(BLOCK):
        same = labels[rows, None] == labels
        same[torch.arange(len(rows)), rows] = False
        found.append(eq.cosine(support[rows], support).masked_fill(~same, -math.inf).amax(dim=1))
    nearest = torch.cat(found)
    return nearest[nearest.isfinite()]


def fitted_prior_temperature(fellows: Tensor, typical_prior: float) -> float:
    """The temperature at which labelled points get the typical prior from one another on average."""
    gap = float((1 - fellows).mean()) if len(fellows) else math.nan
    return auto_prior_temperature(gap, typical_prior)


def default_threshold(fellows: Tensor, prior_temperature: float) -> float:
    """The in-domain probability that 95 % of the labelled points reach, each judged by the others."""
    if len(fellows) == 0:
        return 0.5
    priors = ((fellows - 1).clamp_max(0) / prior_temperature).exp()
    return float(priors.quantile(1 - KEPT))


def in_domain_scores(queries: Tensor, support: Tensor, prior_temperature: float) -> Tensor:
    """Probability of belonging to any class, in blocks.   queries (n, d), support (s, d)  ->  (n,)"""
    parts = [
        eq.in_domain_prior(part, support, temperature=prior_temperature) for part in queries.split(BLOCK)
    ]
    return torch.cat(parts) if parts else queries.new_empty(0)
