"""One function per published run; its docstring says what to expect and what it costs."""

from collections.abc import Callable
from dataclasses import replace

from ropaws.core.labels import nearest
from ropaws.recipes.paper import PAPER, demo, scratch
from ropaws.recipes.protocols import PROTOCOL_RECIPES
from ropaws.run.config import RunConfig

__all__ = ["RECIPES", "demo", "get", "scratch", "with_seed"]

RECIPES: dict[str, Callable[[], RunConfig]] = {**PAPER, **PROTOCOL_RECIPES}


def get(name: str) -> RunConfig:
    """The config of a recipe."""
    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}, did you mean {nearest(name, RECIPES)!r}? See `ropaws recipes`"
        )
    return RECIPES[name]()


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=seed))
