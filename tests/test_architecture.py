"""The shape of the code base: who may import whom, and what an import may not do."""

import ast
import subprocess
import sys
from pathlib import Path

import ropaws

SOURCE = Path(ropaws.__file__).parent
LEVELS = {
    "version": 0, "naming": 0, "batch": 0, "launch": 0,
    "equations": 1, "distributed": 1,
    "models": 2, "data": 2,
    "methods": 3,
    "training": 4, "evaluation": 4,
    "config": 5, "folder": 5, "estimator": 5,
    "trained": 6,
    "run": 7, "recipes": 7, "own_data": 7, "tuning": 7,
    "labeling": 8, "in_python": 8, "material": 8,
    "gallery": 9, "labels_file": 9, "suggesting": 9,
    "analysis": 10,
    "demo": 11, "options": 11,
    "analysis_commands": 12,
    "cli": 13,
    "__main__": 14, "__init__": 14,
}  # fmt: skip


def part_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ropaws":
            if node.module == "ropaws":
                yield from (alias.name for alias in node.names)
            else:
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("ropaws."))


def test_imports_go_down_only():
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        part = part_of(path)
        for other in imported_parts(path):
            if other in (part, "__version__"):
                continue
            place = path.relative_to(SOURCE)
            assert part != "report", f"{place}: report reads files and imports nothing else of ropaws"
            if other == "report":
                assert LEVELS[part] > LEVELS["run"], f"{place} imports report"
            else:
                assert LEVELS[other] < LEVELS[part], f"{place} imports {other}"


def test_report_knows_no_torch():
    for path in (SOURCE / "report").glob("*.py"):
        assert "torch" not in {n.split(".")[0] for n in names(path)}


def names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_equations_know_no_device_process_randomness_or_logging():
    allowed = {"functools", "math", "collections", "typing", "torch", "ropaws"}
    assert {name.split(".")[0] for name in names(SOURCE / "equations.py")} <= allowed
    text = (SOURCE / "equations.py").read_text()
    for word in ("cuda", "rand(", "randn(", "distributed", "print("):
        assert word not in text


def test_no_drawer_for_odds_and_ends():
    assert not {"utils.py", "common.py", "helpers.py", "base.py"} & {p.name for p in SOURCE.rglob("*.py")}


def test_public_names_are_few_sorted_and_there():
    assert ropaws.__all__ == sorted(ropaws.__all__)
    assert len(ropaws.__all__) <= 25
    assert all(hasattr(ropaws, name) for name in ropaws.__all__)


def test_importing_has_no_effect():
    code = (
        "import signal, torch, numpy\n"
        "def state():\n"
        "    return (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(),\n"
        "            torch.get_num_threads(), torch.get_default_dtype())\n"
        "before = state()\n"
        "import ropaws, ropaws.cli.main\n"
        "assert state() == before\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
