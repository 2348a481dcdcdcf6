"""Results of several methods over several seeds, as rows of text."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

# Results by method: {"paws": {"accuracy": [one a seed], ...}, ...}, in fractions and seconds.
Results = Mapping[str, Mapping[str, Sequence[float]]]

COLUMNS = {
    "accuracy": "accuracy",
    "confidence_in": "conf. in",
    "confidence_out": "conf. out",
    "auroc": "AUROC",
    "ece": "ECE",
    "seconds": "seconds",
}


def mean_and_deviation(values: Sequence[float], *, scale: float) -> str:
    """'61.2±3.4'; with a single seed only the value, as one value has no deviation."""
    mean = f"{scale * statistics.mean(values):.1f}"
    return mean if len(values) < 2 else f"{mean}±{scale * statistics.stdev(values):.1f}"


def comparison_rows(results: Results, columns: Iterable[str] = tuple(COLUMNS)) -> list[list[str]]:
    """One row per method: its name, then the columns in percent (seconds as they are)."""
    columns = list(columns)
    return [
        [method, *(mean_and_deviation(values[key], scale=1 if key == "seconds" else 100) for key in columns)]
        for method, values in results.items()
    ]
