"""The paper a second time: float64 NumPy, loops over points and classes, nothing of ropaws.

Written from the formulas of the paper, not from the code, and kept slow so that it stays obvious.
"""

import math

import numpy as np


def unit(rows):
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def kernel(z, other, temperature):
    """exp(z . z' / tau), without 1 / Z."""
    return math.exp(float(np.dot(z, other)) / temperature)


def soft_nn(queries, support, labels, temperature):
    out = np.zeros((len(queries), labels.shape[1]))
    for i, z in enumerate(queries):
        weights = [kernel(z, other, temperature) for other in support]
        for weight, label in zip(weights, labels, strict=True):
            out[i] += weight / sum(weights) * label
    return out


def sharpen(probs, temperature):
    out = np.zeros_like(probs)
    for i, row in enumerate(probs):
        powers = [p ** (1 / temperature) for p in row]
        out[i] = [power / sum(powers) for power in powers]
    return out


def entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def cross_entropy(p, target):
    """H(p, target) of the paper: the target is the second argument."""
    return -sum(t * math.log(x) for x, t in zip(p, target, strict=True) if t > 0)


def density(z, points, temperature):
    return sum(kernel(z, other, temperature) for other in points) / len(points)


def class_density(z, support, labels, y, temperature):
    """Eq. (4): the mean over the supports of class y alone; one-hot labels."""
    members = [other for other, label in zip(support, labels, strict=True) if label[y] == 1]
    return density(z, members, temperature)


def soft_class_density(z, support, labels, y, temperature):
    """Eq. (6) with K = 1 / C."""
    n, classes = labels.shape
    total = sum(
        label[y] * kernel(z, other, temperature) for other, label in zip(support, labels, strict=True)
    )
    return total / (n / classes)


def semi_class_density(z, support, labels, unlabeled, probs, y, temperature, ratio):
    """Eq. (8), the appendix's form with r'."""
    boost = ratio * len(unlabeled) / len(support)
    known = sum(lab[y] * kernel(z, o, temperature) for o, lab in zip(support, labels, strict=True))
    guessed = sum(p[y] * kernel(z, o, temperature) for o, p in zip(unlabeled, probs, strict=True))
    scale = (boost * len(support) + len(unlabeled)) / labels.shape[1]
    return (boost * known + guessed) / scale


def neighbor_weights(queries, support, temperature, ratio, self_vote, weights=None):
    """Eq. (9); weights: of each support, where they are not alike."""
    u, s = len(queries), len(support)
    boost = ratio * u / s
    weights = np.ones(s) if weights is None else weights
    to_support, to_unlabeled = np.zeros((u, s)), np.zeros((u, u))
    for i, z in enumerate(queries):
        for j, other in enumerate(support):
            to_support[i, j] = boost * weights[j] * kernel(z, other, temperature)
        for j, other in enumerate(queries):
            if self_vote or i != j:
                to_unlabeled[i, j] = kernel(z, other, temperature)
        total = to_support[i].sum() + to_unlabeled[i].sum()
        to_support[i] /= total
        to_unlabeled[i] /= total
    return to_support, to_unlabeled


def class_weights(labels):
    """Weight of each support by which all classes that have a label have the same one; their mean is 1."""
    counts = [sum(label[y] for label in labels) for y in range(labels.shape[1])]
    known = sum(1 for count in counts if count > 0)
    return np.array([len(labels) / (known * counts[int(np.argmax(label))]) for label in labels])


def in_domain_prior(queries, support, temperature):
    return np.array([max(math.exp((float(z @ o) - 1) / temperature) for o in support) for z in queries])


def posterior_mass(queries, support, labels, temperature, prior_temperature, ratio, self_vote, weights=None):
    """Eq. (12) by the explicit inverse."""
    to_support, to_unlabeled = neighbor_weights(queries, support, temperature, ratio, self_vote, weights)
    prior = np.ones(len(queries))
    if prior_temperature is not None:
        prior = in_domain_prior(queries, support, prior_temperature)
    a, b = to_support * prior[:, None], to_unlabeled * prior[:, None]
    return np.linalg.inv(np.eye(len(b)) - b) @ a @ labels


def posterior(queries, support, labels, temperature, prior_temperature, ratio, self_vote, weights=None):
    """The mass, then the completion to sum one."""
    q = posterior_mass(queries, support, labels, temperature, prior_temperature, ratio, self_vote, weights)
    in_domain = q.sum(axis=1)
    return q + (1 - in_domain)[:, None] / labels.shape[1], in_domain


def held_out_in_domain(points, support, classes, temperature, prior_temperature, ratio):
    """In-domain posterior of each labeled point by a pool that is solved without its label.

    classes: the class of each support. A class with a single label has nobody to judge it: it is left out.
    """
    found = []
    for i, z in enumerate(support):
        others = [j for j in range(len(support)) if j != i]
        if classes[i] not in [classes[j] for j in others]:
            continue
        labels = np.array([[1.0 if classes[j] == y else 0.0 for y in sorted(set(classes))] for j in others])
        known, weights = support[others], class_weights(labels)
        q = posterior_mass(points, known, labels, temperature, prior_temperature, ratio, False, weights)
        boost = ratio * len(points) / len(known)
        inside = total = 0.0
        for weight, other in zip(weights, known, strict=True):
            vote = boost * weight * kernel(z, other, temperature)
            inside, total = inside + vote, total + vote
        for mass, other in zip(q, points, strict=True):
            vote = kernel(z, other, temperature)
            inside, total = inside + vote * mass.sum(), total + vote
        found.append(in_domain_prior([z], known, prior_temperature)[0] * inside / total)
    return np.array(found)


def paws_loss(anchors, targets, sharpen_temperature, weights=None, entropy_weights=None):
    """Eq. (2) and (14), with small crops: they learn from the mean of both sharpened targets."""
    views, u, _ = anchors.shape
    first, second = (sharpen(view, sharpen_temperature) for view in targets)
    weights = np.ones(u) if weights is None else weights
    total = 0.0
    for v in range(views):
        for i in range(u):
            target = {0: second[i], 1: first[i]}.get(v, (first[i] + second[i]) / 2)
            target = [t if t >= 1e-4 else 0.0 for t in target]
            total += weights[i] * cross_entropy(anchors[v, i], target)
    entropy_weights = np.ones(u) if entropy_weights is None else entropy_weights
    mean = np.zeros(anchors.shape[2])
    for view in anchors:
        for weight, row in zip(entropy_weights, sharpen(view, sharpen_temperature), strict=True):
            mean += weight * row / (views * entropy_weights.sum())
    return total / (views * u) - entropy(mean)


def sskde(points, labels, classes, weight, iterations, gamma, query):
    """SSKDE by loops; labels: class of the first points, the others are unlabeled."""
    known = len(labels)
    beliefs = [[1.0 if labels[i] == y else 0.0 for y in range(classes)] for i in range(known)]
    beliefs += [[1 / classes] * classes for _ in range(len(points) - known)]

    def posterior(x):
        densities = []
        for y in range(classes):
            total = sum(
                math.exp(-gamma * float(np.sum((x - other) ** 2))) * belief[y]
                for other, belief in zip(points, beliefs, strict=True)
            )
            densities.append(total / sum(belief[y] for belief in beliefs))
        return [density / sum(densities) for density in densities]

    for _ in range(iterations):
        new = [posterior(x) for x in points]
        for i in range(known):
            new[i] = [
                weight * (1.0 if labels[i] == y else 0.0) + (1 - weight) * new[i][y] for y in range(classes)
            ]
        beliefs = new
    return posterior(query)


def leave_one_out(support, labels, classes, temperature):
    out = np.zeros((len(support), classes))
    for i, z in enumerate(support):
        weights = [0.0 if j == i else kernel(z, other, temperature) for j, other in enumerate(support)]
        for weight, label in zip(weights, labels, strict=True):
            out[i, label] += weight / sum(weights)
    return out


def log_density_ratio(x, labeled, classes, pool, temperature):
    """log p(x | in) - log p(x) of one point: mean over classes of the mean kernel, against the pool's."""
    inside = []
    for label in sorted(set(classes)):
        own = [z for z, c in zip(labeled, classes, strict=True) if c == label]
        inside.append(sum(math.exp((float(x @ z) - 1) / temperature) for z in own) / len(own))
    around = sum(math.exp((float(x @ z) - 1) / temperature) for z in pool) / len(pool)
    return math.log(sum(inside) / len(inside)) - math.log(around)


def refined_means(labeled, classes, pool, label_weight, inlier_temperature, class_temperature, rounds):
    """OSLO (Boudiaf et al. 2023), point by point; the mean of a class is taken as a direction."""
    names = sorted(set(classes))
    sums = [sum(z for z, c in zip(labeled, classes, strict=True) if c == name) for name in names]
    means = [s / np.linalg.norm(s) for s in sums]
    shares = [[1 / len(names)] * len(names) for _ in pool]
    for _ in range(rounds):
        gathered = [label_weight * s for s in sums]
        for i, x in enumerate(pool):
            cosines = [float(x @ m) for m in means]
            total = sum(z * c for z, c in zip(shares[i], cosines, strict=True))
            inlier = 1 / (1 + math.exp(-total / inlier_temperature))
            powers = [math.exp(inlier * c / class_temperature) for c in cosines]
            shares[i] = [p / sum(powers) for p in powers]
            for k in range(len(names)):
                gathered[k] = gathered[k] + inlier * shares[i][k] * x
        means = [g / np.linalg.norm(g) for g in gathered]
    return np.array(means)


def best_bin_share(pool, labeled, least_kept, confidence):
    """Garg et al. 2021: q_pool(c) / q_labeled(c) at the labeled score c that has the least upper bound."""
    best, found = math.inf, 1.0
    for border in labeled:
        above = sum(s >= border for s in labeled)
        if above < max(1, math.ceil(least_kept * len(labeled))):
            continue
        q_labeled = above / len(labeled)
        q_pool = sum(s >= border for s in pool) / len(pool)
        noise = math.sqrt(math.log(4 / confidence) / 2) / q_labeled
        bound = q_pool / q_labeled + noise * (1 / math.sqrt(len(pool)) + 1 / math.sqrt(len(labeled)))
        if bound < best:
            best, found = bound, q_pool / q_labeled
    return min(1.0, found)
