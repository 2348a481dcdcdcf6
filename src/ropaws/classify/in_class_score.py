"""How much a point looks like the known classes: a score that the labels and the pool give together.

It is made of features that have not been fitted to the labels, so that a labeled image, judged by the other
labels, looks like any in-class image of the pool. Three pieces of evidence, each standardized over the pool:
the ratio of the densities of labels and pool, which is local; the similarity to the nearest class mean, which
hears all labels of a class; and the similarity to class means that in-class images of the pool have joined,
which matters most with one label per class (Boudiaf et al. 2023, OSLO).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws import equations as eq
from ropaws.classify.soft_nn import in_blocks

DENSITY_TEMPERATURE = 0.2  # of both densities, on centered unit features
SAME = 1e-4  # distance by cosine below which two rows show one image
BLOCK_BYTES = 1 << 25
MOST_FOLDS = 64  # of the labels, each judged by the other folds
MANY_LABELS, FEW_FOLDS = 1000, 10  # and of more labels than that
MANY_CLASSES, FEWEST_FOLDS = 2000, 4  # and of more classes than that, where a fold takes seconds
# Of the refinement, as in OSLO but for the weight of labels.
ROUNDS = 2
INLIER_TEMPERATURE = 0.05
CLASS_TEMPERATURE = 0.1
LABEL_WEIGHT = 5.0  # of a label against an image of the pool that is in-class for sure, as r in the paper
REFINED_TEMPERATURE = 0.2  # of the soft maximum over classes
EVIDENCE = 3
# Of the density in raw measurements and small images, against class means: benchmarks/small_data.py
FEW_DIMS, DENSITY_WEIGHT = 65, 3.0


class Labeled(NamedTuple):
    """Labeled points; unit rows."""

    points: Tensor  # (l, d)
    classes: Tensor  # (l,) class of each
    class_count: int
    class_prior: Tensor | None = None  # (c,) how frequent each class is in the pool; None: all alike

    @property
    def log_prior(self) -> Tensor | None:
        """log(c p(y)) over the c classes that have labels, so that equal classes get 0; None for these."""
        if self.class_prior is None:
            return None
        present = torch.bincount(self.classes, minlength=self.class_count) > 0
        prior = self.class_prior.to(self.points) * present
        return (present.sum() * prior / prior.sum().clamp_min(eq.TINY)).clamp_min(eq.TINY).log()


class Known(NamedTuple):
    """What points are compared with; unit rows."""

    labeled: Labeled
    pool: Tensor  # (m, d) a sample of the pool
    means: Tensor  # (c, d) of the labels of each class; zeros without any
    refined: Tensor  # (c, d) the same with in-class images of the pool


def known_points(labeled: Labeled, pool: Tensor) -> Known:
    """labeled, pool (m, d) unit rows"""
    return Known(labeled, pool, class_means(labeled), refined_means(labeled, pool))


def class_means(labeled: Labeled) -> Tensor:
    """Direction of each class.   ->  (c, d) unit rows; zeros for a class without labels"""
    return F.normalize(_class_sums(labeled), dim=1)


def refined_means(labeled: Labeled, pool: Tensor) -> Tensor:
    """Directions of the classes, with images of the pool that look in-class.

    From class means w_k and uniform z, twice:  xi_i = sigmoid(sum_k z_ik cos(x_i, w_k) / t_s),
    z_i = softmax_k(xi_i cos(x_i, w_k) / t_z + log p(k)),  w_k = mean of the labels of k, each with weight
    5, and of the pool with weights xi_i z_ik. With centered features a cosine of 0 is the border between in
    and out.
    pool (m, d)  ->  (c, d) unit rows; zeros for a class without labels
    """
    present = torch.bincount(labeled.classes, minlength=labeled.class_count) > 0
    log_prior = 0.0 if labeled.log_prior is None else labeled.log_prior[present]
    sums = _class_sums(labeled)[present]
    means, count = F.normalize(sums, dim=1), len(sums)
    shares = pool.new_full((len(pool), count), 1 / max(1, count))
    for _ in range(ROUNDS):
        cosines = pool @ means.T
        inlier = ((shares * cosines).sum(dim=1, keepdim=True) / INLIER_TEMPERATURE).sigmoid()
        shares = (inlier * cosines / CLASS_TEMPERATURE + log_prior).softmax(dim=1)
        means = F.normalize(LABEL_WEIGHT * sums + (inlier * shares).T @ pool, dim=1)
    refined = pool.new_zeros(labeled.class_count, pool.shape[1])
    refined[present] = means
    return refined


def _class_sums(labeled: Labeled) -> Tensor:
    """Of the labels of each class: a matrix of labels x classes would not fit many of both.   ->  (c, d)"""
    sums = labeled.points.new_zeros(labeled.class_count, labeled.points.shape[1])
    return sums.index_add(0, labeled.classes, labeled.points)


def log_density_ratio(
    queries: Tensor, labeled: Labeled, pool: Tensor, *, temperature: float = DENSITY_TEMPERATURE
) -> Tensor:
    """s(x) = log p(x | in) - log p(x), where both are means of the same kernel.

    p(x | in) = sum_y p(y) 1/n_y sum_{i of y} k(x, x_i), each class as frequent as it is (Eq. 4 and 5);
    p(x) = 1/m sum_j k(x, x_j); k(x, x') = exp((cos(x, x') - 1) / t). A query that is in the sample itself
    does not count there: in a small pool its own density would be most of it.

    Args:
        queries: (n, d) unit rows.
        labeled: Labeled points; classes without any are left out of the mean.
        pool: (m, d) sample of the pool.
        temperature: Of the kernel.

    Returns:
        (n,), high where labels are dense.
    """
    counts = torch.bincount(labeled.classes, minlength=labeled.class_count).to(queries)
    to_labeled = (eq.cosine(queries, labeled.points) - 1) / temperature - counts[labeled.classes].log()
    if (log_prior := labeled.log_prior) is not None:
        to_labeled = to_labeled + log_prior[labeled.classes]
    inside = to_labeled.logsumexp(dim=1) - (counts > 0).to(queries).sum().log()
    to_pool = eq.cosine(queries, pool).sub_(1).div_(temperature)  # in place: it is large
    others = queries.new_full((queries.shape[0],), len(pool))
    if len(pool) > 1:
        closest, place = to_pool.max(dim=1, keepdim=True)
        itself = closest > -SAME / temperature
        to_pool = to_pool.scatter_(1, place, closest.masked_fill(itself, -math.inf))
        others = others - itself.squeeze(1).to(others)
    return inside - to_pool.logsumexp(dim=1) + others.clamp_min(1).log()


def evidence(queries: Tensor, known: Known) -> Tensor:
    """The three pieces, each high where a point looks in-class.

    queries (n, d) unit rows  ->  (n, 3)
    """
    if queries.shape[0] == 0:
        return queries.new_empty(0, EVIDENCE)
    size = max(1, BLOCK_BYTES // (4 * max(1, len(known.labeled.points) + len(known.pool))))
    return torch.cat([_evidence(part, known) for part in in_blocks(queries, size)])


def _evidence(queries: Tensor, known: Known) -> Tensor:
    missing = torch.bincount(known.labeled.classes, minlength=known.labeled.class_count) == 0
    nearest, refined = (
        (queries @ means.T).masked_fill(missing, -math.inf) for means in (known.means, known.refined)
    )
    pieces = (
        log_density_ratio(queries, known.labeled, known.pool),
        nearest.amax(dim=1),
        (refined / REFINED_TEMPERATURE).logsumexp(dim=1),
    )
    return torch.stack(pieces, dim=1)


def held_out_evidence(labeled: Labeled, pool: Tensor) -> Tensor:
    """Of the labels, each judged by those of other folds: one by one up to 64, in ten folds beyond 1,000.

    A fold compares the whole sample with every class. So its number must not grow with the labels, as
    thousands of classes have thousands of both.

    The only label of a class is judged by the other classes. A lone label has no evidence: NaN.
    pool (m, d) sample of the pool  ->  (l, 3)
    """
    count = len(labeled.points)
    folds = torch.empty(count, dtype=torch.long, device=labeled.points.device)
    by_class = labeled.classes.argsort(stable=True)
    few = FEW_FOLDS if labeled.class_count <= MANY_CLASSES else FEWEST_FOLDS
    parts = min(count, MOST_FOLDS if count <= MANY_LABELS else few)
    folds[by_class] = torch.arange(count, device=folds.device) % max(1, parts)
    found = pool.new_full((count, EVIDENCE), math.nan)
    for fold in range(parts):
        out = folds == fold
        if out.all():
            break
        rest = labeled._replace(points=labeled.points[~out], classes=labeled.classes[~out])
        found[out] = evidence(labeled.points[out], known_points(rest, pool))
    return found


def evidence_weights(labels: int, classes: int, dims: int) -> Tensor:
    """Weights that sum to 1; what the pool says counts for more where classes have few labels.   ->  (3,)

    In few dimensions a density is known well, and classes are no round hills around their means.
    """
    density = DENSITY_WEIGHT if dims <= FEW_DIMS else 1.0
    weights = torch.tensor([density, 1.0, 1.0 + 2 * max(1, classes) / max(1, labels)])
    return weights / weights.sum()
