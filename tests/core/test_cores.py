"""The cores that a process may use, as launchers and containers say."""

import os

import pytest

from ropaws.core import cores
from ropaws.core.cores import own_cores, processes_here


def slurm(**more):
    return {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", **more}


def test_launchers_say_how_many_processes_share_the_machine():
    assert processes_here({}) == 1
    assert processes_here({"LOCAL_WORLD_SIZE": "8", "RANK": "3", "WORLD_SIZE": "64"}) == 8
    assert processes_here(slurm()) == 2
    several = {"SLURM_NTASKS": "20", "SLURM_TASKS_PER_NODE": "8(x2),4"}
    assert [processes_here(slurm(**several, SLURM_NODEID=str(node))) for node in range(3)] == [8, 8, 4]
    assert processes_here(slurm(SLURM_STEP_TASKS_PER_NODE="1")) == 1  # a step may have fewer than the job
    assert processes_here(slurm(SLURM_NTASKS="1")) == 1  # a shell inside an allocation


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 16),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "32"}, 1),
        (slurm(SLURM_CPUS_ON_NODE="16"), 8),  # every task may use all cores
        (slurm(SLURM_CPUS_ON_NODE="32"), 16),  # SLURM has bound each to half of them
        (slurm(SLURM_CPUS_PER_TASK="3"), 3),
    ],
)
def test_processes_share_the_cores(monkeypatch, environment, expected):
    monkeypatch.setattr(cores, "available_cores", lambda: 16)
    assert own_cores(environment) == expected


def test_a_container_may_allow_less_than_the_machine_has(tmp_path, monkeypatch):
    limit = cores._container_limit
    assert limit(tmp_path) == float("inf")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert limit(tmp_path) == float("inf")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert limit(tmp_path) == 1.5
    older = tmp_path / "older/cpu"
    older.mkdir(parents=True)
    (older / "cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in (("-1\n", float("inf")), ("400000\n", 4.0)):
        (older / "cpu.cfs_quota_us").write_text(quota)
        assert limit(tmp_path / "older") == expected
    monkeypatch.setattr(cores, "_container_limit", lambda: 0.5)
    assert cores.available_cores() == 1
    monkeypatch.setattr(cores, "_container_limit", lambda: float("inf"))
    assert 1 <= cores.available_cores() <= os.cpu_count()
