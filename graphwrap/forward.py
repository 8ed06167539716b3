"""Which forward runs: the encoder's own, its accelerated form's, or the compiled encoder's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import nn

from encoders.contract import Accelerable, Accelerator, EncoderOutput, GraphableEncoder

Forward: TypeAlias = Callable[..., EncoderOutput]
PRECISION = "bf16"
"""The encoder's own half or full precision, the only one that a reference runs in."""


class Asked(NamedTuple):
    """What the user asks of the forward."""

    kernels: str = "auto"
    """"reference" for the module as it is, else what ``accelerated`` is asked for."""
    precision: str = PRECISION
    """What ``accelerated`` is asked for."""
    compiled: bool = False
    """Whether the module as it is will be compiled."""


def fast_form(encoder: nn.Module, asked: Asked) -> tuple[GraphableEncoder, Accelerator | None]:
    """The form of an encoder that graphs are captured from and that runs eagerly beside them.

    Args:
        encoder: the user's module.
        asked: the settings.

    Returns:
        The accelerated form with its accelerator where the encoder has one. Else the module, with
        an accelerator only if the user has accelerated it already.

    Raises:
        ValueError: settings that this encoder cannot follow.
    """
    accelerator = find_accelerator(encoder)
    if accelerator is not None:
        _check_accelerated(asked)
    elif _is_accelerable(encoder) and asked.kernels != "reference" and not asked.compiled:
        form = encoder.accelerated(asked.kernels, asked.precision)
        return form, find_accelerator(cast(nn.Module, form))
    else:
        _check_reference(encoder, asked)
    return cast(GraphableEncoder, encoder), accelerator


def find_accelerator(encoder: nn.Module) -> Accelerator | None:
    """The accelerator of an encoder, or of the encoder that a module wraps."""
    for module in encoder.modules():
        if isinstance(module, Accelerable) and module.accelerator is not None:
            return module.accelerator
    return None


def captured_forward(form: GraphableEncoder, compiled: bool, budgets: int) -> Forward:
    """What graphs are captured from: the form, or what ``torch.compile`` makes of it.

    Args:
        form: what :func:`fast_form` gave.
        compiled: whether to compile it, anew for each budget.
        budgets: how many budgets there are.
    """
    if not compiled:
        return form
    many = 2 * budgets  # torch gives up compiling one function after eight
    limits = torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)
    return cast(Forward, limits(torch.compile(cast(nn.Module, form), dynamic=False)))


def _is_accelerable(encoder: nn.Module) -> TypeGuard[Accelerable]:
    """Whether an encoder has a faster form of itself.

    A wrapper that passes on its module's attributes has none: the faster form would leave out what
    the wrapper's own forward adds.
    """
    own = any("accelerated" in vars(kind) for kind in type(encoder).__mro__)
    return own and isinstance(encoder, Accelerable)


def _check_accelerated(asked: Asked) -> None:
    """Raise on settings that would change an encoder that is accelerated already."""
    names = ("kernels", "precision", "compile")
    for name, value, default in zip(names, asked, Asked(), strict=True):
        if value != default:
            raise ValueError(
                f"{name}={value!r}, but this encoder is accelerated already and runs as it is: "
                f"leave {name}={default!r}, or pass the encoder that accelerated() was called on"
            )


def _check_reference(encoder: nn.Module, asked: Asked) -> None:
    """Raise on kernels or a precision asked of an encoder that runs as it is."""
    if asked.kernels not in ("auto", "reference"):
        if asked.compiled and _is_accelerable(encoder):
            why, fix = "compile=True compiles the encoder as it is", " or compile=False"
        else:
            why, fix = f"{type(encoder).__name__} has no accelerated form to choose them for", ""
        raise ValueError(f'kernels={asked.kernels!r}: {why}; leave kernels="auto"{fix}')
    if asked.precision != PRECISION:
        raise ValueError(
            f"precision={asked.precision!r}: this encoder runs as it is, in the dtype of its "
            f'weights, only an accelerated one has a choice; leave precision="{PRECISION}"'
        )
