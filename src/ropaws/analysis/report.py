"""Write the page of a run, after evaluating it where that was not done."""

from pathlib import Path

from ropaws.analysis.evaluate import evaluate_run
from ropaws.analysis.results import read_evaluation
from ropaws.report.run_page import write_report
from ropaws.runs.layout import GALLERY
from ropaws.runs.run import Run


def report_run(run: Run, out: Path | str | None = None, *, baseline: Path | str | None = None) -> Path:
    """One self-contained page; see Run.report."""
    if not is_evaluated(run.path):
        try:
            evaluate_run(run)
        except Exception as error:
            # The page is made from what the folder has; it says itself what is missing.
            run.console.print(f"Not evaluated: {error}", highlight=False, soft_wrap=True, markup=False)
    return write_report(run.path, out, baseline=baseline)


def is_evaluated(run: Path) -> bool:
    """Was the whole of `ropaws evaluate` run, and not a part of it, or an earlier version?"""
    return "suggestions" in read_evaluation(run) and (run / GALLERY).exists()
