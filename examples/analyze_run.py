"""Ask a trained run how good it is, which labels look wrong, and what to label next.

Images of three textures, twenty labels for each, six of them wrong on purpose. A quarter of the unlabeled
pool shows no texture at all. `ropaws.Run` is a run folder as one object; what you ask for is computed once
and kept.

Expect an accuracy of 90 percent or more, most of the wrong labels (images 3, 11, 23, 31, 43 and 51) among the
suspected label errors, three images to label next with the reason for each, and one self-contained page,
report.html.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import ropaws

random = np.random.default_rng(0)


def draw(name):
    """A texture of random frequency, phase and contrast, or dust.   ->  (28, 28) uint8"""
    x, y = np.mgrid[:28, :28] * random.uniform(0.7, 1.1) + random.uniform(0, 6, (2, 1, 1))
    dust = random.normal(size=(28, 28))
    texture = {"rows": np.sin(x), "columns": np.sin(y), "checks": np.sin(x) * np.sin(y), "dust": dust}[name]
    noise = random.normal(0, 12, (28, 28))
    return (128 + random.uniform(5, 120) * texture + noise).clip(0, 255).astype(np.uint8)


def draw_many(names):
    return np.stack([draw(name) for name in names])


truth = np.repeat(["rows", "columns", "checks"], 20)
labels = truth.copy()
labels[[3, 11, 23, 31, 43, 51]] = np.repeat(["columns", "checks", "rows"], 2)  # wrong
pool = draw_many(random.choice(["rows", "columns", "checks", "dust"], 240))
test = np.repeat(["rows", "columns", "checks", "dust"], 25)

out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder = ropaws.train_on(
    (draw_many(truth), labels), pool, test=(draw_many(test), test), out=out / "textures", budget="8s"
)
run = ropaws.Run(folder)
results = run.evaluate()
print(f"accuracy {results['accuracy']:.1%}, out-of-class AUROC {results['auroc']:.3f}")
for error in results["label_errors"]:
    image = Path(error["name"]).name
    print(f"suspected label error: {image} is labeled {error['label']}, looks like {error['suspected']}")
for item in run.suggest(3):
    print(f"label next: {Path(item['name']).name}, {item['reason']}")
print(f"Written: {run.report()}")
