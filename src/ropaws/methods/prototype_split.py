"""Which images of a pool belong to the known classes, and to which, as a pretrained network sees them."""

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_CHOSEN = -1  # pseudo-label of an image that has none
LBFGS_STEPS, FLAT = 200, 1e-7  # most iterations, and slope of the loss at which they end


def prototypes(embedded: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean of each class as a unit row; zeros without a label.   (l, d), (l,)  ->  (c, d)"""
    one_hot = F.one_hot(labels, classes).to(embedded.dtype)
    return F.normalize(one_hot.T @ embedded, dim=1)


def held_out_scores(embedded: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Highest cosine of each labeled image to a prototype, were it not labeled itself.

    An image that is alone in its class has the prototypes of the other classes left; without any, -inf.
    embedded (l, d) unit rows, labels (l,)  ->  (l,)
    """
    one_hot = F.one_hot(labels, classes).to(embedded.dtype)
    sums, counts = one_hot.T @ embedded, one_hot.sum(dim=0)
    cosines = (embedded @ F.normalize(sums, dim=1).T).masked_fill(counts == 0, -torch.inf)
    own = (embedded * F.normalize(sums[labels] - embedded, dim=1)).sum(dim=1)
    own = own.masked_fill(counts[labels] == 1, -torch.inf)
    return cosines.scatter(1, labels[:, None], own[:, None]).amax(dim=1)


def score_threshold(scores: Tensor, deviations: float) -> float:
    """mean - deviations * standard deviation of labeled images' scores; -1, the least cosine, without any."""
    known = scores[scores.isfinite()]
    if len(known) == 0:
        return -1.0
    return float(known.mean() - deviations * known.std(correction=0))


@torch.enable_grad()  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
def fit_probe(features: Tensor, labels: Tensor, classes: int, *, penalty: float) -> Tensor:
    """Logistic regression by L-BFGS on the CPU in float64; the last row is the bias, without penalty.

    features (l, f), labels (l,)  ->  (f + 1, c)
    """
    rows, labels = _with_one(features.detach().cpu().double()), labels.cpu()
    weights = rows.new_zeros(rows.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=LBFGS_STEPS,
        tolerance_grad=FLAT,
        tolerance_change=FLAT**2,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(rows @ weights, labels) + penalty / 2 * weights[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call, unused-ignore]
    return weights.detach()


def probe_probabilities(features: Tensor, weights: Tensor) -> Tensor:
    """(n, f), (f + 1, c)  ->  (n, c)"""
    return (_with_one(features) @ weights.to(features)).softmax(dim=1)


def top_pseudo_labels(probs: Tensor, eligible: Tensor, share: float) -> Tensor:
    """The likeliest class of the most confident share of the eligible rows, else NOT_CHOSEN.

    probs (n, c), eligible (n,) bool  ->  (n,)
    """
    confidence, classes = probs.max(dim=1)
    count = int(share * int(eligible.sum()))
    chosen = confidence.masked_fill(~eligible, -1.0).topk(count).indices
    labels = torch.full_like(classes, NOT_CHOSEN)
    labels[chosen] = classes[chosen]
    return labels


def _with_one(features: Tensor) -> Tensor:
    return F.pad(features, (0, 1), value=1.0)
