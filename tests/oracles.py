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


def log_density_ratio(x, labeled, classes, pool, temperature, prior=None):
    """log p(x | in) - log p(x) of one point: mean over classes of the mean kernel, against the pool's."""
    inside = []
    for label in sorted(set(classes)):
        own = [z for z, c in zip(labeled, classes, strict=True) if c == label]
        frequency = 1 / len(set(classes)) if prior is None else prior[label]
        inside.append(frequency * sum(math.exp((float(x @ z) - 1) / temperature) for z in own) / len(own))
    around = sum(math.exp((float(x @ z) - 1) / temperature) for z in pool) / len(pool)
    return math.log(sum(inside)) - math.log(around)


def refined_means(
    labeled, classes, pool, label_weight, inlier_temperature, class_temperature, rounds, prior=None
):
    """OSLO (Boudiaf et al. 2023), point by point; the mean of a class is taken as a direction."""
    names = sorted(set(classes))
    prior = [1.0] * len(names) if prior is None else prior
    sums = [sum(z for z, c in zip(labeled, classes, strict=True) if c == name) for name in names]
    means = [s / np.linalg.norm(s) for s in sums]
    shares = [[1 / len(names)] * len(names) for _ in pool]
    for _ in range(rounds):
        gathered = [label_weight * s for s in sums]
        for i, x in enumerate(pool):
            cosines = [float(x @ m) for m in means]
            total = sum(z * c for z, c in zip(shares[i], cosines, strict=True))
            inlier = 1 / (1 + math.exp(-total / inlier_temperature))
            powers = [
                p * math.exp(inlier * c / class_temperature) for p, c in zip(prior, cosines, strict=True)
            ]
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


def one_vs_all(scores):
    """o_k of one row: the first half of the scores says "not in class k", the second "in class k"."""
    classes = len(scores) // 2
    pairs = [(math.exp(scores[k]), math.exp(scores[classes + k])) for k in range(classes)]
    return [inside / (outside + inside) for outside, inside in pairs]


def one_vs_all_loss(scores, own):
    """OpenMatch, Eq. (1): the own class, and the hardest of the others."""
    inside = one_vs_all(scores)
    others = [-math.log(1 - o) for k, o in enumerate(inside) if k != own]
    return -math.log(inside[own]) + max(others)


def one_vs_all_entropy(scores):
    inside = one_vs_all(scores)
    return sum(entropy([o, 1 - o]) for o in inside) / len(inside)


def one_vs_all_distance(scores, other):
    """Over both outcomes of each class."""
    total = 0.0
    for a, b in zip(one_vs_all(scores), one_vs_all(other), strict=True):
        total += (a - b) ** 2 + ((1 - a) - (1 - b)) ** 2
    return total


def softmax(scores):
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def iomatch_unlabeled(weak, weak_detectors, strong, strong_open, tau_p, tau_q):
    """L_ui and L_op from logits of each head, and which rows are in L_ui."""
    inlier, open_set, taught = 0.0, 0.0, []
    for phi, chi, phi_strong, psi_strong in zip(weak, weak_detectors, strong, strong_open, strict=True):
        p, o = softmax(phi), one_vs_all(chi)
        outlier = sum(a * (1 - b) for a, b in zip(p, o, strict=True))
        q = [a * b for a, b in zip(p, o, strict=True)] + [outlier]
        taught.append(float(max(p) >= tau_p and outlier < 0.5))
        if taught[-1]:
            inlier += cross_entropy(softmax(phi_strong), p)
        if max(q) >= tau_q:
            open_set += cross_entropy(softmax(psi_strong), q)
    return inlier / len(weak), open_set / len(weak), taught


def aligned(probs, batches):
    """Each row times uniform / mean of the batch means, 1e-6 added to both, and normalized."""
    means = [np.mean(batch, axis=0) for batch in batches]
    mean = sum(means) / len(means)
    out = []
    for row in probs:
        raised = [p * (1 / len(row) + 1e-6) / (m + 1e-6) for p, m in zip(row, mean, strict=True)]
        out.append([value / sum(raised) for value in raised])
    return np.array(out)


def ccssl_contrast(first, second, probs, push, temperature):
    """Soft supervised contrast over two views (n, d) of unit rows; probs (n, c) of the weak view."""
    n = len(first)
    points = [*enumerate(first), *enumerate(second)]
    total = 0.0
    for a, (i, z) in enumerate(points):
        weighted, weights = 0.0, 0.0
        others = [point for b, point in enumerate(points) if b != a]
        normalizer = sum(kernel(z, other, temperature) for _, other in others)
        for j, other in others:
            ci, cj = max(probs[i]), max(probs[j])
            if i == j:
                weight = 1.0
            elif np.argmax(probs[i]) != np.argmax(probs[j]) or min(ci, cj) < push:
                weight = 0.0
            else:
                weight = ci * cj
            weighted -= weight * math.log(kernel(z, other, temperature) / normalizer)
            weights += weight
        total += weighted / weights
    return total / (2 * n)


def labeled_loss(logits, classes):
    return sum(-math.log(softmax(row)[y]) for row, y in zip(logits, classes, strict=True)) / len(classes)


def divergence(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def uda_unlabeled(weak, strong, temperature, beta):
    """Mean over all rows; those below beta count as zero. And which rows are learned."""
    total, learned = 0.0, []
    for w, s in zip(weak, strong, strict=True):
        learned.append(float(max(softmax(w)) >= beta))
        total += learned[-1] * divergence(softmax([value / temperature for value in w]), softmax(s))
    return total / len(weak), learned


def uda_labeled(logits, classes, threshold):
    """Mean over the rows whose class is not more likely than the threshold."""
    kept = []
    for row, y in zip(logits, classes, strict=True):
        if softmax(row)[y] <= threshold:
            kept.append(-math.log(softmax(row)[y]))
    return sum(kept) / max(1, len(kept))


def pseudo_label_unlabeled(logits, tau):
    total = 0.0
    for row in logits:
        if max(softmax(row)) >= tau:
            total -= math.log(max(softmax(row)))
    return total / len(logits)


def distilled(teacher, student, temperature):
    total = 0.0
    for t, s in zip(teacher, student, strict=True):
        soft = [softmax([value / temperature for value in row]) for row in (t, s)]
        total += temperature**2 * divergence(*soft)
    return total / len(teacher)


def uasd_learned(said, logits, gamma):
    """said: for each row what was said of its image before, a list of distributions. And the rows learned."""
    total, learned = 0.0, []
    for before, row in zip(said, logits, strict=True):
        mean = [sum(column) / len(before) for column in zip(*before, strict=True)] if before else [0.0]
        learned.append(float(max(mean) >= gamma))
        if learned[-1]:
            total += cross_entropy(softmax(row), mean)
    return total / max(1.0, sum(learned)), learned


def beta_density(x, a, b):
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale) * x ** (a - 1) * (1 - x) ** (b - 1)


def beta_of_moments(scores, weights):
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, scores, strict=True)) / total
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, scores, strict=True)) / total
    both = mean * (1 - mean) / variance - 1
    return mean * both, (1 - mean) * both


def cosine(a, b):
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def subspace_score(features, prototypes):
    """Cosine with the nearest point in the span of the prototypes, found by least squares."""
    directions = np.asarray(prototypes, dtype=np.float64).T
    coefficients = np.linalg.lstsq(directions, np.asarray(features), rcond=None)[0]
    return cosine(features, directions @ coefficients)


def prosub_unlabeled(weak_logits, strong_logits, scores, inside, tau):
    """Pseudo-label loss, subspace loss, and which rows are learned."""
    pseudo, subspace, learned = 0.0, 0.0, []
    for weak, strong, score, known in zip(weak_logits, strong_logits, scores, inside, strict=True):
        best = int(np.argmax(weak))
        learned.append(float(bool(known) and softmax(weak)[best] >= tau))
        pseudo -= learned[-1] * math.log(softmax(strong)[best])
        subspace += -score if known else score
    return pseudo / len(scores), subspace / len(scores), learned


def smoothed_loss(logits, classes, smoothing):
    """Mean cross-entropy with (1 - smoothing) one-hot + smoothing / C."""
    total = 0.0
    for row, y in zip(logits, classes, strict=True):
        target = [smoothing / len(row) + (1 - smoothing) * (c == y) for c in range(len(row))]
        total += cross_entropy(softmax(row), target)
    return total / len(classes)


def mixed_rows(rows, partners, shares):
    pairs = zip(rows, partners, shares, strict=True)
    return [[s * a + (1 - s) * b for a, b in zip(row, rows[j], strict=True)] for row, j, s in pairs]


def realmix_labeled(labels, logits, eta):
    """Mean over the rows of which some class is predicted with less than eta times its share."""
    kept = []
    for label, row in zip(labels, logits, strict=True):
        if any(p < eta * y for p, y in zip(softmax(row), label, strict=True)):
            kept.append(cross_entropy(softmax(row), label))
    return sum(kept) / max(1, len(kept))


def realmix_unlabeled(guesses, logits, quantile):
    """Mean over the rows that are more confident than the row at the quantile, and which they are."""
    limit = sorted(max(softmax(row)) for row in logits)[int(quantile * len(logits))]
    kept = [float(max(softmax(row)) > limit) for row in logits]
    total = 0.0
    for guess, row, keep in zip(guesses, logits, kept, strict=True):
        total += keep * sum((q - p) ** 2 for q, p in zip(guess, softmax(row), strict=True)) / len(row)
    return total / max(1.0, sum(kept)), kept


class LinearSoftmax:
    """A linear classifier whose gradients are written out; weights (c, d), bias (c,)."""

    def __init__(self, weight, bias):
        self.weight, self.bias = np.array(weight, dtype=np.float64), np.array(bias, dtype=np.float64)

    def logits(self, rows):
        return [self.weight @ np.asarray(row) + self.bias for row in rows]

    def stepped(self, rows, logit_slopes, rate):
        """After a step of plain SGD, where the slope of the loss by each row's logits is known."""
        other = LinearSoftmax(self.weight, self.bias)
        for row, slope in zip(rows, logit_slopes, strict=True):
            other.weight -= rate * np.outer(slope, row)
            other.bias -= rate * np.asarray(slope)
        return other


def cross_entropy_slopes(logits, targets):
    """Of the mean cross-entropy by the logits of each row: (p - target) / n."""
    return [
        (np.array(softmax(row)) - np.array(target)) / len(logits)
        for row, target in zip(logits, targets, strict=True)
    ]


def squared_distance_slopes(logits, targets, weights):
    """Of sum_u w mean_c (p_c - target_c)^2 by the logits of each row, through the softmax."""
    slopes = []
    for row, target, weight in zip(logits, targets, weights, strict=True):
        p = np.array(softmax(row))
        outer = 2 * weight * (p - np.array(target)) / len(p)
        slopes.append(p * (outer - np.dot(outer, p)))
    return slopes


def nt_xent(first, second, temperature):
    """SimCLR: for each of the 2 n views, the other view of the image among all views but itself."""
    views, n = [*first, *second], len(first)
    total = 0.0
    for i, view in enumerate(views):
        partner = views[i + n if i < n else i - n]
        others = sum(kernel(view, other, temperature) for k, other in enumerate(views) if k != i)
        total -= math.log(kernel(view, partner, temperature) / others)
    return total / (2 * n)


def info_nce(queries, keys, queue, temperature):
    """MoCo: the key of each query among it and the queue."""
    total = 0.0
    for query, key in zip(queries, keys, strict=True):
        positive = kernel(query, key, temperature)
        total -= math.log(positive / (positive + sum(kernel(query, old, temperature) for old in queue)))
    return total / len(queries)


def byol_loss(predicted, targets):
    """Squared distances of unit rows, each view against the target of the other, summed over both."""
    total = 0.0
    for view in (0, 1):
        for p, z in zip(unit(predicted[view]), unit(targets[1 - view]), strict=True):
            total += sum((a - b) ** 2 for a, b in zip(p, z, strict=True)) / len(predicted[view])
    return total


def sinkhorn_codes(scores, epsilon, rounds):
    """As in SwAV's Listing 1: prototypes in rows, samples in columns."""
    q = np.exp(scores / epsilon).T
    q /= q.sum()
    prototypes, samples = q.shape
    for _ in range(rounds):
        for k in range(prototypes):
            q[k] /= q[k].sum() * prototypes
        for b in range(samples):
            q[:, b] /= q[:, b].sum() * samples
    return (q * samples).T


def swap_loss(codes, scores, temperature):
    """Mean over the views with codes of the mean over the other views of H(code, prediction)."""
    per_code = []
    for a, code in enumerate(codes):
        losses = []
        for b, view in enumerate(scores):
            if b == a:
                continue
            probs = sharpen(np.exp(view), temperature)
            losses += [np.mean([cross_entropy(p, q) for p, q in zip(probs, code, strict=True)])]
        per_code.append(np.mean(losses))
    return np.mean(per_code)


def held_out_prototype_scores(embedded, labels, classes):
    """Highest cosine of each row to the mean of a class, all means without that row."""
    scores = []
    for i, row in enumerate(embedded):
        best = -math.inf
        for y in range(classes):
            members = [other for k, other in enumerate(embedded) if labels[k] == y and k != i]
            if members:
                mean = np.mean(members, axis=0)
                best = max(best, float(np.dot(row, mean) / np.linalg.norm(mean)))
        scores.append(best)
    return scores


def closeness(mean, prior):
    """log C - KL(mean || prior)."""
    return math.log(len(mean)) - sum(m * math.log(m / p) for m, p in zip(mean, prior, strict=True) if m > 0)


def with_class_prior(mass, prior):
    """Bayes' rule: what is left of a point is its likelihood, which the prior then multiplies."""
    out = np.zeros_like(mass)
    for i, row in enumerate(mass):
        joint = [q * p for q, p in zip(row, prior, strict=True)]
        out[i] = [value / sum(joint) * sum(row) for value in joint]
    return out
