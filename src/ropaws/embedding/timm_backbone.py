"""Backbones of timm, through the extra `pretrained`."""

import contextlib
import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ropaws.core.labels import nearest

_KEPT: list[torch.library.Library] = []  # an operator lives as long as its library


def declare_missing_operators() -> None:
    """Declare what torchvision needs; called before timm, which imports it.

    That fails where its compiled part does not fit this torch. Nothing here calls the two operators
    whose absence is the reason, so their names are enough. Where torchvision is whole or not there,
    nothing is done.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there already
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


TIMM = "timm:"
MOST_REASON = 200  # characters of an error of the hub
HUB_SECONDS = 5  # that the hub has to answer before a download


PATCH_MEANS = ("dinov2", "dinov3")  # families whose patches say more than the class token alone


class TimmBackbone(nn.Module):
    """images (n, channels, h, w)  ->  features (n, d): a timm model without its classifier

    Of DINO's transformers: the class token beside the mean of the patches. Of others: what timm pools.

    Raises:
        ValueError: timm has no such weights or cannot download them, or the model refuses the image size.
    """

    def __init__(
        self, name: str, channels: int, *, pretrained: bool = False, file: Path | None = None
    ) -> None:
        super().__init__()
        self.name = name
        options = {} if file is None else {"pretrained_cfg_overlay": {"file": str(file)}}
        if file is not None:
            check_download(file)
        try:
            if pretrained and file is None:
                check_hub(name)
            self.body = _create(name, pretrained=pretrained, num_classes=0, in_chans=channels, **options)
        except Exception as error:
            if not pretrained or isinstance(error, ValueError | ImportError):
                raise
            raise ValueError(_no_weights(name, error)) from error
        # What comes out without a classifier; some models widen their features once more before it.
        self.features = int(getattr(self.body, "head_hidden_size", None) or self.body.num_features)
        self.skipped = int(getattr(self.body, "num_prefix_tokens", 0) or 0)  # class token and registers
        self.takes_patches = self.skipped > 0 and any(family in name for family in PATCH_MEANS)
        if self.takes_patches:
            self.features *= 2

    def forward(self, images: Tensor) -> Tensor:
        try:
            if not self.takes_patches:
                features: Tensor = self.body(images)
                return features
            tokens: Tensor = self.body.forward_features(images)
        except AssertionError as error:  # transformers cut images into patches of a fixed size
            height, width = images.shape[2:]
            raise ValueError(
                f"timm:{self.name} refuses images of {height} x {width} pixels ({error}); choose another"
                " size of views"
            ) from error
        return torch.cat([tokens[:, 0], tokens[:, self.skipped :].mean(dim=1)], dim=1)


def before_last_blocks(backbone: nn.Module, count: int) -> tuple[list[nn.Parameter], list[nn.Module]]:
    """What a network of timm's does before its last so many blocks: weights, and the modules they are in.

    Raises:
        ValueError: It has no blocks, or not so many.
    """
    body = backbone.body if isinstance(backbone, TimmBackbone) else nn.Module()
    children = dict(body.named_children())
    name = next((name for name in ("blocks", "stages") if name in children), None)
    blocks = [] if name is None else list(children[name].children())
    if not 1 <= count <= len(blocks):
        has = f"{len(blocks)} blocks" if blocks else "none, being no transformer of timm's"
        raise ValueError(
            f"model.train_blocks={count}: this backbone has {has}; choose fewer, or leave it out"
        )
    fixed = [*list(children.values())[: list(children).index(name or "")], *blocks[:-count]]
    weights = [*body.parameters(recurse=False), *(w for module in fixed for w in module.parameters())]
    return weights, fixed


def _no_weights(name: str, error: Exception) -> str:
    """timm's reason in one line, and the ways out."""
    from huggingface_hub.errors import RepositoryNotFoundError  # of gated ones too

    reason = " ".join(str(error).split()) or type(error).__name__
    remedy = "connect once and run `ropaws backbones get NAME`"
    if isinstance(error, PermissionError):
        remedy = "set HF_HOME to a folder that can be written to"
    elif isinstance(error, RepositoryNotFoundError):
        remedy = f"see https://huggingface.co/timm/{name}, where it may be gated or have another name"
    if len(reason) > MOST_REASON:
        reason = f"{reason[:MOST_REASON]}..."
    return (
        f"model.init=pretrained: timm gave no weights of {name} ({reason}); {remedy}, or give a weight file:"
        " --init FILE"
    )


def check_hub(name: str) -> None:
    """Raise an error at once if weights must be downloaded and the hub does not answer.

    huggingface_hub would try again for most of a minute.
    """
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    repository = getattr(import_timm().get_pretrained_cfg(name), "hf_hub_id", None)
    if not repository or isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        return
    get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)


def check_download(file: Path) -> None:
    """Raise an error if a file in the hub's cache is not the published one: it is named by its SHA-256."""
    published = file.resolve().name
    if not re.fullmatch(r"[0-9a-f]{64}", published):
        return
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != published:
        raise ValueError(
            f"model.init=pretrained: {file} is not the published file: its SHA-256 is {found[:12]}..., not"
            f" {published[:12]}...; remove it and run `ropaws backbones get NAME`"
        )


def official_names(body: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Weights under the names of their authors as timm names them; None where timm knows no other names.

    timm would also stretch patches of another size, which belong to another network.
    """
    convert = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    try:
        converted: dict[str, Tensor] = convert(dict(weights), body)
    except Exception:  # whatever a file of another architecture leads to
        return None
    changed = [name for name, value in weights.items() if name.endswith("patch_embed.proj.weight")
               and converted.get("patch_embed.proj.weight", value).shape != value.shape]  # fmt: skip
    return None if changed else converted


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
        raise ValueError("model.backbone: timm backbones need pip install 'ropaws[pretrained]'") from None
    return timm


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
