"""int8: the convolutions of an ONNX file in whole numbers, kept only if the labels stay what they are."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.prediction.exported import quiet
from ropaws.prediction.onnx_files import OnnxModel
from ropaws.prediction.own_squares import OwnInputs, pool_rows, squares
from ropaws.runs.run import Run

MOST_COST = 0.005  # of accuracy: half a point
CALIBRATED, MEASURED = 128, 1000  # images, at most
BATCH = 16
# Share of the convolutions, from the first one on, that stay in float32: they hold few of the weights and of
# the work, and rounding them changes most of the labels that change (`python benchmarks/export.py`).
EARLY = 0.25
TURNS = 5  # of the two files, one after the other
POOL, CALIBRATION = "pool images", "pool images, which int8 was calibrated on too"


class Quantized(NamedTuple):
    """An int8 file, and what it costs."""

    model: Any  # onnx.ModelProto
    facts: dict[str, Any]  # for the metadata
    speedup: float  # against fp32, on this machine


def quantized(run: Run, model: Any, *, threshold: float) -> Quantized:
    """The model with int8 convolutions, calibrated on unlabeled images of the run.

    The cost is the accuracy lost on in-class test images, or, where there are none, the share of unlabeled
    images outside of the calibration whose label changes, which no loss of accuracy can exceed.

    Args:
        run: In full precision.
        model: Its onnx.ModelProto.
        threshold: In-domain probability below which an image is out-of-class.

    Raises:
        ValueError: It has no convolutions, the images are gone, or the cost is more than half a point.
    """
    if not any(node.op_type == "Conv" for node in model.graph.node):
        raise ValueError("--int8 is for convolutions, and the network of this run has none; leave it out")
    try:
        rows = pool_rows(run, CALIBRATED)
        calibration = squares(run, run.corpus.train_images, rows)
        measured = _measured(run, rows)
    except OSError as error:
        raise ValueError(
            f"--int8 is calibrated on the images of the run, which are not available ({error}); restore them,"
            " or export without --int8"
        ) from None
    made = quantize(model, calibration)
    before, after = OnnxModel(model.SerializeToString()), OnnxModel(made.SerializeToString())
    facts = compare(before, after, measured, threshold) | {"calibration_images": len(calibration)}
    _check_cost(facts)
    return Quantized(made, facts, _speedup(before, after, measured.inputs[:BATCH]))


def _measured(run: Run, calibrated: torch.Tensor) -> OwnInputs:
    labels = run.corpus.test_labels
    known = torch.arange(len(labels))[labels >= 0]
    if len(known):
        rows = known[torch.linspace(0, len(known) - 1, min(MEASURED, len(known))).long()]
        return OwnInputs(squares(run, run.corpus.test_images, rows), labels[rows].numpy(), "test images")
    rows = pool_rows(run, MEASURED, but=calibrated)
    source = CALIBRATION if bool(torch.isin(rows, calibrated).all()) else POOL
    return OwnInputs(squares(run, run.corpus.train_images, rows), np.full(len(rows), -1), source)


def quantize(model: Any, calibration: NDArray[Any], *, early: float = EARLY) -> Any:
    """The model with int8 convolutions, but for the early ones; calibration (n, 3, size, size) uint8"""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = model.graph.input[0].name

    class Images(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest: Iterator[NDArray[Any]] = (
                calibration[row : row + 1] for row in range(len(calibration))
            )

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            image = next(self.rest, None)
            return None if image is None else {name: image}

    with tempfile.TemporaryDirectory() as folder, quiet("", "root"):
        prepared, out = Path(folder) / "prepared.onnx", Path(folder) / "int8.onnx"
        out.write_bytes(model.SerializeToString())
        quant_pre_process(str(out), str(prepared), skip_symbolic_shape=True)
        convolutions = [node.name for node in onnx.load(str(prepared)).graph.node if node.op_type == "Conv"]
        quantize_static(
            str(prepared),
            str(out),
            Images(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Clip", "Relu"],
            nodes_to_exclude=convolutions[: round(early * len(convolutions))],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(str(out))


def compare(before: OnnxModel, after: OnnxModel, measured: OwnInputs, threshold: float) -> dict[str, Any]:
    """What changes from one file to the other, and what that costs."""
    (old, inside, *_), (new, still_inside, *_) = (
        _in_batches(model, measured.inputs) for model in (before, after)
    )
    guesses, others = old.argmax(axis=1), new.argmax(axis=1)
    agreement = float((guesses == others).mean())
    facts: dict[str, Any] = {
        "images": len(measured.inputs),
        "measured_on": measured.source,
        "same_label": agreement,
        "same_out_of_class": float(((inside < threshold) == (still_inside < threshold)).mean()),
    }
    if (measured.labels >= 0).all():
        accuracies = {
            name: float((guess == measured.labels).mean())
            for name, guess in (("accuracy_fp32", guesses), ("accuracy", others))
        }
        return facts | accuracies | {"cost": accuracies["accuracy_fp32"] - accuracies["accuracy"]}
    return facts | {"cost": 1 - agreement}


def _in_batches(model: OnnxModel, inputs: NDArray[Any]) -> list[NDArray[Any]]:
    parts = [model(inputs[start : start + BATCH]) for start in range(0, len(inputs), BATCH)]
    return [np.concatenate(values) for values in zip(*parts, strict=True)]


def _check_cost(facts: dict[str, Any]) -> None:
    if facts["cost"] > MOST_COST:
        raise ValueError(
            f"--int8 would cost too much: {cost_sentence(facts)}; the limit is {100 * MOST_COST:g} points."
            " Export without --int8"
        )


def cost_sentence(facts: dict[str, Any]) -> str:
    """The cost in words."""
    where = f"{facts['images']:,} {facts['measured_on']}"
    if "accuracy" in facts:
        return f"accuracy {facts['accuracy']:.1%} instead of {facts['accuracy_fp32']:.1%} on {where}"
    return f"{1 - facts['same_label']:.1%} of {where} get another label"


def _speedup(before: OnnxModel, after: OnnxModel, inputs: NDArray[Any]) -> float:
    """Median over turns of the time of fp32 over that of int8."""
    ratios = []
    for _ in range(TURNS):
        began = time.perf_counter()
        before(inputs)
        between = time.perf_counter()
        after(inputs)
        ratios.append((between - began) / (time.perf_counter() - between))
    return median(ratios)
