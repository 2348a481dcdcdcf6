"""`ropaws report`: one run folder as one page."""

from collections.abc import Callable
from pathlib import Path

from ropaws.report import grids, learning, rivals, sections
from ropaws.report.page import esc, page, write_page
from ropaws.report.run_files import MissingError, RunFiles
from ropaws.report.verdict import verdict
from ropaws.runs.layout import REPORT

SECTIONS: dict[str, Callable[[RunFiles], str]] = {
    "Against simpler classifiers": rivals.comparison,
    "The unlabeled pool": sections.pool,
    "Would more labels help?": learning.learning_curve,
    "Label these next": grids.suggestions,
    "Confidence, in-class and out-of-class": sections.confidence,
    "Calibration": sections.calibration,
    "The embedding": grids.projection,
    "Label propagation step by step": sections.propagation,
    "Confusion matrix": sections.confusion,
    "Most confident images per class": grids.confident,
    "Nearest labeled images": grids.neighbors,
    "Most out-of-class images": grids.outside,
    "Suspected label errors": grids.label_errors,
    "Training": sections.curves,
    "Settings": sections.settings,
    "Data": sections.data,
    "Environment": sections.environment,
}


def write_report(
    run: Path | str, out: Path | str | None = None, *, baseline: Path | str | None = None
) -> Path:
    """Write one self-contained page from a run folder alone.

    What is missing or damaged in the folder costs its section, and is listed at the end of the page.

    Args:
        run: The run folder.
        out: The page; by default RUN/report.html.
        baseline: A run of the supervised baseline to compare with; by default RUN/supervised, if it is there.

    Returns:
        The path of the page.
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"no run folder at {run}; `ropaws train` makes one")
    files = RunFiles(run, None if baseline is None else Path(baseline))
    path = run / REPORT if out is None else Path(out)
    write_page(path, render(files))
    return path


def render(files: RunFiles) -> str:
    missing: list[tuple[str, str]] = []
    name = files.run.resolve().name
    body = [f"<h1>{esc(name)}</h1>", f'<p class="dim">{_about(files)}</p>']
    body.append(f'<p class="verdict">{_guarded("verdict", lambda f: esc(verdict(f)), files, missing)}</p>')
    body.append(_guarded("key figures", sections.key_figures, files, missing))
    for title, section in SECTIONS.items():
        content = _guarded(title, section, files, missing)
        if content:
            body.append(f"<section><h2>{esc(title)}</h2>{content}</section>")
    if missing:
        lines = "".join(f"<li>{esc(title)}: {esc(reason)}</li>" for title, reason in missing)
        body.append(f'<section class="missing"><h2>Not shown</h2><ul>{lines}</ul></section>')
    body.append('<div id="tip" role="status"></div>')
    return page(f"{name} - ropaws", "\n".join(body), script=True)


def _guarded(
    title: str, section: Callable[[RunFiles], str], files: RunFiles, missing: list[tuple[str, str]]
) -> str:
    try:
        return section(files)
    except MissingError as reason:
        missing.append((title, str(reason)))
    except Exception as error:  # whatever a damaged file leads to: it costs this section and no other
        missing.append((title, f"its part of the run folder is damaged ({type(error).__name__}: {error})"))
    return ""


def _about(files: RunFiles) -> str:
    try:
        method, train = files.config["method"]["name"], files.config["train"]
        return esc(f"{method}, {train['steps']:,} steps, batch {train['batch']}, seed {train['seed']}")
    except Exception:  # whatever a damaged file leads to
        return "a run of ropaws"
