"""Embeddings of images for evaluation."""

import torch
from torch import Tensor

from ropaws.data.augment import Normalization, centre_view
from ropaws.models import Encoder


@torch.no_grad()
def embed(model: Encoder, images: Tensor, *, size: int, normalize: Normalization, batch: int = 512) -> Tensor:
    """Unit embeddings h of the images' central squares.   (n, channels, h, w) uint8  ->  (n, d) on the CPU"""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        parts = [
            model([centre_view(part.to(device), size, normalize)])[0].h.cpu()
            for part in images.split(batch)
            if len(part)
        ]
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.empty(0, 0)
