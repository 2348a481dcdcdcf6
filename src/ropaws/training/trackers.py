"""Where the numbers of each step go: always metrics.jsonl, optionally TensorBoard and W&B."""

import importlib
import json
from pathlib import Path
from typing import Any, Literal, Protocol

from ropaws.core.files import JSON_FILE, check_regular, read_regular, write_text

TrackerName = Literal["tensorboard", "wandb"]


class Tracker(Protocol):
    def write(self, row: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one line of numbers per step. Opened to append, for runs that are resumed."""

    def __init__(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            check_regular(path, JSON_FILE, inside=path.parent)  # a pipe would let the training wait
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in RUN/tensorboard; steps that are taken again after a resume replace the old ones."""

    def __init__(self, run: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=start)

    def write(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run in RUN/wandb; with WANDB_MODE=offline nothing leaves the machine."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="ropaws", name=run.name, dir=str(run), config=config, resume="allow", id=run.name
        )

    def write(self, row: dict[str, float]) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All of them as one. Only the first process of a run has any."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def write(self, row: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write(row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def check_trackers(names: tuple[TrackerName, ...]) -> None:
    """Check that the packages are installed, before a run starts."""
    for name in names:
        module = "torch.utils.tensorboard" if name == "tensorboard" else name
        try:
            importlib.import_module(module)
        except ImportError:
            raise ValueError(f"train.log: {name} needs pip install 'ropaws[{name}]'") from None


def open_trackers(
    run: Path, metrics: str, names: tuple[TrackerName, ...], *, start: int, config: dict[str, Any]
) -> Trackers:
    check_trackers(names)
    trackers: list[Tracker] = [MetricsFile(run / metrics)]
    if "tensorboard" in names:
        trackers.append(TensorBoard(run, start))
    if "wandb" in names:
        trackers.append(WeightsAndBiases(run, config))
    return Trackers(trackers)


def drop_metrics_from(path: Path, step: int) -> None:
    """Forget the lines of steps that a resumed run will take again, and a half-written last line."""
    if path.exists():
        content = read_regular(path, JSON_FILE, inside=path.parent)
        lines = content.decode("utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) < step]
        text = "".join(f"{line}\n" for line in kept)
        write_text(path, text)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return float("inf")
