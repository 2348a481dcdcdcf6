"""What the machine can do: device, precision, threads, memory."""

import ctypes
import math
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from ropaws.core.cores import (
    CoreTimes,
    available_cores,
    busy_elsewhere,
    core_times,
    own_cores,
    processes_here,
)

Precision = Literal["auto", "fp32", "bf16", "fp16"]

# glibc's mallopt parameters
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """'auto' takes a GPU where there is one; another name is taken at its word or refused.

    The processes on one machine take a GPU each.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank} of this machine finds no GPU for itself: there are"
                f" {torch.cuda.device_count()}; start fewer processes, or use train.device=cpu"
            )
        return torch.device("cuda", local_rank)
    if name == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of devices that are no more
            device = torch.device(name)
            float(torch.ones(1, device=device))  # "meta" would take it, and hold nothing
    except Exception as error:  # torch raises nearly anything where a device or its driver is missing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"train.device={name!r} cannot be used here ({reason}); try auto or cpu") from None
    return device


def choose_precision(precision: Precision, device: torch.device) -> Precision:
    """The precision to compute in. 'auto': bf16 where the hardware is fast at it."""
    if precision != "auto":
        return precision
    return "bf16" if fast_at_bf16(device) else "fp32"


def half_type(precision: Precision) -> torch.dtype | None:
    """The type that the network computes in under autocast; None for fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def fast_at_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        # Without these instructions bf16 is emulated, many times slower than fp32. Not in every torch.
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, check, bool)() for check in checks)
    return False


@contextmanager
def threads_for(asked: int | None, recorded: int | None = None) -> Iterator[None]:
    """Compute with as many threads as asked, or as are this process's share of the cores.

    recorded: of a run that is resumed. It rounds as before with as many, if there are so many cores and
    nothing else has been chosen.
    """
    before = torch.get_num_threads()
    chosen = asked or choose_threads(os.environ, before)
    if recorded is not None and asked is None and "OMP_NUM_THREADS" not in os.environ:
        chosen = min(recorded, own_cores())
    torch.set_num_threads(chosen)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_threads(environment: Mapping[str, str], before: int) -> int:
    """The cores shared out to the processes of this machine, unless the user has set OMP_NUM_THREADS.

    torchrun sets it to 1 where the user has not; which of them said 1 cannot be known. before: what torch
    would use, which for a single process is right but where a container allows less.
    """
    several = processes_here(environment) > 1
    said = environment.get("OMP_NUM_THREADS")
    by_torchrun = said == "1" and several and "TORCHELASTIC_RUN_ID" in environment
    if said is not None and not by_torchrun:
        return before
    return own_cores(environment) if several else min(before, own_cores(environment))


SHORTEST_LOOK = 0.5  # seconds; the counters tick in hundredths
BUSY = 0.5  # cores of other programs; below that, waiting costs less than a thread brings


class Crowd(NamedTuple):
    """Other programs that keep so many cores busy that fewer threads of ours are faster."""

    cores: float
    threads: int  # that leave them those cores

    def __str__(self) -> str:
        return f"Other programs keep {self.cores:.1f} of {available_cores()} cores busy"


def crowd(before: CoreTimes, after: CoreTimes) -> Crowd | None:
    """Who else computed in between; None where all threads of ours can go on.

    Threads wait for each other after every operation, so that one of them without a core holds up all
    (benchmarks/busy.py).
    """
    others, threads = busy_elsewhere(before, after), torch.get_num_threads()
    if threads < 2 or others < BUSY:
        return None
    return Crowd(others, max(1, threads - math.ceil(others)))


def leave_room(started: CoreTimes | None, environment: Mapping[str, str]) -> str | None:
    """Compute with fewer threads where other programs have kept cores busy since; what to say of it.

    Called once, before anything is computed, since the number of threads changes the rounding; a run records
    it. Nothing happens where a person or a launcher has chosen the number already.
    """
    chosen = "OMP_NUM_THREADS" in environment or processes_here(environment) > 1
    many = torch.get_num_threads()
    if started is None or chosen or many < 2 or torch.cuda.is_available():
        return None
    time.sleep(max(0.0, started.moment + SHORTEST_LOOK - time.monotonic()))
    if (now := core_times()) is None or (found := crowd(started, now)) is None:
        return None
    torch.set_num_threads(found.threads)
    return f"{found}: {found.threads} of {many} threads will be faster (OMP_NUM_THREADS={many} takes all)"


class LoadWatch:
    """Notices once, some seconds into training, that other programs now take cores from our threads.

    The number of threads stays as it is, so that a run rounds alike from its first step to its last: another
    one is the choice of the user.
    """

    SECONDS = 10.0

    def __init__(self, started: CoreTimes | None = None) -> None:
        self.started = started or core_times()

    def advice(self, now: CoreTimes | None = None) -> str | None:
        """A line for the user, at most once."""
        if self.started is None or (now := now or core_times()) is None:
            return None
        if now.moment - self.started.moment < self.SECONDS:
            return None
        found, self.started = crowd(self.started, now), None
        if found is None:
            return None
        return (
            f"{found}, and {torch.get_num_threads()} threads wait for each other:"
            f" --train.threads {found.threads} is likely faster"
        )


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of giving it back after every tensor.

    A training step on a CPU, and a network that sees one batch after another, free and take the same
    megabytes again and again; each time, the kernel clears every page. benchmarks/step_time.py measures the
    gain. No effect elsewhere.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(M_TOP_PAD, 64 << 20)
