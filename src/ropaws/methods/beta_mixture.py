"""A mixture of two Beta distributions of scores in (0, 1): one of known classes, one of everything else.

Its parameters follow the scores of training by the method of moments. Everything is computed in float64 on
the CPU: for narrow distributions the logarithm of the gamma function loses its digits in float32.
"""

import torch
from torch import Tensor, nn

EDGE = 1e-4  # scores stay so far from 0 and 1, where densities may be infinite
LEAST_VARIANCE = 1e-6


def beta_density(scores: Tensor, shape: Tensor) -> Tensor:
    """x^(a - 1) (1 - x)^(b - 1) / B(a, b).   scores (n,), shape (2,) = a, b  ->  (n,)"""
    a, b = shape
    x = scores.clamp(EDGE, 1 - EDGE)
    scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    logarithm: Tensor = scale + (a - 1) * x.log() + (b - 1) * (-x).log1p()
    return logarithm.exp()


def beta_of_moments(scores: Tensor, weights: Tensor) -> Tensor:
    """The Beta distribution with the weighted mean m and variance v of scores.   both (n,)  ->  (2,) = a, b

    a = m (m (1 - m) / v - 1),  b = (1 - m) (m (1 - m) / v - 1); uniform where all weights are 0.
    """
    total = weights.sum()
    if total <= 0:
        return scores.new_ones(2)
    x = scores.clamp(EDGE, 1 - EDGE)
    mean = (weights * x).sum() / total
    variance = ((weights * (x - mean).square()).sum() / total).clamp_min(LEAST_VARIANCE)
    both = mean * (1 - mean) / variance - 1
    return torch.stack([mean * both, (1 - mean) * both])


def inside_probability(
    scores: Tensor, inside: Tensor, outside: Tensor, *, prior: float, doubt: float = 1e-8
) -> Tensor:
    """pi f1 / (pi f1 + (1 - pi) f2 + doubt): with doubt it is small where neither density is large.

    scores (n,), inside and outside (2,)  ->  (n,)
    """
    known, other = prior * beta_density(scores, inside), (1 - prior) * beta_density(scores, outside)
    return known / (known + other + doubt)


class BetaMixture(nn.Module):
    """The two distributions, as buffers; they start as Beta(10, 2) and Beta(2, 10)."""

    inside: Tensor
    outside: Tensor

    def __init__(self, prior: float) -> None:
        super().__init__()
        self.prior = prior
        self.register_buffer("inside", torch.tensor([10.0, 2.0]))
        self.register_buffer("outside", torch.tensor([2.0, 10.0]))

    @torch.no_grad()
    def forward(self, scores: Tensor, *, doubt: float = 1e-8) -> Tensor:
        """Probability of belonging to a known class.   (n,)  ->  (n,)"""
        found = inside_probability(
            _wide(scores), _wide(self.inside), _wide(self.outside), prior=self.prior, doubt=doubt
        )
        return found.to(scores)

    @torch.no_grad()
    def update(self, labeled: Tensor, unlabeled: Tensor, decay: float) -> None:
        """Move towards the moments of scores, weighted by what they belong to.   (s,), (u,) of all processes

        decay: share of the present parameters that is kept
        """
        probs = self(unlabeled)
        scores = torch.cat([labeled, unlabeled])
        inside = beta_of_moments(_wide(scores), _wide(torch.cat([torch.ones_like(labeled), probs])))
        outside = beta_of_moments(_wide(unlabeled), _wide(1 - probs))
        self.inside.lerp_(inside.to(self.inside), 1 - decay)
        self.outside.lerp_(outside.to(self.outside), 1 - decay)


def _wide(values: Tensor) -> Tensor:
    return values.detach().cpu().double()
