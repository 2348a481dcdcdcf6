"""Train PAWS and RoPAWS on the same images, labels, weights and batches, and compare them.

Both see the embedded images: five classes with four labels each, and a pool of which half is out-of-class.
All settings but the method are the same, the seed included. Expect a table in percent with one row per
method, both well above the chance of 20, and RoPAWS less confident on out-of-class images ("conf. out").
The other figures mean little after 30 steps; `ropaws demo --from-scratch` takes 250, a matter of minutes.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import ropaws
from ropaws.report.compare_page import compare_runs
from ropaws.run.config import with_steps

out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
base = with_steps(ropaws.recipes.demo(), 30)
base = replace(base, train=replace(base.train, batch=64, seed=0))

runs = []
for name, method in {"paws": ropaws.PAWS(), "ropaws": base.method}.items():
    run = ropaws.train(replace(base, method=method), out / name)
    ropaws.evaluate(run, only=["soft-nn"])  # writes evaluation.json, which the comparison reads
    runs.append(run)

head, rows = compare_runs(runs).rows()
for row in [head, *rows]:
    print(f"{row[0]:<8}", *(f"{cell:>9}" for cell in row[1:]))
print(f"The same with a page of charts: ropaws compare {out}/paws {out}/ropaws --out comparison.html")
