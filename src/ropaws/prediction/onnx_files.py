"""ONNX files: a recorded graph as one file, and running it with onnxruntime."""

import importlib.util
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from ropaws.prediction.exported import BATCH, OUTPUTS, quiet

NEEDS = "ropaws export --format onnx needs onnx, onnxscript and onnxruntime: pip install 'ropaws[export]'"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18
MOST_BYTES = 2**31 - 1  # that a file of this kind can have
PROVIDERS = ["CPUExecutionProvider"]


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
                dim.dim_param = BATCH
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
