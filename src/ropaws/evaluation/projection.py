"""Embeddings on a plane."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


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
