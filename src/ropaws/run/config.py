"""All settings of a run in one frozen object, and its round trip through JSON."""

import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ropaws.core.files import read_json
from ropaws.core.hardware import Precision
from ropaws.core.labels import nearest
from ropaws.core.optimizers import OptimConfig
from ropaws.core.randomness import SupportConfig
from ropaws.core.run_layout import CONFIG, DATA, FORMAT, FROZEN, INPUTS
from ropaws.embedding.backbones import JOIN, PRETRAINED, ModelConfig, init_files
from ropaws.embedding.embedder import Embedder, embedding_of
from ropaws.embedding.encoder import Encoder
from ropaws.methods import Method, RoPAWS, method_class, method_name
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.pool.remote import absolute_source, source_name
from ropaws.pool.sources import DataConfig
from ropaws.training.loop import TrackerName

LARGEST = sys.float_info.max
HERE = "./"  # begins a path of config.json that is relative to the folder of the file


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, randomness and hardware."""

    steps: int = 117_000
    """Optimizer steps."""
    batch: int = 256
    """Unlabeled images per step."""
    seed: int = 0
    """Seed of everything random: label split, weights, batches, views."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps ..."""
    precision: Precision = "auto"
    """auto takes bf16 where the hardware is fast at it, else fp32; the loss part is always fp32."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    keep_every: int | None = None
    """Also keep the weights each time this number of steps has passed, in RUN/snapshots."""
    compile: bool = False
    """Compile the backbone with torch.compile, for GPUs; on CPUs it was measured to be slower."""
    log: tuple[TrackerName, ...] = ()
    """Besides metrics.jsonl: tensorboard, wandb."""
    threads: int | None = None
    """Threads that each process computes with. None: its share of the machine's cores, or OMP_NUM_THREADS."""

    def __post_init__(self) -> None:
        # Two images per batch at the least: batch norm has no statistics of a single one.
        for name, least in (("steps", 1), ("batch", 2), ("checkpoint_every", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"train.{name} must be at least {least}, got {value}")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"train.keep_every must be at least 1, got {self.keep_every}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"train.threads must be at least 1, or None, got {self.threads}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"train.seed must be at least 0 and below 2^63, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: method, network, data, and how to train."""

    method: Method = field(default_factory=RoPAWS)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    support: SupportConfig = field(default_factory=SupportConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def with_method(config: RunConfig, method: Method) -> RunConfig:
    """Return the settings with another method, and the optimizer settings that suit it if it has any."""
    if not method.optim:
        return dataclasses.replace(config, method=method)
    settings = dict(method.optim)
    names = [setting.name for setting in dataclasses.fields(OptimConfig)]
    for name in settings:
        if name not in names:
            known = nearest(name, names)
            raise ValueError(f"{method_name(method)}: optim has no setting {name!r}, did you mean {known!r}?")
    if "peak" in settings:  # the defaults of the others belong to another peak
        settings = {"start": settings["peak"], "end": 0.0, "warmup": 0} | settings
    return dataclasses.replace(config, method=method, optim=OptimConfig(**settings))


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """Another length of training; warm-up and checkpoints in proportion."""
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, warmup=steps // 10),
        train=dataclasses.replace(config.train, steps=steps, checkpoint_every=max(20, steps // 20)),
    )


def differences(old: Any, new: Any, *, free: Collection[str] = (), place: str = "") -> list[str]:
    """What differs between two configs as JSON, but for the free fields: a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in sorted({**old, **new})
            for line in differences(
                old.get(key), new.get(key), free=free, place=f"{place}.{key}" if place else key
            )
        ]
    return [] if old == new or place in free else [f"{place} was {old!r} and is {new!r}"]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the settings with paths that hold in any working directory."""
    sections = {part.name: _absolute(getattr(config, part.name)) for part in dataclasses.fields(config)}
    return dataclasses.replace(config, **sections)


def _absolute(section: Any) -> Any:
    """A part of the settings. Named datasets and the name of pretrained weights are no paths."""
    changed = {}
    for name, value in ((item.name, getattr(section, item.name)) for item in dataclasses.fields(section)):
        values = value if isinstance(value, tuple) else (value,)
        placed = tuple(_absolute_path(item, name) for item in values)
        if placed != values:
            changed[name] = placed if isinstance(value, tuple) else placed[0]
    return dataclasses.replace(section, **changed) if changed else section


def _absolute_path(value: Any, setting: str) -> Any:
    if isinstance(value, Path):
        if value == PRETRAINED:
            return value
        files = init_files(value) if setting == "init" else (value,)
        return absolute_source(value) if len(files) == 1 else _joined(files)
    return str(Path(value).absolute()) if setting in ("source", "extra") and value.endswith(".npz") else value


def _joined(files: tuple[Path, ...]) -> Path:
    """The weight files of several networks in one setting."""
    return Path(JOIN.join(str(file if file == PRETRAINED else absolute_source(file)) for file in files))


def recorded(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The settings as config.json of a run folder has them.

    What is in the folder, or in the run that it is a part of, is named relative to it: it may be moved.
    """
    place = folder.absolute()
    homes = {f"{place}{os.sep}": HERE}
    # The stage on frozen features comes before there is anything else of the run that it is a part of.
    if (place.parent / (INPUTS if place.name == FROZEN else DATA)).exists():
        homes[f"{place.parent}{os.sep}"] = f"{HERE}../"

    def relative(text: str) -> str:
        home = next((home for home in homes if text.startswith(home)), None)
        return text if home is None else homes[home] + Path(text.removeprefix(home)).as_posix()

    return {"format": FORMAT, **_with_texts(to_json(config), relative)}


def located(values: Any, folder: Path) -> Any:
    """Undoes recorded, wherever the folder is now."""
    place = folder.absolute()

    def absolute(text: str) -> str:
        if not text.startswith(HERE):
            return text
        rest = text.removeprefix(HERE)
        # Not by the operating system, which would leave `..` in the names of images.
        return str(place.parent / rest.removeprefix("../") if rest.startswith("../") else place / rest)

    return _with_texts(values, absolute)


def _with_texts(values: Any, change: Callable[[str], str]) -> Any:
    """Settings as JSON with other texts, also in lists; what is no text stays, as the JSON may be damaged."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [change(item) if isinstance(item, str) else item for item in value]
        return change(value) if isinstance(value, str) else value

    if not isinstance(values, dict):
        return values
    return {
        section: {name: of(value) for name, value in part.items()} if isinstance(part, dict) else part
        for section, part in values.items()
    }


def same_settings(one: RunConfig, other: RunConfig) -> bool:
    """Do both name the same run? Where downloads are kept depends on the working directory alone."""
    first, second = (to_json(with_absolute_paths(config)) for config in (one, other))
    return not differences(first, second, free=("data.root",))


def to_json(config: RunConfig) -> dict[str, Any]:
    """Plain values; the method says its name."""
    plain = typing.cast(dict[str, Any], _plain(config))
    return {**plain, "method": {"name": method_name(config.method), **plain["method"]}}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return source_name(value) if isinstance(value, Path) else value


def from_json(values: object) -> RunConfig:
    """The config again; says which field is unknown, missing its type, or out of range."""
    if not isinstance(values, dict):
        raise ValueError(f"a config is a JSON object, got {type(values).__name__}")
    values = {name: value for name, value in values.items() if name != "format"}  # read_config checks it
    method = values.pop("method", {"name": "ropaws"})
    if not isinstance(method, dict) or not isinstance(method.get("name"), str):
        raise ValueError("method must be an object with a 'name'")
    kind = method_class(method["name"])
    parsed = _parse(kind, {k: v for k, v in method.items() if k != "name"}, "method")
    config = typing.cast(RunConfig, _parse(RunConfig, values, ""))
    return dataclasses.replace(config, method=typing.cast(Method, parsed))


def check_repeatable(config: RunConfig) -> None:
    """Check that the settings can be written to config.json and read back, before hours of training.

    Those of this package can. A method of a user's own may have fields of other types, or a class that cannot
    be found by its name.
    """
    name = method_name(config.method)
    try:
        same = from_json(json.loads(json.dumps(to_json(config)))) == config
    except (ValueError, TypeError) as error:
        raise ValueError(f"method {name}: its settings cannot be written to {CONFIG} ({error})") from None
    if not same:
        raise ValueError(f"method {name}: its settings are not the same after writing them to {CONFIG}")


def read_config(path: Path, *, inside: Path | None = None) -> RunConfig:
    """config.json of a run, or one written by hand. Missing fields take their defaults.

    A path that begins with ./ is relative to the folder of the file, any other to the working directory.

    inside: the run folder that it is in; no link is followed there, and the folder must be of this format
    """
    try:
        values = read_json(path, inside=inside)
        if inside is not None and isinstance(values, dict) and values.get("format") != FORMAT:
            raise ValueError("this run was made by another version of ropaws; train again with this version")
        return from_json(located(values, path.parent))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if str(path) in message else f"{path}: {message}") from None


def _parse(kind: Any, value: Any, place: str) -> object:
    """A JSON value as the type that a field asks for."""
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(kind, value, place)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _parse(option, value, place)
            except ValueError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
        if len(kinds) == len(value):
            return tuple(_parse(k, v, place) for k, v in zip(kinds, value, strict=True))
    elif kind is float and type(value) in (int, float) and abs(value) <= LARGEST:
        return float(value)
    elif kind is float and type(value) is float:  # infinite or not a number: the field's own check says more
        return value
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif type(value) is kind:
        return value
    wanted = getattr(kind, "__name__", None) if origin is None else str(kind)
    raise ValueError(f"{place} must be {wanted}, got {value!r:.80}")


def _parse_dataclass(kind: Any, value: Any, place: str) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object, got {value!r:.80}")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    parsed = {}
    for name, item in value.items():
        where = f"{place}.{name}" if place else name
        if name not in names:
            raise ValueError(f"unknown field {where!r}, did you mean {nearest(name, names)!r}?")
        parsed[name] = _parse(hints[name], item, where)
    return kind(**parsed)


def embedder_of(
    config: RunConfig,
    encoder: Encoder,
    normalize: Normalization,
    console: Console,
    data: DataConfig | None = None,
) -> Embedder:
    """Make the embedder of a run with these settings.

    data: where the cache is, if that is elsewhere by now
    """
    data = data or config.data
    embedding = embedding_of(
        config.model, encoder, config.augment, normalize, config.data.image_size, config.data.crop
    )
    return Embedder(embedding, cache=data.feature_cache, cache_gb=data.cache_gb, console=console)
