"""How many cores this process may use, and how many other programs keep busy."""

import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
CORE_TIMES = Path("/proc/stat")  # Linux alone has it
IDLE = (3, 4)  # columns of time in which a core had nothing to do, or waited for a disk
COUNTED = 8  # columns; the ones after them are part of the first


def own_cores(environment: Mapping[str, str] | None = None) -> int:
    """This process's share of the cores: of those that it may run on, as many as each process here gets."""
    environment = os.environ if environment is None else environment
    cores, here = available_cores(), processes_here(environment)
    if here > 1 and "SLURM_PROCID" in environment and "LOCAL_WORLD_SIZE" not in environment:
        if each := _number(environment.get("SLURM_CPUS_PER_TASK")):
            return min(cores, each)
        if cores < _number(environment.get("SLURM_CPUS_ON_NODE")):
            return cores  # SLURM has given each task cores of its own
    return max(1, cores // here)


def available_cores() -> int:
    """Cores that this process may run on, and a container's limit pays for; at least 1."""
    known = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _container_limit())))


def processes_here(environment: Mapping[str, str]) -> int:
    """Processes of the run on this machine, as torchrun or SLURM says; 1 where nobody has started several."""
    if "LOCAL_WORLD_SIZE" in environment:
        return max(1, _number(environment["LOCAL_WORLD_SIZE"]))
    if _number(environment.get("SLURM_NTASKS")) < 2 or "SLURM_PROCID" not in environment:
        return 1
    said = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    each = _per_node(said)  # "8(x2),4": two machines of eight, then one of four
    node = _number(environment.get("SLURM_NODEID"))
    return each[min(node, len(each) - 1)] if each else 1


class CoreTimes(NamedTuple):
    """Counters at one moment, in seconds."""

    moment: float
    machine: float  # that all cores have worked
    own: float  # of it, for this process and the ended ones that it has started


def core_times(source: Path = CORE_TIMES) -> CoreTimes | None:
    """The counters now; None where the system has none."""
    try:
        ticks = [int(value) for value in source.read_text().split("\n", 1)[0].split()[1 : COUNTED + 1]]
    except (OSError, ValueError):
        return None
    worked = sum(value for column, value in enumerate(ticks) if column not in IDLE)
    own = os.times()
    return CoreTimes(
        time.monotonic(),
        worked / os.sysconf("SC_CLK_TCK"),
        own.user + own.system + own.children_user + own.children_system,
    )


def busy_elsewhere(before: CoreTimes, after: CoreTimes) -> float:
    """How many cores other programs have kept busy in between, on average."""
    others = (after.machine - before.machine) - (after.own - before.own)
    return max(0.0, others / max(1e-9, after.moment - before.moment))


def _per_node(said: str) -> list[int]:
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", said)
    return [max(1, int(tasks)) for tasks, nodes in found for _ in range(int(nodes or 1))]


def _number(said: str | None) -> int:
    return int(said) if said is not None and said.isdecimal() else 0


def _container_limit(cgroups: Path = CGROUPS) -> float:
    """Cores' worth of time that the control group gets; infinite without a limit."""
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroups / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroups / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return math.inf  # "max"
    return limit if limit > 0 else math.inf  # -1 is none in the older kind
