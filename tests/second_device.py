"""A second device, made in Python: it computes as the CPU does, and refuses what a GPU would refuse.

A tensor of it holds one of the CPU. Tensors of both in one operation are an error, as are generators of the
CPU for its numbers; NumPy cannot read it. `register()` makes it known to torch in this process, for good.
"""

import functools

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
aten = torch.ops.aten
COPIES = {aten.copy_, aten._copy_from, aten._to_copy}  # between devices
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
JOINING = {aten.cat, aten.stack}  # not even single numbers of another device
# They would make an empty tensor and change its shape.
FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm",
             "randperm.generator")  # fmt: skip
_library = []  # torch forgets what nobody holds


class SecondTensor(torch.Tensor):
    """One of the second device."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"SecondTensor({self.held})"

    def tolist(self):
        return self.held.tolist()

    def new_tensor(self, values, *, dtype=None, device=NAME):
        return torch.tensor(values, dtype=dtype or self.dtype).to(device)

    def numpy(self):
        raise TypeError("NumPy cannot read a tensor of the second device; use .cpu() first")

    def __array__(self, *_):
        return self.numpy()

    def __reduce_ex__(self, protocol):
        return self.held.__reduce_ex__(protocol)  # a file of it is read on any machine

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def compute(operation, args, kwargs):
    """On the CPU, with what the tensors hold; the results are of the device that is asked for."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    ours = [value for value in given if isinstance(value, SecondTensor)]
    asked = kwargs.get("device")
    here = bool(ours) if asked is None else torch.device(asked).type == NAME
    _refuse_mixtures(operation, args, kwargs, given, here)
    args, kwargs = tree_map(lambda v: v.held if isinstance(v, SecondTensor) else v, (args, kwargs))
    if asked is not None:
        kwargs = {**kwargs, "device": "cpu"}
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": False}
    known = {id(value.held): value for value in ours}  # an operation in place returns what it was given

    def wrapped(value):
        if not isinstance(value, torch.Tensor) or not here:
            return value
        return known[id(value)] if id(value) in known else SecondTensor(value)

    found = tree_map(wrapped, operation(*args, **kwargs))
    if operation.overloadpacket is aten.squeeze_:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
            operation(ours[0], *args[1:])  # the shape that torch sees, besides that of what is held
    for value in ours:  # no other operation may change a shape in place: see FACTORIES
        assert value.shape == value.held.shape, f"{operation} has changed a shape in place"
    return found


def _refuse_mixtures(operation, args, kwargs, given, here):
    kind = operation.overloadpacket
    if here and any(isinstance(value, torch.Generator) for value in tree_leaves((args, kwargs))):
        raise RuntimeError(f"{operation}: a generator of the CPU for numbers of the second device")
    if kind in COPIES:
        return
    if kind in INDEXING and isinstance(args[0], SecondTensor):
        given = [args[0], *(value for value in args[2:] if isinstance(value, torch.Tensor))]
    strangers = [value for value in given if not isinstance(value, SecondTensor)]
    if len(strangers) < len(given) and any(value.ndim or kind in JOINING for value in strangers):
        shapes = [tuple(value.shape) for value in strangers]
        raise RuntimeError(f"{operation}: tensors {shapes} of the CPU beside some of the second device")


def register():
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operation, *args, **kwargs: compute(operation, args, kwargs), "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(aten, packet), overload or "default")
        own.impl(name, functools.partial(_factory, operation), "PrivateUse1")
    _library.extend((library, own))
    for name in ("tensor", "as_tensor"):  # torch cannot make these where a device is in Python
        setattr(torch, name, functools.partial(_made_on_the_cpu, getattr(torch, name)))


def _factory(operation, *args, **kwargs):
    return compute(operation, args, kwargs)


def _made_on_the_cpu(make, values, *, device=None, **settings):
    made = make(values, **settings)
    return made if device is None else made.to(device)
