"""What `ropaws export` gives: speed against `ropaws predict`, size, agreement, and the cost of int8.

python benchmarks/export.py --data FOLDER [--work FOLDER]     writes results/export.json

FOLDER of --data has cifar10.npz (bench_data.py). Its images become JPEGs of 320 x 240 pixels; vehicles are
the classes, with ten labels each, and animals are in the pool and in the test images without a class. A run
on frozen features of EfficientNet-Lite0 is trained in --work, once, and exported in three ways. Whole
commands are timed as processes, turn by turn, the networks alone in this process on batches of 16 images.
"""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_collections import _arrays
from PIL import Image
from timing import interleaved, median_ratio, write_results

from ropaws import Run, export, train_on
from ropaws.methods import encoder_of
from ropaws.run.export_graph import IMAGES, ExportedModel, OnnxModel, TorchModel, record, to_onnx, to_pt2
from ropaws.run.export_model import (
    CALIBRATED,
    EARLY,
    MOST_COST,
    Samples,
    compare,
    pool_rows,
    quantize,
    squares,
)

VEHICLES, ANIMALS = (0, 1, 8, 9), (2, 3, 6, 7)
LABELS, POOL, OTHERS, TESTS = 10, 150, 100, 200  # images per class
BATCH = 16
SCRIPT = Path(__file__).parent.parent / "examples/label_folder.py"


def write_photos(data: Path, folder: Path) -> None:
    """labeled/CLASS, pool, and test/CLASS with the class "other", as JPEGs."""
    cifar = _arrays(data, "cifar10")
    for kind in (*VEHICLES, *ANIMALS):
        known = kind in VEHICLES
        labels, pool, tests = (LABELS, POOL, TESTS) if known else (0, OTHERS, TESTS // 4)
        for place, row in enumerate(np.flatnonzero(cifar.labels == kind)[: labels + pool]):
            name = f"labeled/{kind}/{place}" if place < labels else f"pool/{kind}-{place}"
            _save(cifar.images[row], folder / f"{name}.jpg")
        for place, row in enumerate(np.flatnonzero(cifar.test_labels == kind)[:tests]):
            _save(cifar.test_images[row], folder / f"test/{kind if known else 'other'}/{kind}-{place}.jpg")


def _save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subject = Image.fromarray(pixels).resize((240, 240), Image.Resampling.BICUBIC)
    photo = subject.resize((320, 240))
    photo.paste(subject, (40, 0))
    photo.save(path, quality=90)


def commands(run: Path, model: Path, folder: Path, work: Path, turns: int) -> dict[str, Any]:
    """Whole commands on the same folder: starting, reading, computing, writing."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}

    def script() -> None:
        with (work / "labels.txt").open("w") as out:
            subprocess.run([sys.executable, SCRIPT, model, folder], stdout=out, check=True, env=environment)

    def predict() -> None:
        line = [sys.executable, "-m", "ropaws", "predict", run, folder, "--out", work / "labels.csv"]
        subprocess.run(line, capture_output=True, check=True, env=environment)

    seconds = interleaved({"ropaws predict": predict, "label_folder.py": script}, turns)
    ratio = median_ratio(seconds["ropaws predict"], seconds["label_folder.py"])
    return {"images": len(list(folder.rglob("*.jpg"))), "script_times_as_fast": round(ratio, 2)} | _agreement(
        work
    )


def _agreement(work: Path) -> dict[str, float]:
    """Share of images that both commands call the same."""
    with (work / "labels.csv").open(newline="") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    lines = [line.split() for line in (work / "labels.txt").read_text().splitlines()]
    same = [
        label == ("out-of-class" if rows[os.path.abspath(path)]["out_of_class"] == "True" else
                  rows[os.path.abspath(path)]["label"])
        for path, label, *_ in lines
    ]  # fmt: skip
    return {"same_answer": float(np.mean(same))}


def networks(run: Run, files: dict[str, Any], inputs: np.ndarray, turns: int) -> dict[str, float]:
    """Times as fast as the run in float32, from pixels to probabilities, with the threads of the machine."""
    exact = run.in_full_precision()
    tasks = {"run, float32": lambda: exact.outputs(torch.from_numpy(inputs))}
    if encoder_of(run.model).autocast is not None:
        tasks[f"run, {str(encoder_of(run.model).autocast).removeprefix('torch.')}"] = lambda: run.outputs(
            torch.from_numpy(inputs)
        )
    tasks |= {name: (lambda call=call: call(inputs)) for name, call in files.items()}
    seconds = interleaved(tasks, turns)
    return {name: round(median_ratio(seconds["run, float32"], own), 2) for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/export"))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    work, photos = options.work, options.work / "photos"
    if not photos.is_dir():
        write_photos(options.data, photos)
    if not (work / "run/model.safetensors").exists():
        train_on(photos / "labeled", photos / "pool", test=photos / "test", out=work / "run",
                 budget="2m")  # fmt: skip
    run = Run(work / "run")
    made = export(run, work / "model.onnx", overwrite=True)
    exact = run.in_full_precision()
    model = ExportedModel(exact)
    program = record(model)
    graph = to_onnx(program, IMAGES)
    labels = exact.corpus.test_labels
    known = torch.arange(len(labels))[labels >= 0]
    tests = Samples(squares(exact, exact.corpus.test_images, known), labels[known].numpy(), "test images")
    calibration = squares(exact, exact.corpus.train_images, pool_rows(exact, CALIBRATED))
    before = OnnxModel(graph.SerializeToString())
    ways = {"all convolutions": 0.0, f"all but the first {EARLY:.0%}": EARLY}
    int8 = {name: quantize(graph, calibration, early=early) for name, early in ways.items()}
    costs = {
        name: compare(before, OnnxModel(part.SerializeToString()), tests, exact.threshold)
        for name, part in int8.items()
    }
    content = to_pt2(program, {})
    chosen = int8[f"all but the first {EARLY:.0%}"]
    files = {
        "onnx": before,
        "onnx, int8": OnnxModel(chosen.SerializeToString()),
        "torch": TorchModel(content),
    }
    megabytes = {"onnx": made.bytes, "onnx, int8": chosen.ByteSize(), "torch": len(content)}
    write_results(
        "export",
        {
            "verification": made.metadata["verification"],
            "megabytes": {name: round(size / 2**20, 1) for name, size in megabytes.items()},
            "int8": costs,
            "int8_limit": MOST_COST,
            "int8_kept": costs[f"all but the first {EARLY:.0%}"]["cost"] <= MOST_COST,
            "times_as_fast": networks(run, files, tests.inputs[:BATCH], options.turns),
            "command": commands(
                work / "run", work / "model.onnx", photos / "test/other", work, options.turns
            ),
        },
    )


if __name__ == "__main__":
    main()
