"""How the threads of torch wait is settled before torch is loaded, by the command line alone."""

import json
import os
import subprocess
import sys

import pytest

from ropaws.__main__ import WAITING

SAY = "import json, os, sys; print(json.dumps([dict(os.environ), 'torch' in sys.modules]))"
COMMAND = f"import sys; sys.argv = ['ropaws', '--version']; from ropaws.__main__ import main; main(); {SAY}"


def environment_after(code, **settings):
    plain = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | settings, capture_output=True, text=True, check=True
    )
    variables, torch_is_loaded = json.loads(done.stdout.splitlines()[-1])
    return {name: variables[name] for name in WAITING if name in variables}, torch_is_loaded


def test_the_command_sets_it_before_torch_is_loaded():
    assert environment_after(COMMAND) == (WAITING, False)


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_the_user_has_the_last_word(own):
    assert environment_after(COMMAND, **own)[0] == own


def test_importing_the_library_changes_nothing():
    assert environment_after(f"import ropaws; {SAY}")[0] == {}
