"""The view of DINOv2-S: pixels per side and kind of features, by accuracy with few labels.

python benchmarks/backbone_views.py --data FOLDER --weights dinov2-small.safetensors

FOLDER has cifar10.npz and tinyimagenet32.npz (train_images of 32 px, train_labels); 100 images of each class,
and 30 of each of the first 20 classes. Logistic regression on centered unit features, with 1, 4 and 25 labels
per class, mean of six draws. Writes results/backbone_views.json.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from timing import write_results
from torch import Tensor

from ropaws.embedding.backbones import ModelConfig, build_encoder, load_init
from ropaws.embedding.pretrained import weights_input
from ropaws.pool.augment import center_view

NAME = "dinov2-small"
SIZES = (112, 140, 224)
SETS = {"cifar10": (100, (1, 4, 25)), "tinyimagenet32": (30, (1, 4))}
DRAWS, CLASSES, BATCH = 6, 20, 50


def some_images(path: Path, per_class: int) -> tuple[Tensor, NDArray[Any]]:
    with np.load(path) as arrays:
        images, labels = arrays["train_images"], arrays["train_labels"]
    random = np.random.default_rng(0)
    classes = np.unique(labels)[:CLASSES]
    rows = np.concatenate([random.permutation(np.flatnonzero(labels == c))[:per_class] for c in classes])
    return torch.from_numpy(images[rows]).permute(0, 3, 1, 2), labels[rows]


def accuracy(features: Tensor, labels: NDArray[Any], count: int) -> float:
    rows = F.normalize(features, dim=1)
    centered, found = (rows - rows.mean(dim=0)).numpy(), []
    for draw in range(DRAWS):
        random = np.random.default_rng(draw)
        chosen = [random.permutation(np.flatnonzero(labels == c))[:count] for c in np.unique(labels)]
        known = np.concatenate(chosen)
        rest = np.setdiff1d(np.arange(len(labels)), known)
        model = LogisticRegression(C=10, max_iter=500).fit(centered[known], labels[known])
        found.append((model.predict(centered[rest]) == labels[rest]).mean())
    return 100 * float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    options = parser.parse_args()
    config = ModelConfig(backbone=NAME, init=options.weights, frozen=True)
    encoder = build_encoder(config, channels=3).eval()
    load_init(encoder, config, channels=3)
    expected = weights_input(NAME)
    assert expected is not None
    results: dict[str, object] = {}
    for name, (per_class, counts) in SETS.items():
        images, labels = some_images(options.data / f"{name}.npz", per_class)
        for size in SIZES:
            with torch.no_grad():
                views = (center_view(p, size, expected.normalize, "bicubic") for p in images.split(BATCH))
                both = torch.cat([encoder.features(view) for view in views])
            token = both[:, : both.shape[1] // 2]
            results[f"{name} {size}"] = {
                "class token": [accuracy(token, labels, count) for count in counts],
                "with patches": [accuracy(both, labels, count) for count in counts],
            }
            print(name, size, results[f"{name} {size}"], flush=True)
    write_results("backbone_views", results)


if __name__ == "__main__":
    main()
