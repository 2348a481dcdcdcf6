"""A run that takes a second: three classes of striped squares, and noise that belongs to none."""

import shutil
import time
from dataclasses import replace

import numpy as np

from ropaws import recipes
from ropaws.core.randomness import SupportConfig
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.sources import DataConfig


def draw(label, random):
    """12 x 12 pixels: stripes of the class's own direction, or noise for -1."""
    image = random.integers(0, 60, (12, 12))
    lines = [np.s_[::3, :], np.s_[:, ::3], np.s_[3:9, 3:9]]
    if label < 0:
        return random.integers(0, 256, (12, 12)).astype(np.uint8)
    image[lines[label]] += 180
    return image.astype(np.uint8)


def write_data(path, *, seed=0):
    random = np.random.default_rng(seed)
    train_labels = np.array([0, 1, 2, -1] * 10)
    test_labels = np.array([0, 1, 2, -1] * 5)
    np.savez(
        path,
        train_images=np.stack([draw(label, random) for label in train_labels]),
        train_labels=train_labels,
        test_images=np.stack([draw(label, random) for label in test_labels]),
        test_labels=test_labels,
        class_names=np.array(["rows", "columns", "block"]),
    )
    return path


def config(path, **train):
    """Short training from scratch, shrunk."""
    base = recipes.scratch()
    return replace(
        base,
        model=replace(base.model, projection_hidden=16, projection_dims=16),
        data=DataConfig(source=str(path), labels_per_class=2),
        augment=AugmentConfig(size=12, small_crops=1, small_size=8),
        support=SupportConfig(images_per_class=2, views=2),
        optim=replace(base.optim, warmup=2),
        train=replace(
            base.train, **{"steps": 6, "batch": 8, "checkpoint_every": 2, "precision": "fp32", **train}
        ),
    )


def copy(run, target):
    """A run folder to change; it reads the same data file."""
    return shutil.copytree(run, target)


def wait_for_steps(process, run, steps, *, seconds=120):
    """Until a training in another process has logged more than so many steps."""
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not metrics.exists() or metrics.read_text().count("\n") <= steps:
        assert process.poll() is None, "the training ended before"
        assert time.monotonic() < deadline
        time.sleep(0.01)
