"""A run folder as the report sees it: files, any of which may be missing or damaged."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from ropaws.core.files import JSON_FILE, read_json, read_regular
from ropaws.core.run_layout import CONFIG, DATA, EVALUATION, GALLERY, METRICS, SUPERVISED

MOST_STEPS = 100_000  # lines of metrics that are looked at; of more, evenly spaced ones
LARGEST = 1e12  # of a figure: they are fractions, steps and seconds


class MissingError(Exception):
    """A part of a run folder that a section needs is not there; says what to do about it."""


class RunFiles:
    """Reads a file when a section asks for it, and says why it cannot."""

    def __init__(self, run: Path, baseline: Path | None = None) -> None:
        self.run = run
        # The supervised baseline: a run named, or the one that `evaluate --only supervised` makes.
        self.baseline = baseline or run / SUPERVISED
        self._baseline_within = baseline or run  # below it no link is followed

    def read(self, name: str) -> dict[str, Any]:
        return _read_object(self.run / name, self.run)

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        return self.read(EVALUATION)

    @cached_property
    def gallery(self) -> dict[str, Any]:
        return self.read(GALLERY)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.read(CONFIG)

    @cached_property
    def data(self) -> dict[str, Any]:
        return self.read(DATA)

    @cached_property
    def class_names(self) -> list[str]:
        return [str(name) for name in self.data["class_names"]]

    @property
    def method_name(self) -> str | None:
        """None where it cannot be read."""
        try:
            return str(self.config["method"]["name"])
        except (MissingError, KeyError, TypeError):
            return None

    @property
    def is_supervised(self) -> bool:
        """Is this run itself a supervised baseline?"""
        return self.method_name == "supervised"

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The lines that can be read; a crash may have left the last one cut off."""
        path = self.run / METRICS
        try:
            content = read_regular(path, JSON_FILE, inside=self.run)
        except FileNotFoundError:
            raise MissingError(f"there is no {path.name}; it is written by training") from None
        except (OSError, ValueError) as error:
            raise MissingError(f"{path.name} cannot be read ({error})") from None
        lines = content.decode("utf-8", errors="replace").splitlines()
        rows = []
        every = -(-len(lines) // MOST_STEPS) or 1
        for line in lines[::-every][::-1]:  # the last one is always among them
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and "step" in row:
                rows.append(row)
        if not rows:
            raise MissingError(f"{path.name} has no line that can be read")
        return rows

    @cached_property
    def supervised(self) -> dict[str, Any] | None:
        """Figures of the supervised baseline; None if there was no such run."""
        try:
            return _read_object(self.baseline / EVALUATION, self._baseline_within)
        except MissingError:
            return None

    def found(self, name: str) -> Any:
        """A part of evaluation.json."""
        try:
            return self.evaluation[name]
        except KeyError:
            raise MissingError(
                f"evaluation.json has no {name!r}: the data has no images for it, or"
                f" `ropaws evaluate {self.run}` has not been run with this version"
            ) from None

    @cached_property
    def thumbnails(self) -> dict[str, Any]:
        """Data URIs by key; none where the run has no images, or the gallery is missing or damaged."""
        try:
            found = self.gallery["thumbnails"]
        except (MissingError, KeyError):
            return {}
        return found if isinstance(found, dict) else {}

    def thumbnail(self, key: str) -> str | None:
        uri = self.thumbnails.get(key)
        return uri if isinstance(uri, str) and uri.startswith("data:image/") else None


def figure(value: object) -> float | None:
    """A figure as it should be; None for anything else that a damaged file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def _read_object(path: Path, run: Path) -> dict[str, Any]:
    try:
        value = read_json(path, inside=run)
    except FileNotFoundError:
        made = path.name in (EVALUATION, GALLERY)
        remedy = f"`ropaws evaluate {run}` writes one" if made else "it is written by training: restore it"
        raise MissingError(f"there is no {path.name}; {remedy}") from None
    except (OSError, ValueError) as error:
        raise MissingError(f"{path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise MissingError(f"{path.name} is not a JSON object")
    return value
