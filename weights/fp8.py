"""FP8 weights with scales: which published forms are read, and the weights that they stand for.

A weight is the product of its value in e4m3 and its scale, both in float32. Three ways to publish
the scales are read: ``weight_scale_inv`` of transformers and DeepSeek (a factor in spite of its
name) and ``weight_scale`` of vLLM, both under ``"quant_method": "fp8"``, and ``weight_scale`` of
compressed-tensors. Any other way is rejected by its name, because a wrong scale gives wrong
features without an error. Scales of activations (``input_scale``) are for products in FP8, and not
used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from encoders.stored_tensors import STORED_DTYPES

from .errors import CheckpointError, legible
from .files.checkpoint import TowerTensor
from .files.tower_folder import QUANTISATION, vision_section
from .strict_json import JsonObject

E4M3 = "F8_E4M3"
BLOCK = 128
"""The rows and columns of a block that has one scale; blocks at the edges may be smaller."""
SCALE_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.float8_e8m0fnu,
}
"""The dtypes of scales by their names in a header. ``U8`` are powers of two as well, 2^(n - 127),
if the config says ``"scale_fmt": "ue8m0"``."""
SCALES = ("weight_scale", "weight_scale_inv")
"""The last parts of the names of scales; the weight has the same name with "weight" there."""
READ = {
    ("fp8", "weight_scale_inv", True): ("block",),
    ("fp8", "weight_scale_inv", False): ("tensor",),
    ("fp8", "weight_scale", False): ("tensor", "fused part"),
    ("compressed-tensors", "weight_scale", True): ("tensor", "row", "block"),
    ("compressed-tensors", "weight_scale", False): ("tensor", "row"),
}
"""The forms that are read: method, name of the scales and whether the config names blocks -> what
has a scale of its own."""
UNUSED = ("input_scale", "activation_scale")


def pair_scales(
    tensors: Sequence[TowerTensor], config: JsonObject, label: str
) -> tuple[list[TowerTensor], list[TowerTensor]]:
    """Return the weights of a tower, each FP8 one with its scale, and the scales alone.

    Args:
        tensors: the tensors under the tower's prefix.
        config: the published config.
        label: name of the checkpoint in messages.

    Raises:
        CheckpointError: scales in a form that is not read, or without an FP8 weight.
    """
    scales = [tensor for tensor in tensors if _last_part(tensor) in SCALES]
    weights = [tensor for tensor in tensors if _last_part(tensor) not in (*SCALES, *UNUSED)]
    if len(weights) == len(tensors):
        return weights, []
    sections = [section for part in _parts(config) for section in map(part.get, QUANTISATION)]
    section = next((part for part in sections if isinstance(part, Mapping)), {})
    if problem := _problem_of_config(section):
        odd = next(tensor for tensor in tensors if tensor not in weights)
        raise _refusal(label, odd, problem)
    weight_of = {tensor.name: tensor for tensor in weights}
    scale_of: dict[str, TowerTensor] = {}
    for scale in scales:
        name = scale.name.rpartition(".")[0] + ".weight"
        if misfit := _problem_of_scale(weight_of.get(name), scale, section):
            raise _refusal(label, scale, misfit)
        if name in scale_of:
            raise _refusal(label, scale, f"is the second scale of {legible(name)}")
        scale_of[name] = scale
    paired = [replace(tensor, scale=scale_of.get(tensor.name)) for tensor in weights]
    return paired, scales


def _last_part(tensor: TowerTensor) -> str:
    return tensor.local.rpartition(".")[2]


def _parts(config: JsonObject) -> list[JsonObject]:
    """Return the tower's part of a config and the parts around it, innermost first."""
    section, parents = vision_section(config)
    return [section, *parents]


def _refusal(label: str, tensor: TowerTensor, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{label}: the tower is quantised in a form that is not read: {legible(tensor.name)} "
        f"{problem}: load the original repo, or a quantised one that leaves the vision tower in "
        "bf16"
    )


def _problem_of_config(section: JsonObject) -> str:
    """Return why scales that a ``quantization_config`` describes are not read, or nothing."""
    if not section:
        return "has no quantization_config in config.json that says what it means"
    method = section.get("quant_method")
    if "quant_algo" in section or method == "modelopt":
        return "is of ModelOpt"
    if method not in ("fp8", "compressed-tensors"):
        return f"is of quant_method={legible(str(method))}"
    if any(block not in (None, [BLOCK, BLOCK]) for block in _blocks(section)):
        return f"belongs to blocks of other sizes than {BLOCK} x {BLOCK}: {_blocks(section)}"
    return ""


def _blocks(section: JsonObject) -> list[object]:
    """Return the sizes of blocks that a ``quantization_config`` names."""
    blocks = [section.get("weight_block_size")]
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits") == 8:
            blocks.append(weights.get("block_structure"))
    return [block for block in blocks if block is not None]


def _problem_of_scale(weight: TowerTensor | None, scale: TowerTensor, section: JsonObject) -> str:
    """Return why a scale does not fit its weight or is not read, or nothing."""
    if weight is None or weight.entry.dtype != E4M3:
        kind = "no weight" if weight is None else f"a weight in {weight.entry.dtype}"
        return f"is the scale of {kind}, not of one in {E4M3}"
    blocks, dtype = bool(_blocks(section)), scale.entry.dtype
    scaled = scale_kind(weight.entry.shape, scale.entry.shape, blocks=blocks)
    method = str(section["quant_method"])
    if scaled not in READ.get((method, _last_part(scale), blocks), ()):
        return (
            f"has the shape {list(scale.entry.shape)} beside {list(weight.entry.shape)}, which "
            f"quant_method={method} does not make"
        )
    powers = ("F8_E8M0", "U8") if scaled == "block" and method == "fp8" else ()
    if dtype not in ("F32", "BF16", "F16", *powers):
        return f"is a scale in {dtype}"
    if dtype == "U8" and section.get("scale_fmt") != "ue8m0":
        return "is a scale in U8 without scale_fmt=ue8m0"
    return ""


def scale_kind(
    weight: tuple[int, ...], scale: tuple[int, ...], *, blocks: bool = True
) -> str | None:
    """Return the part of a weight that has its own scale, from the shapes of weight and scales.

    Args:
        weight: the shape of the weight.
        scale: the shape of the scales.
        blocks: whether the config names blocks.

    Returns:
        ``"tensor"``, ``"row"``, ``"block"``, ``"fused part"``, or None if the shapes do not fit.
    """
    if blocks and len(weight) == 2 and scale == tuple(-(-size // BLOCK) for size in weight):
        return "block"
    if scale in ((), (1,), (1, 1)):
        return "tensor"
    if len(weight) == 2 and scale == (weight[0], 1):
        return "row"
    # Parts are as long as one another in joined keys and values, in the joined input layers of a
    # gated MLP, and, without grouped-query attention, in joined queries, keys and values.
    if len(weight) == 2 and (scale == (3,) and weight[0] == 3 * weight[1]):
        return "fused part"
    if len(weight) == 2 and scale == (2,) and weight[0] % 2 == 0:
        return "fused part"
    return None


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """Return FP8 weights times their scales, in float32.

    Args:
        values: e4m3 weights of any shape.
        scales: their scales, in a shape that :func:`scale_kind` knows.
    """
    weight, scales = values.float(), scales.float()
    kind = scale_kind(tuple(weight.shape), tuple(scales.shape))
    if kind == "tensor":
        weight *= scales.view(())
    elif kind == "row":
        weight *= scales
    elif kind == "fused part":
        weight.view(len(scales), -1).mul_(scales[:, None])
    else:
        columns = scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
        for number, row in enumerate(columns):
            weight[number * BLOCK : (number + 1) * BLOCK] *= row
    return weight


def config_dtype(config: JsonObject) -> torch.dtype:
    """Return the dtype that a config names for its tower, or else for the model; else bfloat16."""
    named = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES.values()}
    for part in _parts(config):
        for field in ("dtype", "torch_dtype"):
            if (name := str(part.get(field)).removeprefix("torch.")) in named:
                return named[name]
    return torch.bfloat16


def say_scales(tensors: Iterable[TowerTensor], dtype: torch.dtype) -> str:
    """Return a sentence that says which weights are in FP8; an empty one if none is.

    Args:
        tensors: the tensors of a tower, with their scales.
        dtype: the dtype in which the tower is loaded by default.
    """
    kinds = Counter(
        scale_kind(tensor.entry.shape, tensor.scale.entry.shape)
        for tensor in tensors
        if tensor.scale is not None
    )
    if not kinds:
        return ""
    forms = ", ".join(f"{count} with a scale per {kind}" for kind, count in kinds.items())
    name = str(dtype).removeprefix("torch.")
    return f"{kinds.total()} tensors are FP8 weights ({forms}), which are loaded as {name}"
