"""Cached views in the main directions of a linear head, computed once instead of in every step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ropaws.core.features import IN_MEMORY, Features, SeveralKinds
from ropaws.embedding.encoder import Encoder
from ropaws.embedding.heads import ComponentsHead
from ropaws.pool.corpus import EmbeddedImages, Images, features_of

BLOCK = 2048  # images at a time


class DirectedFeatures(Features):
    """Features whose random views are seen as the fixed part of a head sees them; the center view stays.

    Args:
        features: Of the backbone.
        direct: The fixed part of the head, (..., d) to (..., m).
    """

    def __init__(self, features: Features, direct: Callable[[Tensor], Tensor]) -> None:
        self.features = features
        self.direct = direct
        self.made_from = features.made_from
        self._held: dict[object, Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        return self.features.shape

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self.features[index]

    @property
    def view_count(self) -> int:
        return self.features.view_count

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        if kind not in self._held:
            self._held[kind] = self._all_views(kind)
        held = self._held[kind]
        return held[index] if chosen is None else held[index[:, None], chosen]

    def digest(self) -> str:
        return self.features.digest()

    def _all_views(self, kind: object) -> Tensor:
        rows = torch.arange(len(self.features)).split(BLOCK)
        return torch.cat([self.direct(self.features.views(part, kind)) for part in rows])


def in_main_directions(images: Images, encoder: Encoder, model: nn.Module | None = None) -> Images:
    """Bring the cached views of images into the directions of the encoder's head, for training.

    As they are, where there are no features, another head, too many images to hold them, or a head in the
    model (a teacher's) that has other directions.
    """
    features, head = features_of(images), encoder.projection[0]
    if features is None or not isinstance(head, ComponentsHead) or not head.takes_directions:
        return images
    kinds = len(features.kinds) if isinstance(features, SeveralKinds) else 1
    if 4 * len(features) * features.view_count * head.out_features * kinds > IN_MEMORY:
        return images
    others = [other for other in (model or encoder).modules() if isinstance(other, ComponentsHead)]
    if not all(torch.equal(o.mean, head.mean) and torch.equal(o.components, head.components) for o in others):
        return images
    mean, components = head.mean.detach().cpu(), head.components.detach().cpu()

    def direct(rows: Tensor) -> Tensor:
        return head.directions(rows, mean, components)

    directed = DirectedFeatures(features, direct)
    if isinstance(images, EmbeddedImages):
        return EmbeddedImages(images.pixels, directed, images.replaced, images.reasons)
    return directed
