"""`ropaws demo`."""

from ropaws.bench.demo import Demo, run_demo
from ropaws.cli.parsing import parse
from ropaws.terminal import Terminal


def demo(arguments: list[str]) -> None:
    run_demo(parse(Demo, "demo", arguments), Terminal())
