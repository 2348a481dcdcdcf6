"""A run as one graph: images in, class probabilities, in-domain probability, nearest labeled image out.

The graph is what `Method.predict` does, recorded by torch.export, with the labeled images inside as numbers.
A method may look at its own state in Python on the way (a temperature from the labels, a basis of
prototypes). So everything that does not depend on the images is computed while the graph is recorded, and
only the rest is part of it. The graph becomes one file, .onnx or .pt2, which is run here as others run it.
"""

import contextlib
import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # no public name tells what is being recorded
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ropaws import equations as eq
from ropaws.core.features import moderate_by
from ropaws.embedding.backbones import Encoder, part_names
from ropaws.embedding.frozen_features import folded
from ropaws.methods import LabeledEmbeddings, Method, method_name
from ropaws.pool import image_ops
from ropaws.run.run import Run

IMAGES, FEATURES = "images", "features"  # names of the input
OUTPUTS = ("probabilities", "in_domain", "nearest", "similarity")
BATCH_AXIS = "batch"  # name of the first dimension
SYMBOLS = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class Answers(NamedTuple):
    """What the graph says of n images."""

    probabilities: Tensor  # (n, c) rows sum to 1
    in_domain: Tensor  # (n,) probability of belonging to any class
    nearest: Tensor  # (n,) position of the most similar labeled image
    similarity: Tensor  # (n,) cosine to it


class ConstantsFirst(TorchFunctionMode):
    """Computes what does not depend on the input at once, with real numbers, while a graph is recorded."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, SYMBOLS) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)


class _Parts(NamedTuple):
    """What the graph is made of. Not modules of their own, whose weights would be symbols too."""

    method: Method
    network: nn.Module
    support: LabeledEmbeddings


class ExportedModel(nn.Module):
    """The prediction of a run, for torch.export.

    Args:
        run: In full precision on the CPU: Run.in_full_precision.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.parts = _Parts(run.method, _without_parameters(run.model), run.support)
        self.feature_dims = run.facts.feature_dims
        self.size = run.config.data.image_size
        self.view = run.config.augment
        self.normalize = run.facts.normalize

    def example(self, rows: int) -> Tensor:
        """An input of so many rows."""
        if self.feature_dims:
            return torch.zeros(rows, self.feature_dims)
        return torch.zeros(rows, 3, self.size, self.size, dtype=torch.uint8)

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """inputs (n, 3, size, size) uint8, or (n, feature_dims) float32  ->  Answers"""
        method, network, support = self.parts
        with ConstantsFirst():
            view = self._moderate(inputs) if self.feature_dims else self._view(inputs)
            outputs = method.predict(network, view, support)
            similarity, nearest = eq.cosine(outputs.embedding, support.embeddings).max(dim=1)
            return tuple(Answers(outputs.probs, outputs.in_domain, nearest, similarity))

    def _moderate(self, rows: Tensor) -> Tensor:
        return moderate_by(rows, rows.abs().amax(dim=1, keepdim=True))

    def _view(self, squares: Tensor) -> Tensor:
        """What Predictor.look and center_view do: gray where the run is, resized, normalized."""
        pixels = squares.float()
        if len(self.normalize.mean) == 1:
            pixels = image_ops.grayscale(pixels).round()
        if self.size != self.view.size:
            resize = image_ops.side_resize(self.size, self.view.size, self.view.interpolation)
            across = resize.T.contiguous()
            pixels = pixels @ across
            if self.view.interpolation == "bicubic":  # which overshoots at edges
                pixels = pixels.clamp(0, 255)
            # As rows of a matrix: onnxruntime refuses an empty batch in any other product from the left.
            count, channels = pixels.shape[:2]
            columns = pixels.mT.reshape(count * channels * self.view.size, self.size)
            pixels = (columns @ across).reshape(count, channels, self.view.size, self.view.size).mT
            if self.view.interpolation == "bicubic":
                pixels = pixels.clamp(0, 255)
        return self.normalize.apply_(pixels / 255)


def _without_parameters(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode in which all weights are buffers: constants of the graph.

    The norms of a frozen backbone are folded, as everywhere in prediction.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, Encoder) and module.frozen:
            module.backbone = folded(module.backbone)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, weight.detach().contiguous())
        if isinstance(module, Encoder):
            module.autocast = None
    return model


def record(model: ExportedModel) -> ExportedProgram:
    """The graph of a run, for any number of rows.

    Raises:
        ValueError: The method does something that cannot be recorded.
    """
    try:
        with torch.no_grad(), quiet("torch.export", "torch.fx", "torch._export", "torch.fx.experimental"):
            program = torch.export.export(
                model, (model.example(2),), dynamic_shapes=({0: Dim(BATCH_AXIS)},), strict=False
            )
    except Exception as error:  # torch raises nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{method_name(model.parts.method)}.predict cannot be exported ({reason}); on what depends on the"
            " images it may use torch alone, and images.shape[0] instead of len(images)"
        ) from error
    for part in program.graph_module.modules():
        for node in getattr(getattr(part, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)  # paths on this machine, which would be in the file
    for name, value in program.constants.items():
        if isinstance(value, Tensor):  # one that is a part of another would be saved with all of it
            program.constants[name] = value.clone(memory_format=torch.contiguous_format)
    return program


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Loggers of libraries that announce what a person can do nothing about."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


NEEDS = "ropaws export --format onnx needs onnx, onnxscript and onnxruntime: pip install 'ropaws[export]'"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18
MOST_BYTES = 2**31 - 1  # that a file of this kind can have
PROVIDERS = ["CPUExecutionProvider"]


def check_one_network(backbone: str) -> None:
    """Raise an error if a run cannot be one graph."""
    if len(part_names(backbone)) > 1:
        raise ValueError(
            f"export: {backbone} sees several views of each image, and several networks together are no"
            " single graph; train a run with one of them"
        )


def check_installed() -> None:
    """Raise an error of one line if a package is missing."""
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        raise ValueError(NEEDS)


def to_onnx(program: ExportedProgram, input_name: str) -> Any:
    """The graph as an onnx.ModelProto, without traces of this machine."""
    with warnings.catch_warnings(), quiet("torch.onnx", "torch.onnx._internal.exporter", "onnxscript"):
        # torch and onnxscript announce their own plans; what counts is verified after this.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        converted = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[input_name],
            output_names=list(OUTPUTS),
        )
    assert converted is not None
    model = converted.model_proto
    symbols = {model.graph.input[0].type.tensor_type.shape.dim[0].dim_param}
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.ClearField("metadata_props")
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = BATCH_AXIS
    for item in (*model.graph.node, *model.graph.initializer, *model.functions, model.graph):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    return model


def with_metadata(model: Any, metadata: Mapping[str, Any]) -> Any:
    """The model with this metadata in place of its own, each value as JSON."""
    from ropaws import __version__

    del model.metadata_props[:]
    for name, value in metadata.items():
        model.metadata_props.add(key=name, value=json.dumps(value))
    model.producer_name, model.producer_version = "ropaws", __version__
    return model


def check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(
            f"--format onnx: one file can hold 2 GB, and this run takes {size / 2**30:.1f} GB; use"
            " --format torch"
        )


class OnnxModel:
    """An ONNX file of a run, run by onnxruntime on the CPU.

    Args:
        source: The file, or its content.
        threads: That compute; by default as many as there are cores.
    """

    def __init__(self, source: Path | bytes, *, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors only
        content = source if isinstance(source, bytes) else str(source)
        self.session = onnxruntime.InferenceSession(content, options, providers=PROVIDERS)
        self.input_name: str = self.session.get_inputs()[0].name

    def __call__(self, inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """inputs of n rows  ->  arrays in the order of OUTPUTS"""
        found: list[NDArray[Any]] = self.session.run(
            list(OUTPUTS), {self.input_name: np.ascontiguousarray(inputs)}
        )
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        found = self.session.get_modelmeta().custom_metadata_map
        return {name: json.loads(value) for name, value in found.items()}


METADATA = "ropaws.json"  # name of the extra file inside


def to_pt2(program: ExportedProgram, metadata: Mapping[str, Any]) -> bytes:
    """The content of the file."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA: json.dumps(metadata)})
    return buffer.getvalue()


class TorchModel:
    """A .pt2 file of a run, as whoever gets it would load it."""

    def __init__(self, content: bytes) -> None:
        extra = {METADATA: ""}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # arrays that cannot be written to
            self.network = torch.export.load(io.BytesIO(content), extra_files=extra).module()
        self.metadata: dict[str, Any] = json.loads(extra[METADATA])

    @torch.no_grad()
    def __call__(self, inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """inputs of n rows  ->  arrays in the order of OUTPUTS"""
        return [value.numpy() for value in self.network(torch.from_numpy(inputs))]
