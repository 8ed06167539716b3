"""Checks of all that could break graphs: settings, pixels, gradients, changes after capture.

What may not change after capture is what the forward of a module depends on: weights, submodules
and hooks, its class, a ``forward`` set on the instance, and plain values, such as the active
adapter of a LoRA layer and its scaling, the ``eps`` of a norm, the rate of a dropout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from itertools import chain, repeat
from operator import attrgetter
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from encoders.contract import OUTPUT_FIELDS, GraphableEncoder, is_library

from .torch_internals import HOOKS, MODULES, SLOTS, slots_of, versions_of

BackendInUse: TypeAlias = Literal["cudagraph", "static", "eager"]
"""How batches run: "cudagraph" replays CUDA graphs, "static" runs the encoder on the same padded
buffers without graphs, and "eager" runs it without padding."""
Backend: TypeAlias = Literal["auto", BackendInUse]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
OnOverflow: TypeAlias = Literal["eager", "raise"]
"""Whether an item larger than every budget runs eagerly or raises an error."""
OVERFLOWS: tuple[OnOverflow, ...] = get_args(OnOverflow)
_REQUIRES_GRAD = attrgetter("requires_grad")
AS_IT_IS = nullcontext()
"""A context that changes nothing, which :func:`settle_modes` returns if no mode has to change."""
TensorSlot: TypeAlias = tuple[dict[str, object], str, Tensor]
"""A tensor of a module: the ``__dict__`` that holds it, its name there, and the tensor."""


def all_modules(roots: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the named roots and all modules inside them, each once.

    A key is the root's name and the module's path below it, joined by dots.
    """
    seen: set[nn.Module] = set()
    return {k: v for name, root in roots.items() for k, v in root.named_modules(seen, name)}


def plain_tensors(roots: Mapping[str, nn.Module]) -> list[TensorSlot]:
    """Return the tensors of modules in ``roots`` that are neither parameters nor buffers."""
    attribute_dicts = [vars(module) for module in all_modules(roots).values()]
    return [
        (attributes, name, value)
        for attributes in attribute_dicts
        for name, value in attributes.items()
        if isinstance(value, Tensor)
    ]


class WeightGuard:
    """Remembers all parameters, buffers, submodules and hooks of modules, and weight addresses.

    A graph reads weights at fixed addresses. A replay sees weights updated in place; after they are
    rebound (``load_state_dict(assign=True)``, ``.to()``, a submodule replaced) it would compute
    with the old ones. The old storages are kept in memory, so that the check may run during a
    replay. Hooks registered or removed after capture would have no effect on replays; ``hooks``
    says whether that is an error. The ``roots`` are the modules, by a name for messages.

    The ``attributes`` are the result of :func:`plain_tensors` before the encoder ran. Tensors that
    the run replaced are not checked: ``torch.nn.utils.prune`` and ``weight_norm`` compute a layer's
    weight in every forward from parameters, and those are checked.

    The ``values`` are the result of :func:`plain_values` before the encoder ran: they, classes and
    replaced forwards must stay as they are, because a replay would go on with the old ones. None
    checks none of them.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        attributes: Sequence[TensorSlot] = (),
        values: Sequence[ValueSlot] | None = None,
        *,
        hooks: bool,
    ) -> None:
        modules = all_modules(roots)
        self._forward_state = ForwardState({} if values is None else modules, values or ())
        self._names = [
            (name, kind) for name in modules for kind in (SLOTS + HOOKS if hooks else SLOTS)
        ]
        self._slots = [slots_of(modules[name], kind) for name, kind in self._names]
        self._captured_slots = [dict(slots) for slots in self._slots]
        everything = [(slots, *entry) for slots in self._slots for entry in slots.items()]
        tensors = [(slots, name, x) for slots, name, x in everything if isinstance(x, Tensor)]
        plain = [slot for slot in attributes if slot[0].get(slot[1]) is slot[2]]
        # Comparing dicts takes two tensors of one element for equal if their values are, so that
        # tensors of one element are compared by identity.
        self._by_identity = [slot for slot in tensors if slot[2].numel() == 1] + plain
        self._tensors = [value for _, _, value in tensors + plain]
        # A weight rebound to another view of its memory may keep its address. A slice has another
        # size. Only a square weight still fits its module when it is transposed, so strides, which
        # take longest to read, are compared only for square weights.
        self._squares = [t for t in self._tensors if t.ndim == 2 and t.shape[0] == t.shape[1]]
        self._addresses, self._counts, self._strides = self._locations()
        first_values = [slots.get(name) for slots, name, _ in attributes]
        # Detached tensors keep the storages in memory.
        tensors_read = [x for x in (*self._tensors, *first_values) if isinstance(x, Tensor)]
        self._storage_owners = [tensor.detach() for tensor in tensors_read]
        self.storages = frozenset(t.untyped_storage().data_ptr() for t in self._tensors)
        """Addresses of the storages of weights. A result that lies in one of them has to be copied
        before the caller gets it."""
        self._parameters = [t for t in self._tensors if isinstance(t, nn.Parameter)]
        self._versioned = [t for t in self._tensors if not t.is_inference()]

    def _locations(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Return addresses and entry counts of all weights, and the strides of square ones."""
        tensors = self._tensors
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            list(map(Tensor.stride, self._squares)),
        )

    def holds(self) -> bool:
        """Return whether weights, modules, hooks and addresses are the same as at capture.

        So must be what forwards depend on besides (:class:`ForwardState`). Without that, the check
        takes only 67 us for 32 blocks on a CPU core, because whole dicts are compared. In that
        comparison identical objects are equal, and two different tensors raise a RuntimeError,
        because the result of their ``==`` has no truth value.
        """
        try:
            same_slots = self._slots == self._captured_slots
        except RuntimeError:
            return False
        return (
            same_slots
            and self._locations() == (self._addresses, self._counts, self._strides)
            and all(slots.get(name) is value for slots, name, value in self._by_identity)
            and self._forward_state.holds()
        )

    def versions(self) -> list[int]:
        """Return how often each weight was written in place, as torch counts it."""
        return versions_of(self._versioned)

    def check(self) -> None:
        """Raise a RuntimeError if weights or modules changed: replays would be outdated."""
        if not self.holds():
            raise RuntimeError(
                f"{self._changed()} after capture, and replays would go on as before: undo it, or "
                'call release() and capture() again; backend="eager" follows such changes (they '
                "come from load_state_dict with assign=True, .to(), .half(), a module, tensor, "
                "value or hook set, an adapter switched, scaled or merged)"
            )

    def _changed(self) -> str:
        """Return which weight, module or hook has changed since capture, as a clause."""
        locations = zip(self._tensors, self._addresses, self._counts, strict=True)
        moved_ids = {id(x) for x, *location in locations if [x.data_ptr(), x.numel()] != location}
        squares = zip(self._squares, self._strides, strict=True)
        moved_ids |= {id(x) for x, stride in squares if x.stride() != stride}
        all_slots = zip(self._names, self._slots, self._captured_slots, strict=True)
        for (module_name, kind), slots, captured_slots in all_slots:
            for name in {**captured_slots, **slots}:
                new, old = slots.get(name), captured_slots.get(name)
                if kind in HOOKS and new is not old:
                    return f"forward hook {new or old!r} was registered or removed"
                if new is not old or id(old) in moved_ids:
                    noun = "module" if kind == MODULES else "weight"
                    return f"{noun} {f'{module_name}.{name}'.lstrip('.')!r} was rebound or moved"
        if (change := self._forward_state.changed()) is not None:
            return change
        names = [name for slots, name, value in self._by_identity if slots.get(name) is not value]
        return f"tensor {[*names, 'attribute'][0]!r} was rebound or moved"

    def check_gradients(self, pixel_values: Tensor) -> None:
        """Raise a ValueError if a call would need gradients, which a graph does not record."""
        if not torch.is_grad_enabled():
            return
        of_pixels = pixel_values.requires_grad
        if of_pixels or any(map(_REQUIRES_GRAD, self._parameters)):
            subject = "pixel_values" if of_pixels else "encoder parameters"
            raise ValueError(
                f"{subject} require grad and grad mode is on, but a graph records no gradients: "
                "wrap the call in torch.no_grad(), or encoder.requires_grad_(False), or call the "
                "encoder itself"
            )


def settle_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that sets torch's modes for captures and calls on ``device``.

    Gradients, inference mode and autocast are off (a replay could not follow autocast, so eager
    runs do not either), tensors are made on the CPU unless told otherwise, and the encoder's GPU is
    the current one. Only modes that differ are changed: a whole replay takes the host only tens of
    microseconds.
    """
    modes: list[AbstractContextManager[object]] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode(False))
    if modes or torch.is_grad_enabled():  # leaving inference mode turns gradients on
        modes.append(torch.no_grad())
    on_cuda = device.type == "cuda"
    for kind in ("cpu", "cuda") if on_cuda else ("cpu",):
        if torch.is_autocast_enabled(kind):
            modes.append(torch.autocast(kind, enabled=False))
    if torch.get_default_device().type != "cpu":
        modes.append(torch.device("cpu"))
    if on_cuda and torch.cuda.current_device() != device.index:
        modes.append(torch.cuda.device(device))
    if not modes:
        return AS_IT_IS
    stack = ExitStack()
    for mode in modes:
        stack.enter_context(mode)
    return stack


def require_graphable(encoder: object) -> None:
    """Raise a TypeError unless ``encoder`` is a module with the members of a graphable encoder.

    The members are read one by one: from Python 3.12 on, ``isinstance`` with a protocol does not
    find the members that a wrapper passes on from the module inside it.
    """
    if not isinstance(encoder, nn.Module):
        kind = "class" if isinstance(encoder, type) else type(encoder).__name__
        raise TypeError(
            f"encoder={encoder!r} is a {kind}, not a module: load one first, as "
            "vitgraph.load_encoder(repo_id) does, or pass an instance with weights"
        )
    graphable = cast(GraphableEncoder, encoder)
    try:
        _ = (graphable.budget_range, graphable.row_shape, graphable.grid_for, graphable.item_specs)
        _ = (graphable.prepare_encoder_metadata, graphable.split)
    except AttributeError as error:
        raise TypeError(
            f"{type(encoder).__name__} cannot be replayed as graphs: {error}; it needs "
            "budget_range, row_shape, grid_for, item_specs, prepare_encoder_metadata and split, "
            "see vitgraph.GraphableEncoder"
        ) from error


def as_module(encoder: object) -> nn.Module:
    """Return ``encoder``, checked by :func:`require_graphable`, with the type of a module."""
    assert isinstance(encoder, nn.Module)
    return encoder


class CallLock:
    """A lock that a thread may take several times, and that says whether this thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._times, self._holder = 0, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._times += 1
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._times -= 1
        if not self._times:
            self._holder = 0
        self._lock.release()

    def is_held_here(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return self._holder == threading.get_ident()


def check_alone(lock: CallLock, device: torch.device) -> None:
    """Raise a RuntimeError if a call may not start now.

    Args:
        lock: the lock of the graphed encoder; this thread holds it if it is inside a call already.
        device: the device of the encoder, on which the user may be capturing a graph.
    """
    if lock.is_held_here():
        raise RuntimeError(
            "a GraphedEncoder was called from inside its own encoder (a forward, a hook): that "
            "would overwrite the buffers of the call under way; call the encoder itself there"
        )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a GraphedEncoder was called while a CUDA graph is being captured, which cannot hold "
            "its replays: call it before, or capture encoder(pixel_values, encoder_metadata=...)"
        )


def find_weights(encoder: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of the first floating-point weight of 16 bits or more.

    Parameters come before buffers; a ValueError is raised if the encoder has no such weight.
    """
    for tensor in chain(encoder.parameters(), encoder.buffers()):
        # Weights of 8 bits do not say the dtype of pixels, which cannot be cast to 8 bits.
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            return tensor.device, tensor.dtype
    raise ValueError(
        f"{type(encoder).__name__} has no floating-point parameters or buffers: they say on which "
        "device and in which dtype its graphs run"
    )


def resolve_backend(backend: Backend, device: torch.device) -> BackendInUse:
    """Return the backend to use on the encoder's device; "auto" is "cudagraph" on CUDA.

    Raises:
        ValueError: graphs are asked for on a device that is not CUDA, or torch uses an allocator
            of device memory that is not its own.
    """
    if backend == "cudagraph" and device.type != "cuda":
        raise ValueError(
            f'backend="cudagraph" needs the encoder on CUDA, it is on {device}: move it, or use '
            '"static" or "eager"'
        )
    if backend == "auto":
        backend = "cudagraph" if device.type == "cuda" else "eager"
    if backend == "cudagraph" and torch.cuda.get_allocator_backend() != "native":
        raise ValueError(
            f"graphs need torch's own allocator, this is {torch.cuda.get_allocator_backend()}: "
            'leave "backend:" out of PYTORCH_ALLOC_CONF, or use backend="eager"'
        )
    return backend


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ValueError unless the setting ``name`` has one of ``choices``, in value and type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")


def require_table(table: object) -> None:
    """Raise a ValueError unless the argument ``table`` is "auto", a path or None."""
    if table is not None and not (isinstance(table, str | os.PathLike) and os.fspath(table)):
        raise ValueError(f'table={table!r}: must be "auto", a file for measured times, or None')


def read_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the names of outputs without duplicates: fields, and extras such as "blocks.6".

    Raises:
        ValueError: no names, or a name that is neither a field nor, as extras are, has a dot.
    """
    is_sequence = isinstance(outputs, Iterable) and not isinstance(outputs, str)
    names = tuple(outputs) if is_sequence else ()
    if not names or any(name not in OUTPUT_FIELDS and "." not in str(name) for name in names):
        raise ValueError(
            f"outputs={names or outputs!r}: give a tuple of one or more of "
            f"{', '.join(OUTPUT_FIELDS)}, as ('pooler_output',), or of a block, as 'blocks.6'"
        )
    return tuple(dict.fromkeys(names))


def check_pixels(pixel_values: Tensor, row_shape: tuple[int, ...], device: torch.device) -> None:
    """Raise a ValueError unless pixels are floating-point rows of ``row_shape``, [P, *row_shape].

    They may be on the CPU or on ``device``, the device of the encoder.
    """
    if isinstance(pixel_values, Tensor):
        device_fits = pixel_values.device == device or pixel_values.is_cpu
        shape = tuple(pixel_values.shape)  # slicing a torch.Size takes longer
        shape_fits = shape and shape[1:] == row_shape
        if device_fits and shape_fits and pixel_values.is_floating_point():
            return
    raise ValueError(
        f"pixel_values is {_kind_of(pixel_values)}: the graphs take normalised floating-point rows "
        f"of shape {row_shape}, on the CPU or {device}; pass what encoder.preprocess returns, or a "
        "tensor like that (torch.as_tensor, .to)"
    )


def _kind_of(value: object) -> str:
    """Describe a value for a message: dtype, shape and device of a tensor, else its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return f"a {type(value).__name__}, not a tensor"


ValueSlot: TypeAlias = tuple[str, dict[str, object], str, object]
"""A plain value of a module: the module's name, its ``__dict__``, the attribute, a copy of it."""
UNREAD = frozenset(vars(nn.Module())) | {"in_features", "out_features", "elementwise_affine"}
"""Attributes of torch's layers that no forward of theirs reads."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Torch's layers that compute otherwise in train mode."""


def is_plain_value(value: object) -> bool:
    """Return whether a value is a string, a bool, a number, or a list, tuple or dict of these."""
    if isinstance(value, dict):
        return all(map(is_plain_value, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain_value, value))
    return isinstance(value, str | bytes | int | float | complex)


def plain_values(modules: Mapping[str, nn.Module]) -> list[ValueSlot]:
    """Return the plain values of all modules whose classes are not the library's.

    The library's classes read no plain value that changes after they were built.
    """
    return [
        (name, vars(module), key, deepcopy(value))
        for name, module in modules.items()
        if not is_library(module)
        for key, value in vars(module).items()
        if _may_be_read(module, key) and is_plain_value(value)
    ]


def _may_be_read(module: nn.Module, name: str) -> bool:
    """Return whether the forward of a module may read its attribute ``name``."""
    if name == "training":  # a tower is switched between train() and eval() without other results
        drops = isinstance(module, DROPOUTS) and module.p > 0
        return drops or isinstance(module, BATCH_NORMS)
    return name not in UNREAD


class ForwardState:
    """Remembers class, replaced ``forward`` and plain values of modules, and compares them.

    For a tower of 265 modules, :meth:`holds` takes 17 us on a CPU core.

    Args:
        modules: the modules, by a name for messages.
        values: the result of :func:`plain_values` before the modules ran. Values that the run
            changed, such as a counter of calls, are not compared.
    """

    def __init__(self, modules: Mapping[str, nn.Module], values: Sequence[ValueSlot]) -> None:
        self._modules = dict(modules)
        self._attributes = [vars(module) for module in modules.values()]
        self._types = list(map(type, modules.values()))
        self._forwards = self._read_forwards()
        kept = [slot for slot in values if slot[1].get(slot[2]) == slot[3]]
        self._value_names = [f"{name}.{key}".lstrip(".") for name, _, key, _ in kept]
        self._owners, self._keys = [slot[1] for slot in kept], [slot[2] for slot in kept]
        self._values = [slot[3] for slot in kept]

    def _read_forwards(self) -> list[object]:
        return list(map(dict.get, self._attributes, repeat("forward")))

    def holds(self) -> bool:
        """Return whether classes, forwards and plain values are the same as at capture."""
        try:
            return (
                list(map(type, self._modules.values())) == self._types
                and self._read_forwards() == self._forwards
                and list(map(dict.get, self._owners, self._keys)) == self._values
            )
        except (RuntimeError, ValueError):  # a tensor or array has taken the place of a number
            return False

    def changed(self) -> str | None:
        """Return what has changed since capture, as a clause; None if nothing has."""
        forwards = self._read_forwards()
        for number, (name, module) in enumerate(self._modules.items()):
            if type(module) is not self._types[number]:
                return f"the class of module {name!r} was changed"
            if forwards[number] != self._forwards[number]:
                return f"the forward of module {name!r} was replaced"
        slots = zip(self._value_names, self._owners, self._keys, self._values, strict=True)
        for name, owner, key, value in slots:
            new = owner.get(key)
            if not is_plain_value(new) or new != value:
                return f"{name!r} was changed from {value!r}"
        return None
