"""What is checked before a wrong answer could come: settings, pixels, gradients, weights, hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from .results import FIELDS

MEMBERS = (
    "budget_range",
    "row_shape",
    "grid_for",
    "item_specs",
    "prepare_encoder_metadata",
    "split",
)
BACKENDS = ("auto", "cudagraph", "static", "eager")
UNCHANGED = nullcontext()


class WeightGuard:
    """Remembers every parameter, buffer, submodule and hook of an encoder, and where weights lay.

    A graph reads addresses. Weights updated in place are seen by the next replay; weights rebound
    (``load_state_dict(assign=True)``, ``.to()``, a submodule replaced) are not, and would be
    answered with the old ones. The old storages are held, so that the check may run while a replay
    does. Hooks registered after capture would be left out by replays.

    Args:
        encoder: the user's module.
        attributes: whether to look at tensors in plain attributes, too.
        hooks: whether hooks registered later are an error.
    """

    def __init__(self, encoder: nn.Module, *, attributes: bool = True, hooks: bool = False) -> None:
        self._names, self._slots = [], list[dict[str, object]]()
        self._attributes: list[tuple[dict[str, object], str, object]] = []
        self._hooks: list[dict[int, Any]] = []
        for path, module in encoder.named_modules():
            for slots in (module._parameters, module._buffers, module._modules):
                self._names.append(path)
                self._slots.append(slots)
            if attributes:
                self._attributes += [
                    (vars(module), name, value)
                    for name, value in vars(module).items()
                    if isinstance(value, Tensor)
                ]
            if hooks:
                self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._kept = [dict(slots) for slots in self._slots]
        self._kept_hooks = {number for number, _ in self._current_hooks()}
        self._parameters = list(encoder.parameters())
        self._hold()

    def _hold(self) -> None:
        """Note where every tensor lies, and hold its storage."""
        tensors = [value for kept in self._kept for value in kept.values()]
        tensors += [value for _, _, value in self._attributes]
        self._tensors = [value for value in tensors if isinstance(value, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._held = [tensor.detach() for tensor in self._tensors]
        self.storages = frozenset(t.untyped_storage().data_ptr() for t in self._tensors)
        """Where weights lie: a result there would not be the caller's own."""
        # Other tensors of one element may compare equal to these: each is compared by identity.
        self._plain = self._attributes + [
            (slots, name, value)
            for slots in self._slots
            for name, value in slots.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]

    def forget_rewritten(self) -> None:
        """Drop the attributes that running the encoder has set: what they are made of is guarded.

        ``torch.nn.utils.prune`` and ``weight_norm`` set a layer's weight in every forward.
        """
        self._read_by_graphs = [slots.get(name) for slots, name, _ in self._attributes]
        self._attributes = [each for each in self._attributes if each[0].get(each[1]) is each[2]]
        self._hold()

    def holds(self) -> bool:
        """Return whether every weight is where it was, in tens of microseconds for thirty blocks.

        All slots are compared at once: ``dict`` takes the same object for equal, and a tensor that
        is another one has no truth value.
        """
        try:
            same = self._slots == self._kept
        except RuntimeError:
            return False
        return (
            same
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and all(slots.get(name) is value for slots, name, value in self._plain)
        )

    def check(self) -> None:
        """Raise if replays would not do what the encoder does now.

        Raises:
            RuntimeError: a parameter, buffer or submodule was replaced or moved, or a hook was
                registered, after capture.
        """
        if not self.holds():
            raise RuntimeError(
                f"{self._changed()} was rebound or moved after capture (load_state_dict with "
                "assign=True, .to(), .half(), a module or tensor assigned): its graphs still read "
                "the old one; call release() and capture() again"
            )
        for number, hook in self._current_hooks():
            if number not in self._kept_hooks:
                raise RuntimeError(
                    f"forward hook {hook!r} was registered after capture, and replays would leave "
                    "it out: remove it, call release() and capture() again, or use "
                    'backend="static" or "eager"'
                )

    def _current_hooks(self) -> Iterator[tuple[int, Any]]:
        """Return the number and the function of every forward hook that is registered now."""
        return chain.from_iterable(hooks.items() for hooks in filter(None, self._hooks))

    def _changed(self) -> str:
        """Return the first slot that is not as it was, in words."""
        addresses = dict(zip(map(id, self._tensors), self._addresses, strict=True))
        for path, slots, kept in zip(self._names, self._slots, self._kept, strict=True):
            for name in {**kept, **slots}:
                value, old = slots.get(name), kept.get(name)
                moved = isinstance(old, Tensor) and old.data_ptr() != addresses[id(old)]
                if value is not old or moved:
                    there = value if old is None else old
                    kind = "module" if isinstance(there, nn.Module) else "weight"
                    return f"{kind} {f'{path}.{name}'.lstrip('.')!r}"
        return f"tensor {next((n for s, n, v in self._plain if s.get(n) is not v), 'attribute')!r}"

    def check_gradients(self, pixel_values: Tensor) -> None:
        """Raise if somebody expects gradients: a graph records none.

        Raises:
            ValueError: a parameter or the pixels require grad while grad mode is on.
        """
        if not torch.is_grad_enabled():
            return
        wanted = pixel_values.requires_grad
        if wanted or any(parameter.requires_grad for parameter in self._parameters):
            what = "pixel_values" if wanted else "encoder parameters"
            raise ValueError(
                f"{what} require grad and grad mode is on, but a graph records no gradients: wrap "
                "the call in torch.no_grad(), or encoder.requires_grad_(False), or call the "
                "encoder itself"
            )


def settled(device: torch.device) -> AbstractContextManager[object]:
    """Return the modes that graphs are captured in and calls run in, whatever is set around them.

    Gradients, inference mode and autocast are off (a replay could not follow autocast, so eager
    runs do not either), tensors are made on the CPU unless told otherwise, and the encoder's GPU is
    the current one. Only what is set is undone, because a call takes tens of microseconds in all.
    """
    undo: list[AbstractContextManager[object]] = []
    if torch.is_inference_mode_enabled():
        undo.append(torch.inference_mode(False))
    if undo or torch.is_grad_enabled():  # leaving inference mode turns gradients on
        undo.append(torch.no_grad())
    on_cuda = device.type == "cuda"
    if torch._C._is_any_autocast_enabled():
        kinds = ("cpu", "cuda") if on_cuda else ("cpu",)
        on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        undo += [torch.autocast(kind, enabled=False) for kind in on]
    # Asking torch for the default device in public takes several times as long as this.
    if torch._C._len_torch_function_stack() or torch._C._get_default_device() != "cpu":
        undo.append(torch.device("cpu"))
    if on_cuda and torch._C._cuda_getDevice() != device.index:
        undo.append(torch.cuda.device(device))
    if not undo:
        return UNCHANGED
    stack = ExitStack()
    for mode in undo:
        stack.enter_context(mode)
    return stack


def require_contract(encoder: object) -> None:
    """Raise unless an object is a module with the members that graphs use.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(encoder, nn.Module):
        raise TypeError(
            f"encoder={encoder!r} is a {type(encoder).__name__}, not a module: load one first, as "
            "weights.load_encoder(repo_id) does"
        )
    missing = [name for name in MEMBERS if not _has(encoder, name)]
    if missing:
        raise TypeError(
            f"{type(encoder).__name__} has no {', '.join(missing)}: an encoder that replays graphs "
            "keeps encoders.contract.GraphableEncoder"
        )


def _has(encoder: nn.Module, name: str) -> bool:
    """Return whether there is such a member, perhaps of a module that this one wraps."""
    try:
        getattr(encoder, name)
    except AttributeError:
        return False
    return True


def find_preprocess(encoder: nn.Module) -> Callable[..., Any]:
    """Return the encoder's ``preprocess``, which the contract does not ask for.

    Raises:
        TypeError: it has none.
    """
    if not _has(encoder, "preprocess"):
        raise TypeError(
            f"{type(encoder).__name__} has no preprocess, which encode() calls: prepare the pixels "
            "yourself and call graphed(pixel_values, grid_thw)"
        )
    return cast(Callable[..., Any], encoder.preprocess)


def check_alone(lock: threading.RLock, device: torch.device) -> None:
    """Raise where a call would disturb one that is under way.

    Raises:
        RuntimeError: this thread is inside a call already, or is capturing a graph of its own.
    """
    if lock._is_owned():  # type: ignore[attr-defined]
        raise RuntimeError(
            "a GraphedEncoder was called from inside its own encoder (a forward, a hook): that "
            "would overwrite the buffers of the call under way; call the encoder itself there"
        )
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError(
            "a GraphedEncoder was called while a CUDA graph is being captured, which cannot hold "
            "its replays: call it before, or capture encoder(pixel_values, encoder_metadata=...)"
        )


def find_weights(encoder: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of the first floating-point parameter of 16 bits or more.

    Without such a parameter, the first such buffer counts.

    Raises:
        ValueError: the module has neither.
    """
    for tensor in chain(encoder.parameters(), encoder.buffers()):
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:  # 8 bits hold no pixels
            return tensor.device, tensor.dtype
    raise ValueError(
        f"{type(encoder).__name__} has no floating-point parameters or buffers: they say on which "
        "device and in which dtype its graphs run"
    )


def resolve_backend(backend: str, device: torch.device) -> str:
    """Return the backend that a setting means on a device.

    Raises:
        ValueError: graphs were asked for elsewhere than on CUDA, or the allocator has no pools.
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
    """Raise unless a setting is one of its choices.

    Raises:
        ValueError: it is none of them.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")


def read_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the fields asked for, each once.

    Raises:
        ValueError: no list of fields, an empty one, or an unknown field.
    """
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise ValueError(f"outputs={outputs!r}: give a tuple of fields, as ('pooler_output',)")
    names = tuple(outputs)
    for name in names:
        require_choice("outputs entry", name, FIELDS)
    if not names:
        raise ValueError(f"outputs is empty: name at least one of {', '.join(FIELDS)}")
    return tuple(dict.fromkeys(names))


def check_pixels(pixel_values: Tensor, row_shape: tuple[int, ...], device: torch.device) -> None:
    """Raise on pixels that the graphs cannot take.

    Raises:
        ValueError: not a tensor, integer pixels, a wrong trailing shape, or another accelerator.
    """
    if not isinstance(pixel_values, Tensor):
        raise ValueError(
            f"pixel_values is a {type(pixel_values).__name__}, not a tensor: pass "
            "torch.as_tensor(pixel_values), or what encoder.preprocess returns"
        )
    if not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values are {pixel_values.dtype}: the encoder takes normalised floating-point "
            "pixels; call encoder.preprocess on the images"
        )
    if pixel_values.shape[1:] != row_shape or not pixel_values.ndim:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)}: the graphs take rows of shape "
            f"{row_shape}; call encoder.preprocess on the images"
        )
    if pixel_values.device != device and pixel_values.device.type != "cpu":
        raise ValueError(
            f"pixel_values are on {pixel_values.device}, the graphs on {device}: pass them on the "
            "CPU or move them there"
        )


def check_rows(rows: int, expected: int) -> None:
    """Raise on a grid that does not belong to the pixels.

    Raises:
        ValueError: it makes another number of rows.
    """
    if rows != expected:
        raise ValueError(
            f"pixel_values has {rows} rows but the grid makes {expected}: pass the grid_thw that "
            "belongs to these pixels"
        )
