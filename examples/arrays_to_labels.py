"""From NumPy arrays of images to labels, with all settings chosen from the data.

Images of three shapes, five labels for each, and an unlabeled pool of which two fifths show something else.
After a few seconds of training, new images get a label, a confidence and an in-domain probability. Arrays
of your own go the same way, (n, h, w) or (n, h, w, 3) of uint8, and so do the paths of folders of image
files.

Expect an accuracy of about 90 percent on the shapes (less on a busy machine, 100 percent with
budget="30s"), and a much lower in-domain probability for stripes and noise than for shapes.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import ropaws

SHAPES = ("disc", "ring", "cross")
random = np.random.default_rng(0)


def draw(name):
    """A shape of random size, place and brightness, or stripes, or noise.   ->  (28, 28) uint8"""
    x, y = np.mgrid[-1:1:28j, -1:1:28j] - random.uniform(-0.2, 0.2, (2, 1, 1))
    size, radius = random.uniform(0.5, 0.8), np.hypot(x, y)
    pattern = {
        "disc": radius < size,
        "ring": abs(radius - size) < 0.12,
        "cross": np.minimum(abs(x), abs(y)) < 0.12,
        "stripes": np.sin(9 / size * (x + y)) > 0,
        "noise": random.random((28, 28)) > size,
    }[name]
    return (random.uniform(120, 220) * pattern + random.uniform(0, 35, (28, 28))).astype(np.uint8)


def draw_many(names):
    return np.stack([draw(name) for name in names])


labels = np.repeat(SHAPES, 5)
pool = draw_many(random.choice([*SHAPES, "stripes", "noise"], 300))
out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder = ropaws.train_on((draw_many(labels), labels), pool, out=out / "shapes", budget="8s")

truth = np.array([*SHAPES, "stripes", "noise"] * 40)
predictions = ropaws.Run(folder).predict(draw_many(truth))
for name, found in list(zip(truth, predictions, strict=True))[:5]:
    said = "out-of-class" if found.out_of_class else f"{found.label}, confidence {found.confidence:.0%}"
    print(f"{name:<7} -> {said:<22} in-domain {found.in_domain:4.0%}")
known = np.isin(truth, SHAPES)
correct = np.array([found.nearest_class for found in predictions]) == truth
in_domain = np.array([found.in_domain for found in predictions])
print(f"accuracy on the shapes: {correct[known].mean():.1%}")
means = in_domain[known].mean(), in_domain[~known].mean()
print("mean in-domain probability: shapes {:.0%}, others {:.0%}".format(*means))
