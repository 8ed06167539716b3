"""Random weights and pixels from a seed, and distances between outputs.

Weights have scales at which mistakes show: norm gains around 1, biases other than zero, a position
table from N(0, 1), query and key weights large enough for the softmax to have peaks.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from encoders.base.patch_encoder import PatchEncoder
from encoders.base.tile_encoder import TileEncoder
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput

from .configs import Config, edited
from .family import Family, Grids
from .lift import NO_LIFT
from .towers import BY_NAME

AnyModule = TypeVar("AnyModule", bound=nn.Module)

NOISE = 2**24 + 43
"""How many normal numbers are drawn for all large weights: a prime, so that rows do not repeat."""
LARGE = 2**20
"""The size from which a weight on the CPU is a copy of these, which takes a tenth of the time."""


def draw_weights(module: AnyModule, seed: int = 0, calm: float = 1.0) -> AnyModule:
    """Fill every parameter from a seed, at a scale at which its loss or misuse would show.

    ``calm`` below 1 shrinks the matrices and the position table, where float32 noise grows. The
    numbers are drawn on the device of the weights.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device=device)

    with torch.no_grad():
        for name, weight in module.named_parameters():
            narrow = weight.dtype != torch.float32 or not weight.is_contiguous()
            noise = torch.empty(weight.shape, device=device) if narrow else weight
            if weight.numel() < LARGE or device.type != "cpu":
                noise.normal_(generator=generator)
            else:
                copy_noise(noise, generator)
            _scale(name, noise).mul_(calm if weight.ndim > 1 else 1.0)
            if narrow:
                weight.copy_(noise)
        for name, value in module.named_buffers():
            noise = draw(value)
            if name.endswith(("_min", "_max")):  # bounds that clip some values, below and above 0
                value.copy_((noise.abs() + 1) * (-1 if name.endswith("min") else 1))
            elif name in ("std_bias", "std_scale"):
                value.copy_(noise + (name == "std_scale"))
    return module


@cache
def shared_noise() -> Tensor:
    """Normal numbers from a seed, which large weights share."""
    return torch.randn(NOISE, generator=torch.Generator().manual_seed(0))


def copy_noise(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Fill a contiguous weight with shared noise from a drawn place on, over and over."""
    noise = shared_noise()
    place = int(torch.randint(NOISE, (), generator=generator))
    rest = weight.view(-1)
    while len(rest):
        piece = noise[place : place + len(rest)]
        rest[: len(piece)] = piece
        rest, place = rest[len(piece) :], 0
    return weight


def _scale(name: str, noise: Tensor) -> Tensor:
    """Bring drawn noise to the scale of a parameter, in its place, which saves half of the time."""
    if re.search(r"pos_embed|position_embedding|positional_embedding|class_embedding", name):
        return noise
    if name.endswith("bias"):
        return noise.mul_(0.2)
    if re.search(r"\.ls_?[12]$", name):
        return noise.mul_(0.2).add_(0.5)
    if re.search(r"^transformer\.layers\.\d+\.layer_norm[12]\.weight$", name):
        # Step3's norms stand on the branches, and attention reads the stream as it is: at a gain of
        # 1, 63 blocks made 4e-4 of the 1e-15 between two float64 runs that agree in one block.
        return noise.mul_(0.03).add_(0.1)
    if re.search(r"^blocks\.\d+\.attn\.[qk]_norm\.weight$", name):
        # Gemma 4's softmax has no scale: at a gain of 1, float32 made 3e-6 of three blocks.
        return noise.mul_(0.1).add_(0.45)
    if noise.ndim == 1:
        return noise.mul_(0.3).add_(1.0)
    gain = 1.3 if "qkv" in name or "in_proj" in name else 1.0
    return noise.mul_(gain).div_(noise[0].numel() ** 0.5)


def build_encoder(
    family: Family,
    changes: Config,
    dtype: torch.dtype = torch.float32,
    calm: float = 1.0,
    device: str = "cpu",
) -> VisionEncoder:
    """Build our tower at the sizes in ``changes``, with random weights, in eval mode."""
    config = family.config_class.from_hf(edited(family.config, **changes))
    with no_init_weights():
        encoder = family.build(config).to(device, dtype)
    return draw_weights(encoder, calm=calm).eval().requires_grad_(False)


def build_pair(
    family: Family,
    changes: Config,
    dtype: torch.dtype = torch.float32,
    lift: AbstractContextManager[object] = NO_LIFT,
    calm: float = 1.0,
    device: str = "cpu",
    shared: bool = False,
) -> tuple[VisionEncoder, nn.Module]:
    """Build our tower and the reference with equal weights; the keys of both must correspond.

    ``lift`` (a :class:`LiftFloat32`) is entered for the reference alone. ``shared`` weights lie in
    the same memory, for a test that changes none: large ones take half of the memory then.
    """
    encoder = build_encoder(family, changes, dtype, calm, device)
    with no_init_weights(), lift:
        reference = family.reference(edited(family.config, **changes))
    for weight in reference.parameters():  # not the rotary buffer, which from_pretrained keeps wide
        weight.data = weight.data.to(dtype)
    state = {name: value.contiguous() for name, value in family.keys(encoder.state_dict()).items()}
    reference.to(device).load_state_dict(state, strict=True, assign=shared)
    return encoder, reference.eval().requires_grad_(False)


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32, calm: float = 1.0) -> VisionEncoder:
    """Return a shared three-block tower, which tests must not change."""
    return build_encoder(BY_NAME[name], BY_NAME[name].tiny, dtype, calm)


def fresh(name: str, dtype: torch.dtype = torch.float32) -> VisionEncoder:
    """Build a three-block tower that a test may change."""
    return build_encoder(BY_NAME[name], BY_NAME[name].tiny, dtype)


def in_tokens_of(encoder: VisionEncoder, grids: Grids) -> Grids:
    """Return grids for tokens of 2x2 patches as those with as many tokens of this encoder's."""
    assert isinstance(encoder, PatchEncoder)
    side = encoder.config.spatial_merge_size
    return [[t, h // 2 * side, w // 2 * side] for t, h, w in grids]


def add_noise(*weights: Tensor, share: float = 0.1, seed: int = 1) -> None:
    """Change weights in place by noise of ``share`` of their own size.

    A factor in its place could be lost: a norm behind the layer divides it out.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        size = weight.detach().double().square().mean().sqrt()
        weight.add_((share * size * noise.to(weight.device)).to(weight.dtype))


def draw_pixels(
    encoder: VisionEncoder, grids: Grids, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return normalised pixels for ``grids``: patches, or tiles of the grid's size."""
    generator = torch.Generator().manual_seed(seed)
    shape: tuple[int, ...]
    if isinstance(encoder, TileEncoder):
        (h, w), patch = grids[0][1:], encoder.config.patch_size
        shape = (sum(grid[0] for grid in grids), 3, h * patch, w * patch)
    else:
        shape = (sum(t * h * w for t, h, w in grids), *encoder.row_shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative L2 distance, computed in float64."""
    ours, theirs = ours.double(), theirs.double()
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    return float((ours - theirs).norm() / theirs.norm())


def fields_of(output: EncoderOutput) -> dict[str, Tensor]:
    """Return every tensor of an output by name."""
    layers = {f"deepstack_features[{n}]": x for n, x in enumerate(output.deepstack_features)}
    return {
        "last_hidden_state": output.last_hidden_state,
        "pooler_output": output.pooler_output,
        **layers,
    }


def joined(outputs: list[EncoderOutput]) -> EncoderOutput:
    """Return the outputs of several items as one of all their rows."""
    layers = zip(*(output.deepstack_features for output in outputs), strict=True)
    return EncoderOutput(
        torch.cat([output.last_hidden_state for output in outputs]),
        torch.cat([output.pooler_output for output in outputs]),
        tuple(map(torch.cat, layers)),
    )


def distances(ours: EncoderOutput, theirs: EncoderOutput) -> dict[str, float]:
    """Return the relative L2 distance of every field by name."""
    mine, truth = fields_of(ours), fields_of(theirs)
    assert mine.keys() == truth.keys()
    return {name: distance(mine[name], truth[name]) for name in truth}
