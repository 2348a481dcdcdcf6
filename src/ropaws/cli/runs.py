"""Opening the run that a command names."""

from pathlib import Path
from typing import Any

from ropaws.methods import import_method, method_name
from ropaws.runs.layout import CONFIG
from ropaws.runs.run import Run


def run_of(path: Path, method: str | None, **options: Any) -> Run:
    """The run, after importing its method where the person has repeated its name with --method."""
    if method is not None:
        import_method(method)
    run = Run(path, **options)
    if method is not None and method != method_name(run.method):
        raise ValueError(f"--method {method}: {path} was trained with {method_name(run.method)}")
    return run


def refuse_images(path: Path) -> None:
    """Raise an error for a folder of images in the place of a run."""
    if path.is_dir() and not (path / CONFIG).exists():
        raise ValueError(f"{path} is not a run folder; name a folder of images with --unlabeled {path}")
