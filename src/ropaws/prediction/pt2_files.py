"""Files of torch.export: a recorded graph as one .pt2 file that plain torch loads."""

import io
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

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
