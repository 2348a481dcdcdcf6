"""Opening the run that a command names."""

from pathlib import Path
from typing import Any

from ropaws.methods import import_method, method_name
from ropaws.runs.run import Run


def run_of(path: Path, method: str | None, **options: Any) -> Run:
    """The run, after importing its method where the person has repeated its name with --method."""
    if method is not None:
        import_method(method)
    run = Run(path, **options)
    if method is not None and method != method_name(run.method):
        raise ValueError(f"--method {method}: {path} was trained with {method_name(run.method)}")
    return run
