"""Backbones of timm, through the optional extra."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ropaws.data.augment import Normalization
from ropaws.data.image_ops import Interpolation
from ropaws.models.operators import declare_missing_operators
from ropaws.naming import nearest

TIMM = "timm:"


class PretrainedInput(NamedTuple):
    """What pretrained weights expect of their images, besides the normalization."""

    size: int  # pixels per side
    interpolation: Interpolation


class TimmBackbone(nn.Module):
    """images (n, channels, h, w)  ->  features (n, d): a timm model without its classifier

    Raises:
        ValueError: timm has no such weights or cannot download them, or the model refuses the image size.
    """

    def __init__(self, name: str, channels: int, *, pretrained: bool = False) -> None:
        super().__init__()
        self.name = name
        try:
            self.body = _create(name, pretrained=pretrained, num_classes=0, in_chans=channels)
        except (OSError, RuntimeError) as error:
            if not pretrained:
                raise
            raise ValueError(
                f"model.init=pretrained: timm gave no weights of {name} ({error}); connect once so that they"
                " are downloaded, or give a weight file as model.init"
            ) from error
        # What comes out without a classifier; some models widen their features once more before it.
        self.features = int(getattr(self.body, "head_hidden_size", None) or self.body.num_features)

    def forward(self, images: Tensor) -> Tensor:
        try:
            features: Tensor = self.body(images)
        except AssertionError as error:  # transformers cut images into patches of a fixed size
            height, width = images.shape[2:]
            raise ValueError(
                f"timm:{self.name} refuses images of {height} x {width} pixels ({error}); choose another"
                f" size of views: it was trained with {timm_input(self.name).size}"
            ) from error
        return features


def _create(name: str, **options: Any) -> Any:
    timm = import_timm()
    try:  # transformers must take large views and small crops alike
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:
        return timm.create_model(name, **options)


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


def timm_input(name: str) -> PretrainedInput:
    """The size and interpolation that timm's weights of a model were trained with.

    timm's own evaluation cuts a part off at each border (crop_pct); views here keep the whole central
    square, since what matters in an image of one's own may lie near its border.
    """
    config = import_timm().get_pretrained_cfg(name)
    return PretrainedInput(int(config.input_size[-1]), config.interpolation)


def timm_weights(name: str) -> str:
    """Where timm downloads the weights of a model from, where they are not in its cache."""
    config = import_timm().get_pretrained_cfg(name)
    return f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else str(config.url)


def check_timm_name(name: str) -> None:
    """Check a name of timm's, with or without a tag of weights (vit_base_patch16_clip_224.openai)."""
    timm = import_timm()
    architecture, _, tag = name.partition(".")
    known = timm.list_models(architecture, pretrained=True) if tag else timm.list_models()
    if name not in known:
        others = known or timm.list_models()
        raise ValueError(
            f"model.backbone: timm has no model {name!r}, did you mean {nearest(name, others)!r}?"
        )
