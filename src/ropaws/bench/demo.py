"""The demo: a preset of `ropaws bench` on the embedded garments, and the report of its RoPAWS run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ropaws.bench.bench import Bench, run_bench
from ropaws.bench.cells import Cell
from ropaws.bench.tasks import Data
from ropaws.classify import head
from ropaws.recipes.protocols import FROM_SCRATCH
from ropaws.run.run import Run

POOL = "fashion-demo"
ON_FEATURES = ("logistic", "label-spreading", "paws", "ropaws-paper", "ropaws")
TRAINED_FROM_SCRATCH = ("supervised", "paws", "ropaws")
RUN_REPORT = "ropaws.html"  # beside the table's report.html


@dataclass(frozen=True)
class Demo:
    """Learn five kinds of garment from 4 labels each and an uncurated pool of 5,000 images.

    On features of a small pretrained network: RoPAWS beside logistic regression, scikit-learn's
    LabelSpreading, PAWS, and RoPAWS exactly as in the paper. Writes results.json, report.html (the
    table) and ropaws.html (what a run's report shows). It may be interrupted: the same command resumes it.
    """

    seeds: int = 1
    """Draws of the labels."""
    labels_per_class: int = 4
    """Labels that training may see."""
    from_scratch: bool = False
    """Train small networks from scratch instead: the supervised baseline, PAWS and RoPAWS. Minutes."""
    out: Path = Path("demo")
    """Folder for the results."""
    steps: int | None = None
    """Training steps of RoPAWS; the others see as many images."""
    workers: int | None = None
    """Methods that are trained side by side; by default one for each core, or one with a GPU."""

    def __post_init__(self) -> None:
        if self.labels_per_class < 1:
            raise ValueError(f"--labels-per-class must be at least 1, got {self.labels_per_class}")

    def bench(self) -> Bench:
        """Return the demo as settings of `ropaws bench`."""
        return Bench(
            methods=TRAINED_FROM_SCRATCH if self.from_scratch else ON_FEATURES,
            protocol=FROM_SCRATCH if self.from_scratch else None,
            data=() if self.from_scratch else (POOL,),
            network="small" if self.from_scratch else "pretrained",
            labels=(self.labels_per_class,),
            seeds=self.seeds,
            steps=self.steps,
            curve=1,
            views=head.RANDOM_VIEWS,
            workers=self.workers,
            out=self.out,
        )


def run_demo(settings: Demo, console: Console) -> dict[str, Any]:
    """Train, test, show, write; the content of results.json."""
    content = run_bench(settings.bench(), console)
    folder = Cell(Data(POOL), settings.labels_per_class, 0, "ropaws").folder(settings.out) / "1-ropaws"
    page = Run(folder, console=console).report(settings.out / RUN_REPORT)
    console.print(f"Written: {page}, the report of the RoPAWS run", highlight=False, soft_wrap=True)
    return content
