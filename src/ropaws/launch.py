"""What a launcher says of the processes of a run; without loading torch."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """Which of how many processes this one is, and its number on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def planned_place() -> Place:
    """Where this process will stand."""
    return planned(os.environ)


def started_by_launcher() -> bool:
    return planned_place().size > 1


def planned(environment: Mapping[str, str]) -> Place:
    """torchrun's variables, or SLURM's where a job step has several tasks."""
    if "WORLD_SIZE" in environment and "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return Place()
    rank, size, local = (int(environment.get(name, 0)) for name in names)
    return Place(rank, size, local)
