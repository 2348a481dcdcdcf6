"""Nearest neighbors by cosine, in blocks."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws import equations as eq

BLOCK_BYTES = 1 << 27


class Neighbors(NamedTuple):
    similarity: Tensor  # (n, k) descending
    position: Tensor  # (n, k) among the points


def nearest(queries: Tensor, points: Tensor, count: int) -> Neighbors:
    """The most similar points of each query.   queries (n, d), points (m, d)  ->  (n, min(count, m)) each"""
    count = min(count, len(points))
    block = max(1, BLOCK_BYTES // (4 * len(points)))
    parts = [eq.cosine(part, points).topk(count, dim=1) for part in queries.split(block)]
    return Neighbors(torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts]))


def tsne(embeddings: Tensor, *, seed: int = 0) -> NDArray[np.float32]:
    """t-SNE by cosine distance.   (n, d), n >= 4  ->  (n, 2)"""
    if len(embeddings) < 4:
        raise ValueError(f"t-SNE needs at least 4 points, got {len(embeddings)}")
    from sklearn.manifold import TSNE  # slow to load

    perplexity = min(30.0, (len(embeddings) - 1) / 3)
    # A network may have collapsed to a point, which has no principal components.
    init = "pca" if bool((embeddings != embeddings[0]).any()) else "random"
    points = TSNE(metric="cosine", init=init, perplexity=perplexity, random_state=seed).fit_transform(
        embeddings.numpy()
    )
    return np.asarray(points, np.float32)
