"""Checks whether a tower and its blocks can be accelerated, with reasons for users."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TypeGuard

import torch
from torch import nn

from ..block_parts import BlockParts, NamesItsParts
from ..layers.bounded_linear import BoundedLinear, Bounds, Range
from ..layers.keyless_bias_linear import KeylessBiasLinear
from ..layers.torch_internals import is_plain, is_untouched, transforms_are_on

NO_PARTS = "no block of this tower names its parts: it has norms on its branches, or was replaced"
ACCELERATED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why fused kernels cannot run for this device and dtype; None if they can."""
    if device.type != "cuda":
        return f"the encoder is on {device.type}, and accelerated towers need CUDA"
    if dtype not in ACCELERATED_DTYPES:
        return f"the encoder is {dtype}, and accelerated towers are float16, bfloat16 or float32"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, and accelerated towers need 8.0"
    return None if _has_triton() else "Triton is not installed (it comes with torch on Linux)"


def obstacle_now() -> str | None:
    """Return the name of an active mode that rules out fused kernels, such as autocast, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if transforms_are_on():
        return "a function transform or forward-mode differentiation is running"
    return None


def fp8_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why matrix products cannot run in fp8 for this device and dtype; None if they can."""
    because = obstacle(device, dtype)
    if because is not None:
        return because
    if dtype != torch.bfloat16:
        return f"the encoder is {dtype}, and products in fp8 need bfloat16 around them"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"the GPU has compute capability {major}.{minor}"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def names_its_parts(block: nn.Module) -> bool:
    """Return whether a block can list its layers by role (``parts``), as fused kernels need."""
    return isinstance(block, NamesItsParts)


def fusible_parts(block: nn.Module) -> BlockParts | None:
    """Return the layers of a block by role; None if it, attention or MLP is hooked or replaced."""
    parts = block.parts() if isinstance(block, NamesItsParts) else None
    if parts is None or not all(map(is_untouched, parts.containers)):
        return None
    return parts


def is_norm(norm: nn.Module, weighted: bool = True) -> TypeGuard[nn.LayerNorm | nn.RMSNorm]:
    """Return whether a fused kernel can compute a norm: an unchanged LayerNorm or RMSNorm of torch.

    Args:
        norm: a norm, or a module that wraps or replaces it.
        weighted: whether the kernel needs a norm that has a weight.
    """
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or not is_untouched(norm):
        return False
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm):
        return False
    usual = norm.eps is not None and len(norm.normalized_shape) == 1
    return usual and (norm.elementwise_affine or not weighted)


def is_plain_table(table: nn.Embedding) -> bool:
    """Return whether calling an embedding looks up rows of its weight and nothing else."""
    return is_plain(table, types=(nn.Embedding,)) and table.max_norm is None


def is_product(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer multiplies with its weight, adds ``bias_of(layer)``, and no more."""
    return is_plain(layer, types=(nn.Linear, KeylessBiasLinear))


def clamps(layer: nn.Module) -> TypeGuard[BoundedLinear]:
    """Return whether a layer clamps, multiplies with its weight, and computes nothing else."""
    if not isinstance(layer, BoundedLinear) or not is_plain(layer, types=(BoundedLinear,)):
        return False
    return all(type(part) is Bounds and is_untouched(part) for part in layer.bounds)


def single_ranges(layer: nn.Module) -> tuple[Range | None, Range | None]:
    """Return the ranges a layer clamps its input and output to; (None, None) if none or several."""
    if not clamps(layer) or len(layer.bounds) > 1:
        return None, None
    return layer.inputs[0], layer.outputs[0]
