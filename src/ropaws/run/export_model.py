"""export(run): one file that labels images without ropaws, verified against the run before it is written."""

import importlib.metadata
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.export import ExportedProgram

from ropaws.core.features import FeatureRows, Features
from ropaws.core.files import check_out_folder, refuse_link, replacing
from ropaws.core.labels import UNLABELED
from ropaws.core.randomness import ANALYSIS, generator
from ropaws.core.records import Outputs
from ropaws.core.run_layout import ONNX, PT2
from ropaws.embedding.backbones import Encoder
from ropaws.methods import method_name
from ropaws.pool.corpus import Images, features_of, pixels_of
from ropaws.run import export_graph
from ropaws.run.export_graph import (
    FEATURES,
    IMAGES,
    OUTPUTS,
    Answers,
    ExportedModel,
    OnnxModel,
    quiet,
    record,
)
from ropaws.run.outputs import readable_among
from ropaws.run.predict import Predictor, square_pixels
from ropaws.run.run import Run, open_run

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
MOST_COST = 0.005  # of accuracy: half a point
CALIBRATED, MEASURED = 128, 1000  # images, at most
# Share of the convolutions, from the first one on, that stay in float32: they hold few of the weights and of
# the work, and rounding them changes most of the labels that change (`python benchmarks/export.py`).
EARLY = 0.25
TURNS = 5  # of the two files, one after the other
POOL_IMAGES, CALIBRATION = "pool images", "pool images, which int8 was calibrated on too"
TEST, TRAIN, GENERATED = "test images", "training images", "generated images"


class Samples(NamedTuple):
    """What an exported file is tried on."""

    inputs: NDArray[np.uint8] | NDArray[np.float32]  # (n, 3, size, size), or (n, d) features
    labels: NDArray[np.int64]  # (n,) class, or below 0 where none is known
    source: str  # what they are, for a person


class Quantized(NamedTuple):
    """An int8 file, and what it costs."""

    model: Any  # onnx.ModelProto
    facts: dict[str, Any]  # for the metadata
    speedup: float  # against fp32, on this machine


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
    run = open_run(run, console=console)
    target = run.path / FILES[settings.format] if path is None else Path(path)
    check_target(target, settings.format, overwrite=overwrite)
    export_graph.check_one_network(run.config.model.backbone)
    if settings.format == "onnx":
        export_graph.check_installed()
    exact = run.in_full_precision()
    tried = samples_of(exact, VERIFIED)
    run.say("Recording the prediction as a graph")
    program = record(ExportedModel(exact))
    metadata = describe(exact, settings)
    verification = Verification(run, exact, tried, float(metadata["threshold"]), run.say)
    if settings.format == "torch":
        content = _torch_file(program, metadata, verification)
    else:
        content = _onnx_file(program, metadata, verification, int8=settings.int8)
    with replacing(target) as temporary:
        temporary.write_bytes(content)
    return ExportedFile(target, len(content), metadata)


def _torch_file(program: ExportedProgram, metadata: dict[str, Any], verification: "Verification") -> bytes:
    """The content of a .pt2 file; what was verified joins the metadata."""
    call = export_graph.TorchModel(export_graph.to_pt2(program, metadata))
    metadata["verification"] = verification.of(call, "torch")
    return export_graph.to_pt2(program, metadata)


def _onnx_file(
    program: ExportedProgram, metadata: dict[str, Any], verification: "Verification", *, int8: bool
) -> bytes:
    """The content of an .onnx file; what was verified joins the metadata."""
    exact = verification.exact
    graph = export_graph.to_onnx(program, metadata["preprocessing"]["input"])
    export_graph.check_size(graph.ByteSize())
    call = export_graph.OnnxModel(graph.SerializeToString())
    metadata["verification"] = verification.of(call, "onnxruntime")
    if int8:
        graph, metadata["int8"] = _in_int8(exact, graph, verification.threshold, verification.say)
    content: bytes = export_graph.with_metadata(graph, metadata).SerializeToString()
    return content


def check_target(path: Path, format: Format, *, overwrite: bool) -> None:
    """Raise an error if the file cannot be written there, before minutes of work."""
    ending = Path(FILES[format]).suffix
    if path.suffix.lower() != ending:
        raise ValueError(f"--out: a file of format {format} must end in {ending}, got {path.name}")
    check_place(path, overwrite=overwrite)


def check_place(path: Path, *, overwrite: bool) -> None:
    check_out_folder(path.parent)
    refuse_link(path)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} is there already; replace it with --overwrite, or choose another --out"
        )


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


@dataclass(frozen=True)
class Verification:
    """Compares a file with the run on the same inputs, before it is written."""

    run: Run  # in its own precision
    exact: Run  # the same in float32
    tried: Samples
    threshold: float  # of the file
    say: Callable[[str], None]

    def of(self, call: Call, runtime: str) -> dict[str, Any]:
        """What was compared and how far apart the two are, for the metadata.

        Args:
            call: Runs the content of the file.
            runtime: The package that does.

        Raises:
            ValueError: They are further apart than TOLERANCE.
        """
        found = self._answers(call)
        apart = differences(found, _outputs(self.exact, self.tried), self.exact)
        for name, value in apart.items():
            if not value <= TOLERANCE:  # not a number is not either
                raise ValueError(
                    f"the exported file does not say what {self.run.path} says: {name} is off by {value:.3g},"
                    f" more than {TOLERANCE:g}; nothing was written, please open an issue"
                )
        facts: dict[str, Any] = {
            "runtime": f"{runtime} {importlib.metadata.version(runtime)}",
            "on": f"{len(self.tried.inputs)} {self.tried.source}",
            "tolerance": TOLERANCE,
            "differences": apart,
        }
        half = next((m.autocast for m in self.run.model.modules() if isinstance(m, Encoder)), None)
        if half is not None:
            kind = str(half).removeprefix("torch.")
            facts["run_precision"] = {"type": kind, **self._in_own_precision(found)}
        for line in verification_lines(facts):
            self.say(line)
        return facts

    def _answers(self, call: Call) -> Answers:
        inputs = self.tried.inputs
        cuts = [0, 1, *range(1 + BATCH, len(inputs), BATCH), len(inputs)]  # one image, then batches
        parts = [call(inputs[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
        return Answers(*(torch.from_numpy(np.concatenate(values)) for values in zip(*parts, strict=True)))

    def _in_own_precision(self, found: Answers) -> dict[str, Any]:
        """What the file says otherwise than `ropaws predict` does here."""
        own = _outputs(self.run, self.tried)
        labels = own.probs.argmax(dim=1) != found.probabilities.argmax(dim=1)
        verdicts = (own.in_domain < self.threshold) != (found.in_domain < self.threshold)
        return {
            "images": len(labels),
            "other_labels": int(labels.sum()),
            "other_verdicts": int(verdicts.sum()),
            "probabilities": float((own.probs - found.probabilities).abs().max()),
            "in_domain": float((own.in_domain - found.in_domain).abs().max()),
        }


def verification_lines(facts: dict[str, Any]) -> list[str]:
    """What Verification has found, in words: for the terminal and for the model card."""
    lines = [
        f"Verified with {facts['runtime']} on {facts['on']}: off by at most"
        f" {max(facts['differences'].values()):.1e}, allowed {facts['tolerance']:g}"
    ]
    if own := facts.get("run_precision"):
        lines.append(
            f"The file computes in float32, `ropaws predict` in {own['type']} here: of these"
            f" {own['images']} images {own['other_labels']} get another label and {own['other_verdicts']}"
            f" change between in-class and out-of-class; probabilities differ by up to"
            f" {own['probabilities']:.3f}, in-domain probabilities by up to {own['in_domain']:.3f}"
        )
    return lines


def _outputs(run: Run, tried: Samples) -> Outputs:
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


def _measured(run: Run, calibrated: torch.Tensor) -> Samples:
    labels = run.corpus.test_labels
    known = torch.arange(len(labels))[labels >= 0]
    if len(known):
        rows = known[torch.linspace(0, len(known) - 1, min(MEASURED, len(known))).long()]
        return Samples(squares(run, run.corpus.test_images, rows), labels[rows].numpy(), "test images")
    rows = pool_rows(run, MEASURED, but=calibrated)
    source = CALIBRATION if bool(torch.isin(rows, calibrated).all()) else POOL_IMAGES
    return Samples(squares(run, run.corpus.train_images, rows), np.full(len(rows), UNLABELED), source)


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


def compare(before: OnnxModel, after: OnnxModel, measured: Samples, threshold: float) -> dict[str, Any]:
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


def samples_of(run: Run, most: int) -> Samples:
    """Test images of the run, or else training images; generated ones where its images are gone."""
    try:
        corpus = run.corpus
    except (OSError, ValueError) as error:
        run.say(f"The images are not available ({error}); generated ones are used instead.")
        return _generated(run, most)
    if len(corpus.test_images):
        rows = _draw(torch.arange(len(corpus.test_images)), most)
        return Samples(squares(run, corpus.test_images, rows), corpus.test_labels[rows].numpy(), TEST)
    rows = pool_rows(run, most)
    return Samples(squares(run, corpus.train_images, rows), np.full(len(rows), UNLABELED), TRAIN)


def pool_rows(run: Run, most: int, *, but: Tensor | None = None) -> Tensor:
    """Readable training images that have no label; labeled ones too if there are no others.

    but: images to leave out, if there are others
    """
    everything = torch.arange(len(run.corpus.train_images))
    rows = everything[~torch.isin(everything, run.facts.split.indices)]
    rows = rows if len(rows) else everything
    if but is not None:
        rest = rows[~torch.isin(rows, but)]
        rows = rest if len(rest) else rows
    return readable_among(run.corpus.train_images, _draw(rows, most))


def squares(run: Run, images: Images, rows: Tensor) -> NDArray[np.uint8] | NDArray[np.float32]:
    """The inputs that `ropaws predict` would make of these images."""
    if run.facts.feature_dims:
        features = features_of(images)
        assert isinstance(features, Features)
        return features[rows].float().numpy()
    pixels = pixels_of(images)[rows]  # (n, channels, h, w)
    size = run.config.data.image_size
    if tuple(pixels.shape[1:]) == (3, size, size):
        return np.ascontiguousarray(pixels.numpy())
    made = [square_pixels(image.permute(1, 2, 0).numpy(), size) for image in pixels]
    return np.ascontiguousarray(np.stack(made).transpose(0, 3, 1, 2))


def _draw(rows: Tensor, most: int) -> Tensor:
    """So many of them, always the same ones."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=generator(0, ANALYSIS))[:most]].sort().values


def _generated(run: Run, count: int) -> Samples:
    """Smooth random images, or random rows: for a run whose images are gone."""
    random = np.random.default_rng(0)
    if run.facts.feature_dims:
        rows = random.standard_normal((count, run.facts.feature_dims)).astype(np.float32)
        return Samples(rows, np.full(count, UNLABELED), GENERATED)
    size = run.config.data.image_size
    coarse = random.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    smooth = np.stack([square_pixels(image, size) for image in coarse])
    return Samples(np.ascontiguousarray(smooth.transpose(0, 3, 1, 2)), np.full(count, UNLABELED), GENERATED)
