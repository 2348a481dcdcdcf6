"""A run as one graph: images in, class probabilities, in-domain probability, nearest labeled image out.

The graph is what `Method.predict` does, recorded by torch.export, with the labeled images inside as numbers.
A method may look at its own state in Python on the way (a temperature from the labels, a basis of
prototypes). So everything that does not depend on the images is computed while the graph is recorded, and
only the rest is part of it.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # no public name tells what is being recorded
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ropaws import equations as eq
from ropaws.data import image_ops
from ropaws.data.features import moderate_by
from ropaws.methods import LabeledEmbeddings, Method, method_name
from ropaws.models import Encoder
from ropaws.runs.run import Run

IMAGES, FEATURES = "images", "features"  # names of the input
OUTPUTS = ("probabilities", "in_domain", "nearest", "similarity")
BATCH = "batch"  # name of the first dimension
SYMBOLS = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class Answers(NamedTuple):
    """What the graph says of n images."""

    probabilities: Tensor  # (n, c) rows sum to 1
    in_domain: Tensor  # (n,) probability of belonging to any class
    nearest: Tensor  # (n,) position of the most similar labeled image
    similarity: Tensor  # (n,) cosine to it


class ConstantsFirst(TorchFunctionMode):
    """While a graph is recorded: what does not depend on its input is computed at once, with real numbers."""

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

    @property
    def input_name(self) -> str:
        return FEATURES if self.feature_dims else IMAGES

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
        """As Predictor.look and center_view: gray where the run is, resized, normalized."""
        pixels = squares.float()
        if len(self.normalize.mean) == 1:
            pixels = image_ops.grayscale(pixels).round()
        if self.size != self.view.size:
            resize = image_ops.side_resize(self.size, self.view.size, self.view.interpolation)
            pixels = pixels @ resize.T.contiguous()
            if self.view.interpolation == "bicubic":  # which overshoots at edges
                pixels = pixels.clamp(0, 255)
            pixels = resize @ pixels
            if self.view.interpolation == "bicubic":
                pixels = pixels.clamp(0, 255)
        return self.normalize.apply_(pixels / 255)


def _without_parameters(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode in which all weights are buffers: constants of the graph."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
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
                model, (model.example(2),), dynamic_shapes=({0: Dim(BATCH)},), strict=False
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
