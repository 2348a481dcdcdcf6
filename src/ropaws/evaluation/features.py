"""Embeddings of images for evaluation."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ropaws.data.augment import Normalization, centre_view
from ropaws.data.corpus import Images
from ropaws.models import Encoder


@torch.no_grad()
def embed(
    model: Encoder,
    images: Images,
    indices: Tensor | None = None,
    *,
    size: int,
    normalize: Normalization,
    batch: int = 512,
) -> Tensor:
    """Unit embeddings h of the central squares of images, of all or of some.

    images (n, channels, h, w) uint8, indices (m,)  ->  (m, d) on the CPU; a batch is held at a time
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        parts = [
            model([centre_view(part.to(device), size, normalize)])[0].h.cpu()
            for part in _parts(images, indices, batch)
        ]
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.empty(0, 0)


def _parts(images: Images, indices: Tensor | None, batch: int) -> Iterator[Tensor]:
    for start in range(0, len(images) if indices is None else len(indices), batch):
        part = slice(start, start + batch)
        yield images[part] if indices is None else images[indices[part]]
