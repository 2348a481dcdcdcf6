"""Backbones of timm, through the optional extra."""

from typing import Any

from torch import Tensor, nn

from ropaws.data.augment import Normalization
from ropaws.models.operators import declare_missing_operators
from ropaws.naming import nearest

TIMM = "timm:"


class TimmBackbone(nn.Module):
    """images (n, channels, h, w)  ->  features (n, d): a timm model without its classifier"""

    def __init__(self, name: str, channels: int, *, pretrained: bool = False) -> None:
        super().__init__()
        timm = import_timm()
        options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0, "in_chans": channels}
        try:  # transformers must take large views and small crops alike
            self.body = timm.create_model(name, dynamic_img_size=True, **options)
        except TypeError:
            self.body = timm.create_model(name, **options)
        # What comes out without a classifier; some models widen their features once more before it.
        self.features = int(getattr(self.body, "head_hidden_size", None) or self.body.num_features)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        return features


def import_timm() -> Any:
    declare_missing_operators()
    try:
        import timm
    except ImportError:
        raise ValueError("model.backbone: timm backbones need pip install 'ropaws[timm]'") from None
    return timm


def timm_normalization(name: str) -> Normalization:
    """The mean and deviation that timm's weights of a model were trained with."""
    config = import_timm().get_pretrained_cfg(name)
    return Normalization(tuple(config.mean), tuple(config.std))


def check_timm_name(name: str) -> None:
    timm = import_timm()
    if name not in timm.list_models():
        raise ValueError(
            f"model.backbone: timm has no model {name!r}, did you mean {nearest(name, timm.list_models())!r}?"
        )
