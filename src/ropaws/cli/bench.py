"""`ropaws bench`."""

from ropaws.bench.bench import Bench, Demo, run_bench, run_demo
from ropaws.bench.entries import JUDGES, known_entries
from ropaws.cli.parsing import parse, wide_console
from ropaws.core.terminal import Terminal
from ropaws.recipes.protocols import PROTOCOLS


def demo(arguments: list[str]) -> None:
    run_demo(parse(Demo, "demo", arguments), Terminal())


def bench(arguments: list[str]) -> None:
    options = parse(Bench, "bench", arguments)
    if options.list:
        _list()
        return
    content = run_bench(options, wide_console())
    if failed := len(content["failures"]):
        raise ValueError(f"{failed} of the cells failed, see {options.out}/report.html and error.txt of each")


def _list() -> None:
    print("protocols (--protocol):")
    for name, protocol in PROTOCOLS.items():
        print(f"  {name}\n      {protocol.about}; {', '.join(map(str, protocol.labels))} labels per class")
        for labels, figures in protocol.published.items():
            listed = ", ".join(f"{method} {value}" for method, value in figures.items())
            if listed:
                print(f"      published, {labels} labels: {listed}")
        if protocol.published:
            print(f"      ({protocol.selection})")
    print(f"\nmethods (--methods): {', '.join(known_entries())}, or FIRST>SECOND such as simclr>ropaws")
    print(f"on features alone (--network pretrained): {', '.join(JUDGES)}")
