"""Count the modules of ropaws in which a function runs on the way from an image to an answer.

python scripts/walks.py                     the four walks, and how many modules each passes
python scripts/walks.py predict train       the functions that run on these walks, module by module

`train` and `predict` are the commands on a few image files and a frozen network, without a report; `refit` is
what the page does after an answer; `estimator` is fit and predict_proba of RoPAWSClassifier. What runs in
this process counts, in any thread; importing a module does not.
"""

import contextlib
import importlib
import io
import os
import pkgutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import ropaws

SOURCE = str(Path(ropaws.__file__).parent) + os.sep
FUNCTION = 0x1  # flag of the code of a function; that of a module or class has it not
Walk = dict[str, set[str]]


@contextlib.contextmanager
def recorded(found: Walk) -> Iterator[None]:
    """Note each function of ropaws that is called."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & FUNCTION and code.co_filename.startswith(SOURCE):
            module = code.co_filename.removeprefix(SOURCE).removesuffix(".py").replace(os.sep, ".")
            found[module.removesuffix(".__init__")].add(code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def load_everything() -> None:
    """So that nothing is imported, and no decorator runs, on a walk."""
    for module in pkgutil.walk_packages(ropaws.__path__, "ropaws."):
        if module.name != "ropaws.__main__":
            importlib.import_module(module.name)
    for name in ropaws.__all__:
        getattr(ropaws, name)


def write_images(folder: Path) -> None:
    """labeled/CLASS/*.png and pool/*.png."""
    random = np.random.default_rng(0)
    for number, name in enumerate(("red", "green", "blue")):
        pixels = random.integers(0, 80, (12, 36, 40, 3), np.uint8)
        pixels[..., number] += 150
        for row, image in enumerate(pixels):
            place = folder / "labeled" / name if row < 4 else folder / "pool"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{name}-{row}.png")


def train_walk(folder: Path) -> None:
    from ropaws.cli.main import main

    words = ["train", "--labeled", "labeled", "--unlabeled", "pool", "--out", "run", "--no-report"]
    words += ["--backbone", "efficientnet-lite0", "--augment.size", "32", "--train.steps", "4"]
    main(words)


def predict_walk(folder: Path) -> None:
    from ropaws.cli.main import main

    main(["predict", "run", "pool", "--out", "labels.csv"])


def refit_walk(folder: Path) -> Callable[[], None]:
    from ropaws.explore.pool import pool_of_run
    from ropaws.explore.session import Session
    from ropaws.run.run import Run

    session = Session(pool_of_run(Run("run")), folder / "session")

    def refit() -> None:
        session.refit()
        session.jobs.wait()

    return refit


def estimator_walk(folder: Path) -> None:
    random = np.random.default_rng(0)
    rows, labels = random.normal(size=(60, 16)), np.arange(60) % 3
    labels[15:] = -1
    ropaws.RoPAWSClassifier(random_state=0).fit(rows, labels).predict_proba(rows)


WALKS: dict[str, Callable[[Path], Any]] = {
    "train": train_walk,
    "predict": predict_walk,
    "refit": refit_walk,
    "estimator": estimator_walk,
}


def walks() -> dict[str, Walk]:
    """The functions that run, by module, of each walk."""
    load_everything()
    found: dict[str, Walk] = {name: defaultdict(set) for name in WALKS}
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["XDG_CACHE_HOME"] = name
        folder = Path(name)
        write_images(folder)
        for walk, walked in WALKS.items():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                prepared = walked(folder) if walk == "refit" else lambda walked=walked: walked(folder)
                with recorded(found[walk]):
                    prepared()
    return found


def main() -> None:
    found = walks()
    for name, walk in found.items():
        print(f"{name:<10} {len(walk):>3} modules")
        if name in sys.argv[1:]:
            for module in sorted(walk):
                print(f"    {module:<36} {', '.join(sorted(walk[module]))}")


if __name__ == "__main__":
    main()
