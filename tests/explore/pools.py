"""A pool of small images that needs no network: three classes and others, apart in their features."""

import numpy as np
import torch
from PIL import Image

from ropaws.explore.pool import ExploredPool

COUNT = 120
NAMES = ("circle", "square", "star")
OTHERS = 3  # what is of none of the classes


def truth(count=COUNT):
    """0, 1, 2: a class; 3: of none."""
    return np.arange(count) % 4


def make_points(count=COUNT):
    """Four directions, with noise.   ->  (n, 12)"""
    random = torch.Generator().manual_seed(0)
    centers = torch.eye(4, 12)
    points = centers[torch.from_numpy(truth(count))] + 0.12 * torch.randn(count, 12, generator=random)
    return points - points.mean(dim=0)


def make_pool(folder, count=COUNT, labels=None, **options):
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    paths = []
    for number in range(count):
        path = folder / f"image-{number:03}.png"
        Image.fromarray(random.integers(0, 255, (20, 30, 3), np.uint8)).save(path)
        paths.append(path)
    named = labels or {}
    return ExploredPool(
        tuple(paths),
        tuple(named.get(number) for number in range(count)),
        title="shapes",
        points=make_points(count),
        class_names=tuple(sorted(set(named.values()))),
        sources=(folder,),
        **options,
    )


def label_some(session, per_class=4, tab="tab"):
    """Name the classes, and label the first images of each. Returns the ids of the classes."""
    ids = [session.add_class(name, [], tab=tab) for name in NAMES]
    known = truth(len(session.pool))
    for number, identity in enumerate(ids):
        session.label(np.flatnonzero(known == number)[:per_class].tolist(), identity, why="grid", tab=tab)
    return ids
