"""The short version of benchmarks/hostile.py: a few damaged files for every reader, and commands on them."""

import subprocess
import sys
from pathlib import Path

TRIAL = Path(__file__).parent.parent / "benchmarks" / "hostile.py"


def test_damaged_files_end_in_one_line_without_a_trace_outside():
    done = subprocess.run(
        [sys.executable, str(TRIAL), "--short"], capture_output=True, text=True, check=False, timeout=900
    )
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0
    cases = int(done.stdout.splitlines()[-1].split()[0])
    assert cases >= 150
