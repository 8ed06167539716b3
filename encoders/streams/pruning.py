"""Efficient video sampling: drop the tokens of a clip that repeat the frame before.

Source: arXiv 2510.14624; the rule and the number of kept tokens are as in
``vllm/multimodal/evs.py`` of vLLM at commit 094f117. A frame here is one step of the grid in time,
which is a pair of frames in Qwen-VL.

Shapes: N tokens of a clip, t frames of N/t tokens each, n tokens kept, D width.

Deliberate difference: similarities are computed in float32 or wider, where vLLM takes the dtype of
the tokens, so that a bfloat16 clip may keep other tokens of nearly equal change.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple, SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import EncoderOutput, Grid, GridLike, PartialOutput
from ..grids import read_grid


class PrunedTokens(NamedTuple):
    """The tokens of a video that pruning kept, in their order."""

    tokens: Tensor
    """The kept tokens [n, D], which are rows of ``pooler_output``."""
    deepstack_features: tuple[Tensor, ...] | None
    """The kept rows of each DeepStack feature, [n, D] each; None if the output has none."""
    positions: Tensor
    """[n, 3] int64: frame, row and column of each kept token, in merged tokens."""
    mask: Tensor
    """Bool [N]: whether each of the N tokens was kept."""


def prune_video_tokens(
    output: EncoderOutput | PartialOutput, grid_thw: GridLike, rate: float
) -> PrunedTokens:
    """Keep the first frame of a clip and the tokens that changed most since the frame before.

    The change of a token is one minus its cosine similarity to the token at the same place of the
    frame before. ``max(N / t, int(N * (1 - rate)))`` tokens are kept; of equal changes the earlier
    one. The host does not wait for the device, so that results of CUDA graphs are pruned at once.

    Args:
        output: the output of one clip, as ``encode`` and ``split`` of any encoder return it.
        grid_thw: the clip's (t, h, w) in patches, [3] or [1, 3]; t is the number of segments where
            the tower averages the frames of a segment (MoonViT-3D), of pairs where it joins them
            (ERNIE-4.5-VL).
        rate: fraction of the tokens to drop, at least 0 and below 1.

    Returns:
        The kept tokens, and their positions in the clip.

    Raises:
        ValueError: a rate out of its range, no EncoderOutput, more than one item, an output
            without ``pooler_output``, or with another number of tokens than the grid makes.
    """
    _check(output, rate)
    tokens = output.pooler_output
    if tokens is None:
        raise ValueError(
            "the output has no pooler_output, whose rows are pruned: name it in "
            "GraphedEncoder(outputs=['pooler_output', ...])"
        )
    frames, rows, columns = _token_grid(grid_thw, len(tokens))
    count = max(rows * columns, int(len(tokens) * (1 - rate)))
    order = _token_changes(tokens.unflatten(0, (frames, rows * columns))).argsort(
        descending=True, stable=True
    )
    kept_index = order[:count].sort().values
    mask = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    positions = (kept_index // (rows * columns), kept_index // columns % rows, kept_index % columns)
    deepstack = output.deepstack_features
    return PrunedTokens(
        tokens[kept_index],
        None if deepstack is None else tuple(feature[kept_index] for feature in deepstack),
        torch.stack(positions, 1),
        mask.index_fill(0, kept_index, True),
    )


def _check(output: object, rate: object) -> None:
    """Raise a ValueError unless ``output`` is an encoder's output and ``0 <= rate < 1``."""
    if not isinstance(rate, SupportsFloat) or not 0 <= float(rate) < 1:
        raise ValueError(
            f"rate={rate!r}: the fraction of tokens to drop must be a number from 0 to below 1"
        )
    if not isinstance(output, EncoderOutput | PartialOutput):
        raise ValueError(
            f"output is of type {type(output).__name__}: pass the EncoderOutput of one clip, an "
            "entry of the list that encode and split return"
        )


def _token_changes(tokens: Tensor) -> Tensor:
    """Return 1 - cosine of each token [t, n, D] with the same token one frame before, [t * n].

    The value is infinite for the tokens of the first frame, so that all of them are kept.
    """
    float_tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    change = 1 - F.cosine_similarity(float_tokens[1:], float_tokens[:-1], dim=-1)
    first = change.new_full((1, tokens.shape[1]), torch.inf)
    return torch.cat((first, change)).flatten()


def _token_grid(grid_thw: GridLike, tokens: int) -> Grid:
    """Return the numbers of frames, rows and columns of tokens that a clip has."""
    grids = read_grid(grid_thw, 1, "patches")
    if len(grids) != 1:
        raise ValueError(
            f"grid_thw has {len(grids)} items: pass one clip at a time, of "
            "encoder.split(output, grid_thw) and its row of grid_thw"
        )
    t, h, w = grids[0]
    merge = isqrt(t * h * w // tokens) if tokens else 0
    if not merge or h % merge or w % merge or t * h * w != tokens * merge**2:
        raise ValueError(
            f"pooler_output has {tokens} rows, which a clip of grid {t}x{h}x{w} does not make: "
            "pass the output and the grid of the same clip"
        )
    return t, h // merge, w // merge
