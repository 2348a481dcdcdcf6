"""`ropaws demo`."""

from rich.console import Console

from ropaws.bench.demo import Demo, run_demo
from ropaws.cli.parsing import parse


def demo(arguments: list[str]) -> None:
    run_demo(parse(Demo, "demo", arguments), Console())
