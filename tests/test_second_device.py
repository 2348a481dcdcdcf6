"""Nothing assumes the CPU: every method trains, predicts and is evaluated on a device that is another one."""

import json
import subprocess
import sys

from tests.methods.rivals import RIVALS
from tests.test_distributed import ROOT, environment


def test_every_method_works_on_another_device_than_the_cpu(tmp_path):
    """Through tests/second_device.py, which refuses tensors of both devices in one operation."""
    command = [sys.executable, str(ROOT / "tests/second_device_worker.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (tmp_path / "said.json").exists(), done.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert said.keys() >= {"refusals", "ropaws", "frozen", "streamed", *RIVALS}
    assert not any(said.values()), "\n".join(f"{name}: {text}" for name, text in said.items() if text)
