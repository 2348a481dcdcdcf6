"""export(run): one file that labels images without ropaws, verified against the run before it is written."""

import importlib.metadata
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from ropaws.batch import Outputs
from ropaws.data.features import FeatureRows
from ropaws.methods import method_name
from ropaws.models import Encoder
from ropaws.prediction import onnx_files, pt2_files
from ropaws.prediction.exported import FEATURES, IMAGES, OUTPUTS, Answers, ExportedModel, record
from ropaws.prediction.own_squares import OwnInputs, own_inputs
from ropaws.prediction.predict import Predictor
from ropaws.prediction.quantize import cost_sentence, quantized
from ropaws.runs.atomic import refuse_link, replacing
from ropaws.runs.layout import ONNX, PT2
from ropaws.runs.run import Run, open_run

Format = Literal["onnx", "torch"]
Call = Callable[[NDArray[Any]], list[NDArray[Any]]]
TOLERANCE = 1e-3  # of probabilities and similarities, between the file and the run in float32
VERIFIED = 32  # images
BATCH = 16
FILES = {"onnx": ONNX, "torch": PT2}
MEANING = {
    "probabilities": "of each class of class_names; a row sums to 1",
    "in_domain": "probability of belonging to any of the classes; below threshold an image is out-of-class",
    "nearest": "position of the most similar labeled image in labeled_names and labeled_classes",
    "similarity": "cosine to it, -1 to 1",
}


class ExportedFile(NamedTuple):
    """A file that was written."""

    path: Path
    bytes: int
    metadata: dict[str, Any]  # as in the file


@dataclass(frozen=True)
class ExportSettings:
    """What the file is to be."""

    format: Format = "onnx"
    int8: bool = False
    threshold: float | None = None
    names: bool = True

    def __post_init__(self) -> None:
        if self.format not in FILES:
            raise ValueError(f"format must be onnx or torch, got {self.format!r}")
        if self.int8 and self.format != "onnx":
            raise ValueError(f"int8 goes with format onnx, got {self.format}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a probability from 0 to 1, got {self.threshold}")


def export(
    run: Path | str | Run,
    path: Path | str | None = None,
    *,
    format: Format = "onnx",
    int8: bool = False,
    threshold: float | None = None,
    names: bool = True,
    overwrite: bool = False,
    console: Console | None = None,
) -> ExportedFile:
    """Write a run as one file that needs no ropaws: network, labeled images, class names, threshold.

    The file takes uint8 images (n, 3, size, size), or float32 features (n, d) for a run on features, and
    gives class probabilities, in-domain probability, and the nearest labeled image with its similarity. What
    it says is compared with the run before it is written. Its metadata has class names, threshold, and how
    images are to be prepared.

    Args:
        run: A run folder.
        path: The file; by default model.onnx or model.pt2 in the run folder.
        format: "onnx", for onnxruntime and others, or "torch", for torch.export.load.
        int8: Compute convolutions in whole numbers, if that costs at most half a point of accuracy.
        threshold: In-domain probability below which an image is out-of-class; by default the run's.
        names: Keep the names of the labeled images in the file, as the run has them.
        overwrite: Replace a file that is there.
        console: Where progress goes; standard error by default.

    Returns:
        The file, its size, and the metadata in it.

    Raises:
        FileExistsError: The file is there already.
        ValueError: A package is missing, the run cannot be exported, the file does not say what the run
            says, or int8 costs too much.
    """
    settings = ExportSettings(format=format, int8=int8, threshold=threshold, names=names)
    return export_run(open_run(run, console=console), path, settings, overwrite=overwrite)


def export_run(
    run: Run, path: Path | str | None, settings: ExportSettings, *, overwrite: bool = False
) -> ExportedFile:
    """As export."""
    target = run.path / FILES[settings.format] if path is None else Path(path)
    check_target(target, settings.format, overwrite=overwrite)
    if settings.format == "onnx":
        onnx_files.check_installed()
    exact = run.in_full_precision()
    say = _speaker(run)
    model = ExportedModel(exact)
    tried = own_inputs(exact, VERIFIED)
    say("Recording the prediction as a graph")
    program = record(model)
    metadata = describe(exact, settings)
    if settings.format == "torch":
        call = pt2_files.TorchModel(pt2_files.to_pt2(program, metadata))
        metadata["verification"] = verify(run, exact, call, tried, "torch", say)
        content = pt2_files.to_pt2(program, metadata)
    else:
        graph = onnx_files.to_onnx(program, model.input_name)
        onnx_files.check_size(graph.ByteSize())
        metadata["verification"] = verify(
            run, exact, onnx_files.OnnxModel(graph.SerializeToString()), tried, "onnxruntime", say
        )
        if settings.int8:
            graph, metadata["int8"] = _in_int8(exact, graph, float(metadata["threshold"]), say)
        content = onnx_files.with_metadata(graph, metadata).SerializeToString()
    with replacing(target) as temporary:
        temporary.write_bytes(content)
    return ExportedFile(target, len(content), metadata)


def check_target(path: Path, format: Format, *, overwrite: bool) -> None:
    """Raise an error if the file cannot be written there, before minutes of work."""
    ending = Path(FILES[format]).suffix
    if path.suffix.lower() != ending:
        raise ValueError(f"--out: a file of format {format} must end in {ending}, got {path.name}")
    check_place(path, overwrite=overwrite)


def check_place(path: Path, *, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: no folder {path.parent}; create it first")
    refuse_link(path)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} is there already; replace it with --overwrite, or choose another --out"
        )
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"--out: {path.parent} cannot be written to; choose another place")


def describe(run: Run, settings: ExportSettings) -> dict[str, Any]:
    """The metadata, but for what is measured."""
    from ropaws import __version__

    facts = run.facts
    threshold = run.threshold if settings.threshold is None else settings.threshold
    kept = facts.labeled_names or tuple(map(str, facts.split.indices.tolist()))
    return {
        "ropaws": __version__,
        "method": method_name(run.method),
        "class_names": list(facts.class_names),
        "threshold": float(threshold),
        "preprocessing": preprocessing(run),
        "outputs": MEANING,
        "labeled_names": list(kept) if settings.names else [],
        "labeled_classes": facts.split.labels.tolist(),
    }


def preprocessing(run: Run) -> dict[str, Any]:
    """What the caller does before the graph, and what the graph does itself."""
    if dims := run.facts.feature_dims:
        return {"input": FEATURES, "type": "float32", "shape": ["batch", dims]}
    size, view, normalize = run.config.data.image_size, run.config.augment, run.facts.normalize
    gray = ["grayscale (ITU-R 601)"] if len(normalize.mean) == 1 else []
    return {
        "input": IMAGES,
        "type": "uint8",
        "shape": ["batch", 3, size, size],
        "size": size,
        "before": [
            "decode; a JPEG may be decoded at a half, quarter or eighth if that still covers the size",
            "turn upright as EXIF says",
            "cut out the largest central square",
            "convert to RGB, transparency over white",
            f"resize to {size} x {size} with Pillow's BILINEAR, reducing_gap=3.0",
        ],
        "inside": [
            *gray,
            f"resize to {view.size} x {view.size}, antialiased {view.interpolation}",
            f"divide by 255, subtract {list(normalize.mean)}, divide by {list(normalize.std)}",
        ],
    }


def verify(
    run: Run, exact: Run, call: Call, tried: OwnInputs, runtime: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare the file with the run on the same inputs.

    Args:
        run: The run in its own precision.
        exact: The same in float32.
        call: Runs the content of the file.
        tried: Inputs.
        runtime: The package that runs it.
        say: Shows a line.

    Returns:
        What was compared and how far apart the two are, for the metadata.

    Raises:
        ValueError: They are further apart than TOLERANCE.
    """
    cuts = [0, 1, *range(1 + BATCH, len(tried.inputs), BATCH), len(tried.inputs)]  # one image, then batches
    parts = [call(tried.inputs[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    found = Answers(*(torch.from_numpy(np.concatenate(values)) for values in zip(*parts, strict=True)))
    apart = differences(found, _outputs(exact, tried), exact)
    for name, value in apart.items():
        if not value <= TOLERANCE:  # not a number is not either
            raise ValueError(
                f"the exported file does not say what {run.path} says: {name} is off by {value:.3g}, more"
                f" than {TOLERANCE:g}; nothing was written, please open an issue"
            )
    version = importlib.metadata.version(runtime)
    checked = f"{len(tried.inputs)} {tried.source}"
    say(
        f"Verified with {runtime} {version} on {checked}: off by at most {max(apart.values()):.1e}, allowed"
        f" {TOLERANCE:g}"
    )
    facts = {"runtime": f"{runtime} {version}", "on": checked, "tolerance": TOLERANCE, "differences": apart}
    half = next((m.autocast for m in run.model.modules() if isinstance(m, Encoder)), None)
    if half is not None:
        own = _outputs(run, tried)
        same = float((own.probs.argmax(dim=1) == found.probabilities.argmax(dim=1)).double().mean())
        off = float((own.probs - found.probabilities).abs().max())
        kind = str(half).removeprefix("torch.")
        facts["run_precision"] = {"type": kind, "same_label": same, "largest_difference": off}
        say(
            f"The file computes in float32; `ropaws predict` computes in {kind} here: {same:.1%} of these"
            f" images get the same label, probabilities differ by up to {off:.2f}"
        )
    return facts


def _outputs(run: Run, tried: OwnInputs) -> Outputs:
    inputs = torch.from_numpy(tried.inputs)
    return run.outputs(FeatureRows(inputs)) if run.facts.feature_dims else Predictor(run).look(inputs)


def differences(found: Answers, expected: Outputs, run: Run) -> dict[str, float]:
    """Largest difference of each output; of `nearest`, how much less similar than the nearest it is."""
    cosines = expected.embedding @ run.support.embeddings.T
    best = cosines.amax(dim=1)
    values = (
        (found.probabilities - expected.probs).abs(),
        (found.in_domain - expected.in_domain).abs(),
        best - cosines.gather(1, found.nearest[:, None]).squeeze(1),
        (found.similarity - best).abs(),
    )
    return {name: float(value.max()) for name, value in zip(OUTPUTS, values, strict=True)}


def _in_int8(
    run: Run, graph: Any, threshold: float, say: Callable[[str], None]
) -> tuple[Any, dict[str, Any]]:
    say("Calibrating int8 on images of the run")
    made = quantized(run, graph, threshold=threshold)
    sizes = [part.ByteSize() / 2**20 for part in (made.model, graph)]
    say(
        f"int8: {cost_sentence(made.facts)}; {made.facts['same_out_of_class']:.1%} stay in-class or"
        f" out-of-class; {sizes[0]:.1f} MB instead of {sizes[1]:.1f}; {made.speedup:.2f} times as fast as"
        " float32 on this machine"
    )
    return made.model, made.facts


def _speaker(run: Run) -> Callable[[str], None]:
    return lambda line: run.console.print(line, highlight=False, markup=False, soft_wrap=True)
