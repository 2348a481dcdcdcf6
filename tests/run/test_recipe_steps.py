"""A step of every recipe at its true shapes, on tensors without content: none fails on somebody's cluster."""

import subprocess
import sys
from pathlib import Path

from ropaws import recipes

COUNTED = Path(__file__).parents[2] / "benchmarks" / "full_scale.py"


def test_a_step_of_every_recipe_runs_forward_and_backward():
    done = subprocess.run(
        [sys.executable, str(COUNTED), "--check"], capture_output=True, text=True, check=False, timeout=900
    )
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0
    named = {name for line in done.stdout.splitlines()[:-1] for name in line.split(":")[0].split()}
    assert named == set(recipes.RECIPES)
