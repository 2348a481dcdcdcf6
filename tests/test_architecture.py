"""The shape of the code base: who may import whom, and what an import may not do."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ropaws

SOURCE = Path(ropaws.__file__).parent
# A module belongs to the longest name here that it starts with. It may import lower levels, and what stands
# before it in its own level.
LEVELS = (
    ("core", "equations"),
    ("pool", "embedding"),
    ("classify",),
    ("insight",),
    ("training.loaders", "methods", "training"),
    ("run", "recipes"),
    ("bench", "explore", "scale"),
    ("cli", "__main__", "__init__"),
)
PLACES = {part: (level, place) for level, row in enumerate(LEVELS) for place, part in enumerate(row)}
# report stands beside the levels: it reads files of a run, and analyses and commands write pages with it.
REPORT_IMPORTS = {"core.files", "core.labels", "core.run_layout"}
REPORT_USERS = 5  # level from which on it may be imported
# The one exception: what people ask of a Run is answered by modules that import it, and imported when asked.
VERBS = ("evaluate", "predict", "suggest", "discover", "report", "export")


def module_name(path):
    """Below ropaws: "data.files", "config", "__init__"."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def part_of(module):
    """The entry of LEVELS, or report."""
    names = module.split(".")
    starts = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return next(start for start in starts if start in PLACES or start == "report")


def imports_of(node):
    """The modules of ropaws that are imported anywhere inside, in functions too."""
    for item in ast.walk(node):
        if isinstance(item, ast.ImportFrom):
            assert item.level == 0, "imports are absolute"
            if item.module.split(".")[0] == "ropaws":
                inside = item.module.partition(".")[2]
                names = (f"{inside}.{alias.name}".strip(".") for alias in item.names)
                found = (name if name in MODULES else inside for name in names)
                yield from (name for name in found if name)  # "" is ropaws.__version__
        elif isinstance(item, ast.Import):
            yield from (a.name.removeprefix("ropaws.") for a in item.names if a.name.startswith("ropaws."))


def verbs_of_run():
    """The methods of Run that answer what people ask, and the block of imports for their types."""
    tree = ast.parse(MODULES["run.run"].read_text())
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    verbs = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name in VERBS]
    types = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return tree, verbs, types


def imports(module):
    """Of a module, without the exception."""
    if module != "run.run":
        return set(imports_of(ast.parse(MODULES[module].read_text())))
    tree, verbs, types = verbs_of_run()
    for node in (*verbs, *types):
        node.body = [ast.Pass()]
    return set(imports_of(tree))


def test_every_module_has_a_place():
    assert len(MODULES) > 80
    assert {part_of(module) for module in MODULES} == {*PLACES, "report"}


def test_imports_go_down_only():
    for module in MODULES:
        part = part_of(module)
        for other in imports(module):
            if (theirs := part_of(other)) == part:
                continue
            what = f"{module} imports {other}"
            if part == "report":
                assert other in REPORT_IMPORTS, what
            elif theirs == "report":
                assert PLACES[part][0] >= REPORT_USERS, what
            else:
                assert PLACES[theirs] < PLACES[part], what


def test_the_one_exception_is_as_small_as_it_is_said_to_be():
    _, verbs, types = verbs_of_run()
    assert [node.name for node in verbs] == list(VERBS)
    assert len(types) == 1
    for node in (*verbs, *types):
        found = set(imports_of(node))
        assert found, node.name
        assert all(module.startswith("run.") for module in found)


def test_no_modules_import_each_other():
    graph = {module: imports(module) - {module} for module in MODULES if module != "__init__"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_report_knows_no_torch():
    for module, path in MODULES.items():
        if part_of(module) == "report":
            assert "torch" not in {name.split(".")[0] for name in names(path)}
    pages = [f"ropaws.{module}" for module in MODULES if part_of(module) == "report"]
    assert "torch" not in loaded_by(f"import {', '.join(pages)}")


def names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def loaded_by(code):
    """The modules that are loaded after some code has run in a process of its own."""
    code = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_load_torch(option):
    loaded = loaded_by(f"sys.argv = ['ropaws', {option!r}]\nfrom ropaws.__main__ import main\nmain()")
    assert "ropaws.cli.main" in loaded
    assert not {"torch", "numpy"} & loaded


def test_training_does_not_load_the_tracer_of_torch_compile(tmp_path):
    """It takes over a second."""
    code = """
import dataclasses, sys
from tests import tiny
import ropaws
data = tiny.write_data(sys.argv[1] + "/data.npz")
config = tiny.config(data)
config = dataclasses.replace(config, model=dataclasses.replace(config.model, backbone="wrn-28-2"))
ropaws.train(config, sys.argv[1] + "/run")
import numpy as np
rows = np.random.default_rng(0).normal(size=(40, 8))
ropaws.RoPAWSClassifier(steps=2).fit(rows, [0, 0, 1, 1] + 36 * [-1])  # a head trains by Adam
"""
    loaded = loaded_by(f"sys.argv.append({str(tmp_path)!r})\n{code}")
    assert (tmp_path / "run/model.safetensors").is_file()
    assert "torch._dynamo" not in loaded


def test_equations_know_no_device_process_randomness_or_logging():
    allowed = {"functools", "math", "collections", "typing", "torch", "ropaws"}
    assert {name.split(".")[0] for name in names(SOURCE / "equations.py")} <= allowed
    text = (SOURCE / "equations.py").read_text()
    for word in ("cuda", "rand(", "randn(", "distributed", "print("):
        assert word not in text


def test_no_drawer_for_odds_and_ends():
    assert not {"utils.py", "common.py", "helpers.py", "base.py"} & {p.name for p in SOURCE.rglob("*.py")}


def test_few_modules_are_at_the_top():
    assert len(list(SOURCE.glob("*.py"))) <= 4


def test_public_names_are_few_sorted_and_there():
    # As ruff sorts them: CONSTANTS, then Classes, then functions.
    in_order = sorted(ropaws.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert ropaws.__all__ == in_order
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
        "for name in ropaws.__all__:\n"
        "    getattr(ropaws, name)\n"  # public names are imported when they are used
        "import ropaws.cli.train, ropaws.cli.predict, ropaws.cli.data, ropaws.cli.bench\n"
        "assert state() == before\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_label_codes_have_one_place():
    """Unlabeled and out-of-class have the same number in memory and in every file."""
    own = re.compile(r"^(?:UNLABELED|UNKNOWN|OUT_OF_CLASS|OUT|HIDDEN)\b[^#\n]*= *[-\w]", re.MULTILINE)
    assert [name for name, path in MODULES.items() if own.search(path.read_text())] == ["core.labels"]
