"""The views that a network gets: their size by what its weights expect and what the images are like."""

import statistics
from collections.abc import Sequence

from ropaws.embedding.backbones import ModelConfig
from ropaws.embedding.pretrained import LITE, NETWORKS, known_name, timm_name, weights_input
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.content import image_size
from ropaws.pool.image_ops import Interpolation
from ropaws.pool.listing import Pool

SIZES = (28, 32, 48, 64, 96, 128, 224)
PRETRAINED_SIZES = (96, 128, 160, 192, 224)  # networks trained on large images see little in smaller ones
CPU_PRETRAINED_SIZE = 160  # half the pixels of 224
SAMPLE = 200  # images whose size is looked at


def pretrained_view(train: Pool, gpu: bool, model: ModelConfig) -> tuple[AugmentConfig, int, str]:
    """Views as the weights expect them, pixels to which files are decoded, and the reason.

    Of several networks: the largest views; own_sizes has those of each.
    """
    if len(model.parts) > 1:
        each = [pretrained_view(train, gpu, part) for part in model.parts]
        largest_view = max((view for view, _, _ in each), key=lambda view: view.size)
        return largest_view, max(size for _, size, _ in each), "; ".join(why for _, _, why in each)
    sides = shorter_sides(train)
    typical, largest = statistics.median(sides), sorted(sides)[int(0.9 * (len(sides) - 1))]
    expected = None if model.init is None else weights_input(model.backbone)
    row = NETWORKS.get(known_name(model.backbone))
    if expected is not None and timm_name(model.backbone) is not None:
        size = expected.size if row is None else row.gpu_size if gpu else row.cpu_size
        why = f"for {model.backbone} on {'a GPU' if gpu else 'a CPU'}" if row else "as its weights expect"
    elif model.backbone == LITE or model.backbone.startswith("resnet"):
        most = 224 if gpu else CPU_PRETRAINED_SIZE
        size = next((s for s in PRETRAINED_SIZES if s >= min(typical, most)), most)
        why = f"the typical image's shorter side is {typical:.0f} px, and views have 96 to {most}"
    else:
        size, why = choose_size(sides, gpu)[0], f"the typical image's shorter side is {typical:.0f} px"
    view = cached_view(size, "bilinear" if expected is None else expected.interpolation)
    return view, min(round(size * 8 / 7), max(32, round(largest))), f"views of {size} px: {why}"


def own_sizes(train: Pool, gpu: bool, model: ModelConfig) -> tuple[int, ...]:
    """Of several networks: the size of the views of each; nothing for a single one."""
    parts = model.parts if len(model.parts) > 1 else ()
    return tuple(pretrained_view(train, gpu, part)[0].size for part in parts)


def shorter_sides(train: Pool) -> list[int]:
    """Shorter sides of a sample of the images."""
    sides = []
    for image in train.images[:: max(1, len(train.images) // SAMPLE)]:
        try:
            sides.append(min(image_size(image)))
        except Exception:  # whatever Pillow raises on a damaged file; reported when it is decoded
            continue
    if not sides:
        raise ValueError(f"no readable image among {len(train.images)}, the first is {train.images[0]}")
    return sides


def choose_size(sides: Sequence[int], gpu: bool) -> tuple[int, str]:
    typical = statistics.median(sides)
    most = 224 if gpu else 64
    size = max((s for s in SIZES if s <= min(typical, most)), default=SIZES[0])
    limit = "" if typical <= most else f", at most {most} on {'a GPU' if gpu else 'a CPU'}"
    return size, f"views of {size} px: the typical image's shorter side is {typical:.0f} px{limit}"


def cached_view(size: int, interpolation: Interpolation) -> AugmentConfig:
    """The random views whose features are kept: all of one size, as small crops take theirs from them too."""
    return AugmentConfig(
        size=size,
        scale=(0.5, 1.0),
        small_crops=2,
        small_size=size,
        small_scale=(0.5, 1.0),
        solarize=0.0,
        equalize=0.0,
        interpolation=interpolation,
    )
