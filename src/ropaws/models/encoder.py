"""Backbone, projection and prediction in one module: images in, unit embeddings h and z out."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.batch import Embeddings


class Encoder(nn.Module):
    """The trained network. Computes in half precision where asked, and always answers in float32."""

    def __init__(
        self,
        backbone: nn.Module,
        projection: nn.Module,
        prediction: nn.Module,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = projection
        self.prediction = prediction  # nn.Identity: z is h
        self.autocast = autocast

    def forward(self, batches: Sequence[Tensor]) -> list[Embeddings]:
        """Embed batches of crops; batches of one size go through the network as one.

        Batch statistics are thus shared within a size and never mixed between sizes.
        batches: each (n_i, channels, size_i, size_i)  ->  one Embeddings (n_i, d) for each
        """
        by_size: dict[torch.Size, list[int]] = {}
        for index, batch in enumerate(batches):
            by_size.setdefault(batch.shape[2:], []).append(index)
        embedded: dict[int, Embeddings] = {}
        for indices in by_size.values():
            together = self._embed(torch.cat([batches[i] for i in indices]))
            lengths = [len(batches[i]) for i in indices]
            parts = zip(together.h.split(lengths), together.z.split(lengths), strict=True)
            embedded.update({i: Embeddings(h, z) for i, (h, z) in zip(indices, parts, strict=True)})
        return [embedded[i] for i in range(len(batches))]

    def features(self, images: Tensor) -> Tensor:
        """What the backbone says of images, for methods with heads of their own.   ->  (n, feature_dims)"""
        with self._precision(images):
            features = self.backbone(images.contiguous(memory_format=torch.channels_last))
        return _widen(features)

    @property
    def feature_dims(self) -> int:
        """Dimensions of the backbone's features."""
        return int(self.backbone.features)  # type: ignore[arg-type]

    def _embed(self, images: Tensor) -> Embeddings:
        images = images.contiguous(memory_format=torch.channels_last)
        with self._precision(images):
            h = self.projection(self.backbone(images))
            z = self.prediction(h)
        return Embeddings(F.normalize(_widen(h), dim=1), F.normalize(_widen(z), dim=1))

    def _precision(self, images: Tensor) -> torch.autocast:
        half = self.autocast or torch.bfloat16
        return torch.autocast(images.device.type, dtype=half, enabled=self.autocast is not None)


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
