"""A person's images: three classes of striped squares on disk, and noise that belongs to none."""

import numpy as np
import pytest
from PIL import Image

from ropaws.cli.main import main
from tests.tiny import draw

NAMES = ("rows", "columns", "block")


def save(path, label, random):
    path.parent.mkdir(parents=True, exist_ok=True)
    gray = Image.fromarray(draw(label, random)).resize((36, 36), Image.Resampling.NEAREST)
    gray.convert("RGB").save(path)


def make_photos(folder):
    """labeled/CLASS/*.png, a flat pool with noise in it, and test images with an unknown class."""
    random = np.random.default_rng(0)
    for label, name in enumerate(NAMES):
        for i in range(3):
            save(folder / "photos/labeled" / name / f"{i}.png", label, random)
        for i in range(8):
            save(folder / "photos/pool" / f"{name}-{i}.png", label, random)
        for i in range(4):
            save(folder / "photos/test" / name / f"{i}.png", label, random)
    for i in range(12):
        save(folder / "photos/pool" / f"noise-{i}.png", -1, random)
    for i in range(6):
        save(folder / "photos/test/noise" / f"{i}.png", -1, random)
    return folder / "photos"


def train_on_photos(folder):
    """A run on such images, with its report, and the folder that they are in."""
    photos = make_photos(folder)
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--test", str(photos / "test"), "--out", str(folder / "run"), "--train.steps", "60",
          "--backbone", "small",
          "--augment.solarize", "0", "--augment.equalize", "0",
          "--optim.peak", "0.8", "--optim.start", "0.2"])  # fmt: skip
    return folder / "run", photos


def fails(capsys, *arguments):
    """Exit code 2; the last line on stderr."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]
