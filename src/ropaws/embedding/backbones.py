"""Networks, the settings that choose one, and the views that it gets.

Several together, dinov2-small+tiny-vit: each sees its own views; unit features side by side.
"""

import contextlib
import hashlib
import importlib.util
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.features import Features
from ropaws.core.labels import nearest
from ropaws.embedding import convnets
from ropaws.embedding.convnets import EfficientNetLite0, SmallConvNet, WideResNet, resnet18, resnet50
from ropaws.embedding.encoder import Encoder, KnownFeatures, linear_head, prediction_head, projection_head
from ropaws.embedding.pretrained import (
    LITE,
    NETWORKS,
    check_view_size,
    known_name,
    timm_name,
    weights_at_hand,
    weights_input,
)
from ropaws.embedding.timm_backbone import (
    TIMM,
    TimmBackbone,
    before_last_blocks,
    check_timm_name,
    official_names,
)
from ropaws.embedding.weight_files import fit_weights, init_projection, looks_like, read_weights
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.pool.content import image_size
from ropaws.pool.image_ops import Interpolation
from ropaws.pool.listing import Pool

JOIN = "+"


def part_names(backbone: str) -> tuple[str, ...]:
    """The networks that a name stands for: one, or several."""
    return tuple(backbone.split(JOIN))


def init_files(init: Path) -> tuple[Path, ...]:
    """The weight files that a setting names: one, or as many as there are networks, joined alike."""
    parts = str(init).split(JOIN)
    if len(parts) == 1 or init.exists() or not all(parts):
        return (init,)
    return tuple(map(Path, parts))


def check_joined(backbone: str, *, frozen: bool, trained_from_scratch: bool, sizes: Sequence[int]) -> None:
    """Raise an error for what networks together cannot do."""
    names = part_names(backbone)
    if len(names) == 1:
        if sizes:
            raise ValueError(f"model.view_sizes goes with several networks, got {backbone}; use augment.size")
        return
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"model.backbone: join different networks, such as dinov2-small+tiny-vit, got {backbone}"
        )
    if trained_from_scratch or not frozen:
        raise ValueError(
            f"model.backbone={backbone}: networks together are used as they are, with weights and"
            " model.frozen; to train the whole network (--train-backbone), choose one of them"
        )
    if sizes and (len(sizes) != len(names) or min(sizes) < 1):
        raise ValueError(
            f"model.view_sizes must be a size for each of the {len(names)} networks of {backbone}, got"
            f" {tuple(sizes)}"
        )


class JoinedBackbone(nn.Module):
    """Frozen networks whose features stand side by side; what they see of an image, each gets by itself.

    Args:
        parts: Each with the number of its `features`.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.features = sum(int(part.features) for part in parts)  # type: ignore[arg-type, misc]

    def forward(self, images: Tensor) -> Tensor:
        raise ValueError(
            "networks together see views of their own, so images cannot go through them as through one; use"
            " one of them for this"
        )


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all networks, each scaled to unit length.   (..., d_i) each  ->  (..., sum of d_i)"""
    return torch.cat([F.normalize(part.float(), dim=-1) for part in parts], dim=-1)


class JoinedFeatures(Features):
    """Features of the same images by several networks.

    Args:
        parts: By each of them, in as many views.
        made_from: Digest of all of them.
    """

    def __init__(self, parts: Sequence[Features], made_from: str) -> None:
        self.parts = tuple(parts)
        self.made_from = made_from

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.parts[0]), sum(part.shape[1] for part in self.parts)))

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self._joined(lambda part: part[index])

    @property
    def view_count(self) -> int:
        return self.parts[0].view_count

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        return self._joined(lambda part: part.views(index, kind, chosen))

    def digest(self) -> str:
        state = hashlib.blake2b(self.made_from.encode(), digest_size=16)
        for part in self.parts:
            state.update(part.digest().encode())
        return state.hexdigest()

    def _joined(self, read: Callable[[Features], Tensor]) -> Tensor:
        return side_by_side([read(part) for part in self.parts])


__all__ = [
    "BACKBONES",
    "FEATURES",
    "LITE",
    "PRETRAINED",
    "Encoder",
    "ModelConfig",
    "build_encoder",
    "check_model",
    "download_notice",
    "load_init",
    "pretrained_normalization",
    "recognize_backbone",
    "view_sizes",
]

PRETRAINED = Path("pretrained")
MOST_DEPTH, MOST_WIDTH, MOST_DIMS = 1000, 256, 1 << 16  # beyond these no memory suffices
MOST_WEIGHTS = 1 << 31  # 8 GB, and twice as much again for gradients and momentum

FEATURES = "features"  # the backbone of runs whose data are features
MOST_FROZEN_VIEWS = 64

BACKBONES: dict[str, Callable[[int], nn.Module]] = {
    LITE: EfficientNetLite0,
    "resnet18": resnet18,
    "resnet50": resnet50,
    FEATURES: KnownFeatures,
    "small": lambda channels: SmallConvNet(channels=channels),
    "wrn-28-2": lambda channels: WideResNet(28, 2, channels),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    backbone: str = "wrn-28-2"
    """small (or small-WIDTH; 24), wrn-DEPTH-WIDTH, resnet18, resnet50; a pretrained network that `ropaws
    backbones` lists, such as dinov2-small; several of them, joined by +; timm:NAME; or features for data
    that are features."""
    init: Path | None = None
    """Weights that the backbone starts from: a .pth or .safetensors file; "pretrained" for the published ones
    of a named network (`ropaws backbones`) or of a timm model; of several networks FILE+FILE."""
    init_projection: bool = False
    """The projection head starts from init too, which must be the weights of another run then."""
    frozen: bool = False
    """Leave the backbone as it is: its features are computed once, and only the heads are trained."""
    train_blocks: int | None = None
    """Where the whole network would be trained (--train-backbone): only so many of the last blocks of a
    transformer of timm's, which takes less time and memory. None: all of them."""
    frozen_views: int = 1
    """With frozen: random views of each training image whose features are kept, besides the center view."""
    view_sizes: tuple[int, ...] = ()
    """Of several networks: pixels per side of the views of each; the largest is augment.size."""
    head: Literal["mlp", "linear"] = "mlp"
    """Projection head: mlp, as in the paper; linear starts as the principal components of the features."""
    projection_hidden: int = 128
    """Width of the projection head's two hidden layers."""
    projection_dims: int = 128
    """Dimensions of the embedding."""
    prediction_hidden: int | None = None
    """Hidden width of the prediction head; None for no such head (then z = h)."""

    def __post_init__(self) -> None:
        for name in ("projection_hidden", "projection_dims", "prediction_hidden"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_DIMS:
                raise ValueError(f"model.{name} must be from 1 to {MOST_DIMS}, got {value}")
        if not 0 <= self.frozen_views <= MOST_FROZEN_VIEWS:
            raise ValueError(
                f"model.frozen_views must be from 0 to {MOST_FROZEN_VIEWS}, got {self.frozen_views}"
            )
        if self.init_projection and self.init in (None, PRETRAINED):
            raise ValueError("model.init_projection needs the weights of another run as model.init")
        if self.frozen and self.init is None and self.backbone != FEATURES:
            raise ValueError(
                "model.frozen needs weights that the backbone keeps: set model.init to a weight file, or to"
                f" {PRETRAINED}"
            )
        if self.train_blocks is not None and (self.frozen or self.train_blocks < 1):
            raise ValueError(
                f"model.train_blocks must be at least 1 and goes with --train-backbone, not with"
                f" model.frozen; got {self.train_blocks}"
            )
        scratch = self.init is None
        check_joined(self.backbone, frozen=self.frozen, trained_from_scratch=scratch, sizes=self.view_sizes)
        for name in part_names(self.backbone):
            if self.init == PRETRAINED and name not in NETWORKS and not name.startswith(TIMM):
                raise ValueError(
                    f"model.init={PRETRAINED} goes with {', '.join(NETWORKS)} or {TIMM}NAME, got {name}"
                )
            if timm_name(name) is None:  # timm is slow to load; it is asked when the network is built
                backbone_builder(name)

    @property
    def parts(self) -> "tuple[ModelConfig, ...]":
        """The networks one by one, each with weights of its own; of a single network that alone."""
        names = part_names(self.backbone)
        if len(names) == 1 or self.init is None:
            return (self,)
        files = init_files(self.init)
        if len(files) not in (1, len(names)):
            raise ValueError(
                f"model.init: {self.backbone} takes {len(names)} weight files, joined by {JOIN}, got"
                f" {self.init}"
            )
        each = files if len(files) > 1 else files * len(names)
        return tuple(
            replace(self, backbone=name, init=file, view_sizes=())
            for name, file in zip(names, each, strict=True)
        )


def backbone_builder(name: str) -> Callable[[int], nn.Module]:
    """The function that makes a backbone for a number of image channels."""
    if name in BACKBONES:
        return BACKBONES[name]
    if len(names := part_names(name)) > 1:
        builders = [backbone_builder(part) for part in names]
        return lambda channels: JoinedBackbone([build(channels) for build in builders])
    if (other := timm_name(name)) is not None:
        check_timm_name(other)
        return lambda channels: TimmBackbone(other, channels)
    if match := re.fullmatch(r"wrn-(\d{1,9})-(\d{1,9})", name):
        depth, width = map(int, match.groups())
        if depth > MOST_DEPTH or width > MOST_WIDTH:
            raise ValueError(
                f"model.backbone: a WRN has a depth of at most {MOST_DEPTH} and a width of at most"
                f" {MOST_WIDTH}, got {name}"
            )
        return lambda channels: WideResNet(depth, width, channels)
    if match := re.fullmatch(r"small-([1-9]\d{0,8})", name):
        first = int(match[1])
        if first > MOST_WIDTH:
            raise ValueError(f"model.backbone: small-WIDTH has a width of at most {MOST_WIDTH}, got {first}")
        if first < 8:  # torch 2.13 corrupts memory in the backward pass of channels-last convolutions of 4
            raise ValueError(f"model.backbone: small-WIDTH has a width of at least 8, got {first}")
        return lambda channels: SmallConvNet((first, 2 * first, 4 * first), channels)
    known = [*BACKBONES, *(other for other in NETWORKS if other != LITE)]
    raise ValueError(
        f"model.backbone: unknown backbone {name!r}, did you mean"
        f" {nearest(name, known)!r}? Known: {', '.join(known)}, {TIMM}NAME"
    )


def build_encoder(config: ModelConfig, *, channels: int, autocast: torch.dtype | None = None) -> Encoder:
    """A new network with random weights from torch's global generator.

    Raises:
        ValueError: It would have more than MOST_WEIGHTS weights.
    """
    if timm_name(config.backbone) is None:
        with torch.device("meta"):  # takes no memory
            weights = sum(weight.numel() for weight in _assemble(config, channels, autocast).parameters())
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"backbone {config.backbone} with projection_hidden={config.projection_hidden} has"
                f" {weights:,} weights, more than {MOST_WEIGHTS:,}; choose a smaller network"
            )
    encoder = _assemble(config, channels, autocast)
    return encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _assemble(config: ModelConfig, channels: int, autocast: torch.dtype | None) -> Encoder:
    backbone = backbone_builder(config.backbone)(channels)
    features = int(backbone.features)  # type: ignore[arg-type]
    if config.head == "linear":
        projection = linear_head(features, config.projection_dims)
    else:
        projection = projection_head(features, config.projection_hidden, config.projection_dims)
    prediction: nn.Module = nn.Identity()
    if config.prediction_hidden is not None:
        prediction = prediction_head(config.projection_dims, config.prediction_hidden)
    return Encoder(
        backbone,
        projection,
        prediction,
        autocast=autocast,
        frozen=config.frozen,
        train_blocks=config.train_blocks,
    )


def load_init(
    encoder: Encoder, config: ModelConfig, parts: Sequence[str] = ("backbone",), *, channels: int
) -> list[str]:
    """Start parts of the encoder from the weights that the settings name.

    Args:
        encoder: The network to start.
        config: Its settings; config.init is a weight file, or "pretrained".
        parts: "backbone", and "projection" where the file has a projection head (another run's). A frozen
            backbone is always loaded.
        channels: Of the images.

    Returns:
        The names in the file that were left out.
    """
    if config.init is None or not (config.frozen or "backbone" in parts):
        return []
    if isinstance(encoder.backbone, JoinedBackbone) and not _is_of_a_run(config.init):
        for own, part in zip(config.parts, encoder.backbone.parts, strict=True):
            single = Encoder(part, nn.Sequential(), nn.Identity(), frozen=True)
            load_init(single, own, channels=channels)
        return []
    if config.init == PRETRAINED:
        encoder.backbone.load_state_dict(_pretrained_state(config, channels))
        return []
    weights = read_weights(config.init)
    try:
        fitting, left = _fit(encoder.backbone, weights)
    except ValueError as error:
        fits = _fitting_backbone(weights)
        what = f"{fits}; use --backbone {fits}" if fits else looks_like(weights)
        raise ValueError(
            f"model.init: {config.init} does not fit backbone {config.backbone}: it looks like {what}"
            f" ({error})"
        ) from None
    _own_part(encoder.backbone).load_state_dict(fitting, strict=False)
    wanted = "projection" in parts or config.init_projection
    return init_projection(encoder.projection, config.init, left) if wanted else left


def _is_of_a_run(init: Path) -> bool:
    """One file that holds several networks is what a run has saved."""
    return init != PRETRAINED and len(init_files(init)) == 1


def _own_part(backbone: nn.Module) -> nn.Module:
    """The module whose names weight files have."""
    return backbone.body if isinstance(backbone, TimmBackbone) else backbone


def _fit(backbone: nn.Module, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """As fit_weights, also with the names that the authors of a network of timm's have given."""
    part = _own_part(backbone)
    try:
        return fit_weights(part, weights)
    except ValueError:
        renamed = official_names(part, weights) if isinstance(backbone, TimmBackbone) else None
        if renamed is None:
            raise
        try:
            return fit_weights(part, renamed)
        except ValueError:
            pass
        raise


def _pretrained_state(config: ModelConfig, channels: int) -> dict[str, Tensor]:
    name = timm_name(config.backbone)
    if name is not None:
        file = weights_at_hand(config.backbone)  # without a look at the network
        return TimmBackbone(name, channels, pretrained=True, file=file).state_dict()
    weights = convnets.pretrained_weights()
    if channels == 1:  # a grayscale image has the same value in each of the three channels
        weights["_conv_stem.weight"] = weights["_conv_stem.weight"].sum(dim=1, keepdim=True)
    return weights


def pretrained_normalization(config: ModelConfig, *, channels: int) -> Normalization | None:
    """What the weights expect of their input, from wherever they come; None where the data decides.

    Of several networks: the first.
    """
    expected = None if config.init is None else weights_input(part_names(config.backbone)[0])
    if expected is None or channels == 3:
        return expected and expected.normalize
    mean, std = expected.normalize.mean, expected.normalize.std
    return Normalization((sum(mean) / len(mean),), (sum(std) / len(std),))


def view_sizes(config: ModelConfig, size: int) -> tuple[int, ...]:
    """Pixels per side that each network sees, where the largest views have this size.

    Raises:
        ValueError: The settings contradict each other, or patches do not divide a size.
    """
    sizes = config.view_sizes or (size,) * len(config.parts)
    if max(sizes) != size:
        raise ValueError(
            f"augment.size={size} is not the largest of model.view_sizes={sizes}; give model.view_sizes a"
            f" size for each network of {config.backbone}"
        )
    for part, own in zip(config.parts, sizes, strict=True):
        check_view_size(part.backbone, own)
        if len(sizes) > 1 and weights_input(part.backbone) is None:
            raise ValueError(
                f"model.backbone: nothing is known of the input of {part.backbone}'s weights, so it cannot be"
                f" joined; take networks of `ropaws backbones` or {TIMM}NAME"
            )
    return sizes


def download_notice(config: ModelConfig) -> str:
    """What is said before weights are downloaded; nothing where they are at hand."""
    if len(config.parts) > 1:
        return "".join(download_notice(part) for part in config.parts)
    name = timm_name(config.backbone)
    if config.init != PRETRAINED or name is None or weights_at_hand(config.backbone) is not None:
        return ""
    row = NETWORKS.get(known_name(config.backbone))
    size = "" if row is None else f"{row.megabytes} MB, "
    return f"; its weights are downloaded through timm ({size}https://huggingface.co/timm/{name})"


def check_model(config: ModelConfig) -> None:
    """Check that timm is installed and the weight file readable, before the data is read."""
    check_train_blocks(config)
    for part in config.parts:
        backbone_builder(part.backbone)
        if part.init == PRETRAINED and part.backbone == LITE:
            convnets.pretrained_weights()
        elif part.init is not None and part.init != PRETRAINED:
            read_weights(part.init)


def check_train_blocks(config: ModelConfig) -> None:
    """Raise an error if the network has not so many blocks, before anything else is trained."""
    if config.train_blocks is not None:
        with torch.device("meta"):
            before_last_blocks(backbone_builder(config.backbone)(3), config.train_blocks)


def recognize_backbone(path: Path) -> str:
    """Which network a weight file fits, by the names and shapes in it."""
    weights = read_weights(path)
    if (name := _fitting_backbone(weights)) is not None:
        return name
    raise ValueError(
        f"--init: {path} looks like {looks_like(weights)}, and fits none of {', '.join(_candidates())};"
        " name its --backbone"
    )


def _candidates() -> list[str]:
    has_timm = importlib.util.find_spec("timm") is not None
    return ["resnet50", "resnet18", "wrn-28-2", "small", *(n for n in NETWORKS if n == LITE or has_timm)]


def _fitting_backbone(weights: dict[str, Tensor]) -> str | None:
    for name in _candidates():
        with contextlib.suppress(ValueError), torch.device("meta"):  # names and shapes are enough
            backbone = backbone_builder(name)(3)
            _fit(backbone, weights)
            return name
    return None


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
