"""Untrusted files: more than 100,000 damaged and hostile ones, read one by one.

python benchmarks/hostile.py                     all readers, about an hour; writes results/hostile.json
python benchmarks/hostile.py --cases 2000        so many in all, shared out alike
python benchmarks/hostile.py --only image --seed 3
python benchmarks/hostile.py --short             a few cases of each reader; exit code 1 for a fault
python benchmarks/hostile.py --repeat checkpoint.pt:17      one case again, with its traceback

A case is a reader, a seed and a number: the same case makes the same file. Each reader has a process of its
own, which says before each case what it is about to do; one that hangs or dies is noticed, counted and
started again behind that case. Faults are: an exception that the command line would not say in one line; a
case that takes longer than SECONDS; a case that takes more than MEGABYTES beside what the process had before;
anything written, made, moved or removed outside the sandbox; a connection, or a program that is started.
"""

import argparse
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

SECONDS, MEGABYTES = 60, 1024
ADDRESS_SPACE = 12 << 30  # bytes; a case that wants more gets a MemoryError, not the whole machine
COMMANDS, COMMAND_CASES = "commands", 2_000
SHORT = 5  # cases of each reader
GOOD = ("read", "refused")
HERE = Path(__file__).parent
WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
CHANGES = {  # events, and how many of their arguments are paths
    "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2,
    "os.chmod": 1, "os.truncate": 1, "shutil.rmtree": 1, "shutil.move": 2,
}  # fmt: skip
FOREIGN = ("socket.connect", "socket.getaddrinfo", "os.system", "os.exec", "os.posix_spawn", "urllib.Request")
OUR_WORKER = "ropaws.core.worker_pool"  # a process that decodes images


class Watch:
    """Notes what a case does outside its sandbox: Python tells of every file, connection and process."""

    def __init__(self, sandbox: Path) -> None:
        self.sandbox = os.path.realpath(sandbox)
        self.outside: list[str] = []
        self.active = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(mode, str) and any(letter in mode for letter in "wax+")) or (flags or 0) & WRITES:
                self._note(event, path)
        elif event in CHANGES:
            for path in arguments[: CHANGES[event]]:
                self._note(event, path)
        elif event in FOREIGN or (event == "subprocess.Popen" and OUR_WORKER not in str(arguments)):
            self.outside.append(f"{event} {str(arguments)[:200]}")

    def _note(self, event: str, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        place = os.path.realpath(os.fsdecode(path))
        is_inside = place.startswith(f"{self.sandbox}/") and "/outside/" not in place
        makes_nothing = event == "os.mkdir" and place == self.sandbox  # `mkdir -p` of a folder that is there
        if not (is_inside or makes_nothing or place in ("/dev/null", "/dev/tty")):
            self.outside.append(f"{event} {place}")


def memory() -> tuple[float, float]:
    """Megabytes that this process has now, and had at most since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class TooLong(BaseException):
    """Not an Exception, which a reader might catch."""


def _alarm(_number: int, _frame: object) -> None:
    raise TooLong


# A worker: the cases of one reader, one after the other


def work(names: list[str], seed: int, first: int, last: int, whole: Path, *, loud: bool = False) -> None:
    with tempfile.TemporaryDirectory(prefix="ropaws-hostile-") as place:
        box = Path(place) / "box"
        _fresh(whole, box)
        os.environ |= {"HOME": str(box), "XDG_CACHE_HOME": str(box / "cache"), "TMPDIR": str(box)}
        tempfile.tempdir = str(box)
        os.chdir(box)
        import hostile_readers as readers
        import torch
        import torch._dynamo  # when first needed it makes a folder in /tmp: torch, not a case

        torch.set_num_threads(1)
        watch = Watch(box)
        signal.signal(signal.SIGALRM, _alarm)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        for name in names or [*(reader.name for reader in readers.READERS), COMMANDS]:
            _warm_up(readers, name, box)
            _fresh(whole, box)
            for number in range(first, last):
                case = f"{name}:{number}"
                print(json.dumps({"starts": number, "case": case}), flush=True)
                result = _case(readers, watch, name, Random(f"{seed}:{case}"), whole, box, loud)
                print(json.dumps({"number": number, "case": case, **result}), flush=True)


def _warm_up(readers: Any, name: str, box: Path) -> None:
    """Good files are read. What torch and others set up once is not counted as a case's own."""
    chosen = [reader.read for reader in readers.READERS if reader.name == name]
    if not chosen:
        assert name == COMMANDS, name
        chosen = [lambda box, words=words: readers.command(words, box) for words in readers.COMMANDS]
    for read in chosen:
        read(box)


def _fresh(whole: Path, box: Path) -> None:
    box.mkdir(exist_ok=True)  # it stays: the process is in it
    for path in box.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(whole, box, dirs_exist_ok=True)


def _case(
    readers: Any, watch: Watch, name: str, random: Random, whole: Path, box: Path, loud: bool
) -> dict[str, Any]:
    reader = next((reader for reader in readers.READERS if reader.name == name), None)
    if reader is None:  # a command, which may change many files
        _fresh(whole, box)
        words = readers.by_command(random, box)
        found = _attempt(lambda: readers.command(words, box), readers.REFUSALS, watch, loud)
        return found | {"what": " ".join(words)}
    path = box / reader.file
    path.unlink(missing_ok=True)
    path.write_bytes(reader.change((whole / reader.file).read_bytes(), random))
    result = _attempt(lambda: reader.read(box), readers.REFUSALS, watch, loud)
    path.unlink(missing_ok=True)
    shutil.copy(whole / reader.file, path)
    return result


def _attempt(read: Callable[[], object], refusals: Any, watch: Watch, loud: bool) -> dict[str, Any]:
    forget_peak()
    before, began = memory()[0], time.perf_counter()
    fault, outcome, watch.outside = "", "read", []
    signal.alarm(SECONDS)
    try:
        watch.active = True
        said = read()
        if isinstance(said, str) and "ropaws: " in said:
            outcome = "refused"
    except refusals:
        outcome = "refused"
    except TooLong:
        outcome = "hang"
    except BaseException as error:
        outcome, fault = "traceback", f"{type(error).__name__}: {str(error)[-300:]}"
        if loud:
            traceback.print_exc()
    finally:
        watch.active = False
        signal.alarm(0)
    seconds, megabytes = time.perf_counter() - began, memory()[1] - before
    if watch.outside:
        outcome, fault = "outside", "; ".join(sorted(set(watch.outside)))[:300]
    elif megabytes > MEGABYTES and outcome in GOOD:
        outcome = "memory"
    return {"outcome": outcome, "fault": fault, "megabytes": round(megabytes), "seconds": round(seconds, 3)}


# The trial: a process for each reader


def start(whole: Path, *words: str, loud: bool = False) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "--whole", str(whole), *words],
        stdout=subprocess.PIPE,
        stderr=None if loud else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def trial(name: str, seed: int, cases: int, whole: Path, minutes: float) -> dict[str, Any]:
    """All cases of a reader; a process that hangs or dies loses one case."""
    outcomes: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    most = {"megabytes": 0.0, "seconds": 0.0}
    first, began = 0, time.monotonic()
    deadline = began + 60 * minutes
    while first < cases and time.monotonic() < deadline:
        words = ("--worker", name, "--seed", str(seed), "--first", str(first), "--last", str(cases))
        process, started = start(whole, *words), first
        for found in answers(process, deadline):
            started = found.get("starts", started)
            if "outcome" in found:
                first = found["number"] + 1
                outcomes[found["outcome"]] += 1
                most = {key: max(most[key], found[key]) for key in most}
                if found["outcome"] not in GOOD:
                    faults.append(found)
        if process.wait() != 0 and first < cases and time.monotonic() < deadline:
            outcomes["died"] += 1
            code = f"exit code {process.returncode}"
            faults.append({"case": f"{name}:{started}", "outcome": "died", "fault": code})
            first = started + 1
    took = round(time.monotonic() - began, 1)
    return {
        "cases": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "faults": faults,
        **most,
        "took": took,
    }


def answers(process: "subprocess.Popen[str]", deadline: float) -> Iterator[dict[str, Any]]:
    """What a process says; it is killed when it is silent for too long, or when time is up."""
    assert process.stdout is not None
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    while time.monotonic() < deadline and selector.select(timeout=3 * SECONDS):
        line = process.stdout.readline()
        if not line:
            return
        yield json.loads(line)
    os.killpg(process.pid, signal.SIGKILL)


def make_sandbox(folder: Path) -> Path:
    """A sandbox, with a second copy of its run that stays whole."""
    import hostile_readers as readers

    readers.make_sandbox(folder)
    shutil.copytree(folder / readers.RUN, folder / readers.WHOLE)
    return folder


def run(arguments: argparse.Namespace, whole: Path) -> dict[str, Any]:
    import hostile_readers as readers

    planned = {reader.name: reader.cases for reader in readers.READERS} | {COMMANDS: COMMAND_CASES}
    planned = {name: count for name, count in planned.items() if arguments.only in name}
    if arguments.cases:
        share = arguments.cases / sum(planned.values())
        planned = {name: max(1, round(count * share)) for name, count in planned.items()}
    results: dict[str, Any] = {}
    for name, cases in planned.items():
        found = results[name] = trial(name, arguments.seed, cases, whole, arguments.minutes)
        figures = f"{found['cases']:6} cases {found['took']:7.1f} s {found['megabytes']:6.0f} MB"
        print(f"{name:28} {figures} {found['outcomes']}", flush=True)
        for fault in found["faults"][:5]:
            print("   ", fault, flush=True)
        write(arguments, results)
    return results


def write(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    content = {"seed": arguments.seed, "total": summary(results), "readers": results}
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")


def summary(results: dict[str, Any]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for found in results.values():
        total.update(found["outcomes"])
    most = {key: max(found[key] for found in results.values()) for key in ("megabytes", "seconds")}
    return {"cases": sum(total.values()), "outcomes": dict(total), **most}


def short(seed: int, whole: Path) -> int:
    """A few cases of each reader in one process. The number of faults."""
    process = start(whole, "--worker", "", "--seed", str(seed), "--last", str(SHORT), loud=True)
    outcomes: Counter[str] = Counter()
    last = ""
    for found in answers(process, time.monotonic() + 600):
        last = found["case"]
        if "outcome" in found:
            outcomes[found["outcome"]] += 1
            if found["outcome"] not in GOOD:
                print(found)
    died = int(process.wait() != 0)
    if died:
        print(f"the process ended with {process.returncode} at {last or 'the start'}")
    print(f"{sum(outcomes.values())} cases, {dict(outcomes)}")
    return died + sum(count for outcome, count in outcomes.items() if outcome not in GOOD)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=0, help="in all; by default those of the full trial")
    parser.add_argument("--only", default="", help="readers whose name has this in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30, help="for one reader at most")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "hostile.json")
    parser.add_argument("--short", action="store_true", help="a few cases of each reader")
    parser.add_argument("--repeat", help="READER:NUMBER, one case again")
    for name in ("--worker", "--whole"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--first", "--last"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.worker is not None:
        names = [options.worker] if options.worker else []
        work(names, options.seed, options.first, options.last, Path(options.whole))
        return 0
    with tempfile.TemporaryDirectory(prefix="ropaws-hostile-") as place:
        whole = make_sandbox(Path(place) / "whole")
        if options.short:
            return min(1, short(options.seed, whole))
        if options.repeat:
            name, _, number = options.repeat.rpartition(":")
            work([name], options.seed, int(number), int(number) + 1, whole, loud=True)
            return 0
        print(summary(run(options, whole)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
