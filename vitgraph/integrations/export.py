"""Encoders as ``torch.export`` programs and ONNX files that run without this library.

While an encoder is traced, its attention over packed segments (images, frames or windows, one after
another) is one custom operator. Here ``scaled_dot_product_attention`` replaces the operator: if the
grid is fixed, in one batch per run of equal segments, else under a block-diagonal mask.

Shapes: P patches, T packed rows, H heads, K head size, S segments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from encoders import Encoder, PatchEncoder, VisionEncoder
from encoders.contract import GridLike, Metadata
from encoders.grids import read_grid

__all__ = ["export_onnx", "export_program"]

UNREAD = ("max_seqlen", "max_window_seqlen")
"""Metadata that only custom attention kernels read, so that exported programs do not take them."""


def export_program(encoder: VisionEncoder, grid_thw: GridLike | None = None) -> ExportedProgram:
    """Trace an encoder into a program that uses only operators of torch itself.

    Args:
        encoder: an encoder returned by ``load_encoder``. If it has several input paths, pass one of
            them, such as ``encoder.paths["tiles"]``.
        grid_thw: [items, 3], the grids (t, h, w) in patches that every call will have. None allows
            items of any number and size with at least two tokens. Qwen towers then take the
            metadata as an input, too, and attend under a mask [P, P], whose memory grows with the
            square of P. Towers over tiles (InternViT, the paths of Step's and DeepSeek's encoders)
            take any number of tiles of one size, and need neither metadata nor mask.

    Returns:
        A program called with ``(pixel_values,)`` or, for a Qwen tower without ``grid_thw``,
        ``(pixel_values, metadata)``, where ``metadata`` has the entries of
        ``encoder.prepare_encoder_metadata(grid_thw)`` except ``max_seqlen`` and
        ``max_window_seqlen``. The program returns a dict with ``last_hidden_state``,
        ``pooler_output`` and, with DeepStack, ``deepstack_features_0`` and so on.

    Raises:
        ValueError: an empty or invalid grid, an accelerated encoder, an encoder with several
            input paths, or no grid for an encoder whose forward depends on the sizes.
    """
    _check_exportable(encoder)
    if encoder.accelerator is not None:
        raise ValueError(
            "this encoder is accelerated, and its kernels cannot be exported: export the encoder "
            "that it was made from"
        )
    dynamic, tiled = grid_thw is None, _takes_tiles(encoder)
    grids = [encoder.grid_for(6), encoder.grid_for(600)] if grid_thw is None else grid_thw
    pixels = _example_pixels(encoder, grids)
    metadata = encoder.prepare_encoder_metadata(grids)
    varying = _without_unread(metadata) if dynamic and not tiled else {}
    fixed = {name: value for name, value in metadata.items() if name not in varying}
    args = (pixels, varying) if varying else (pixels,)
    shapes = _dynamic_shapes(encoder, varying) if dynamic else None
    with torch.no_grad():
        try:
            program = torch.export.export(_Traced(encoder, fixed), args, dynamic_shapes=shapes)
        except RuntimeError as error:
            if not dynamic or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"grid_thw=None: {type(encoder).__name__} cannot be exported for items of any "
                "size, because its forward depends on the sizes; pass a grid, grid_thw=[[t, h, w]]"
            ) from error
        attend = _dense_attention({} if dynamic else _segment_lengths(metadata))
        node = torch.ops.vitgraph.segment_attention.default
        decomposed: ExportedProgram = program.run_decompositions({node: attend})
        return decomposed


def export_onnx(
    encoder: VisionEncoder, path: str | os.PathLike[str], grid_thw: GridLike | None = None
) -> None:
    """Write an encoder as an ONNX file, with its weights in a second file beside it.

    The inputs are ``pixel_values`` and, for a Qwen tower without ``grid_thw``, the metadata, one
    input per entry with its name; the outputs are listed at :func:`export_program`. onnxruntime has
    few operators in bfloat16 on the CPU: load the encoder in float32 or float16.

    Args:
        encoder: an encoder as for :func:`export_program`.
        path: the ``.onnx`` file to write; the weights go to the same name with ``.data`` added.
        grid_thw: [items, 3], the grids (t, h, w) that every call will have; None takes items of any
            size.

    Raises:
        ImportError: ``onnx`` or ``onnxscript`` is not installed.
        ValueError: an encoder or a grid that :func:`export_program` rejects.
    """
    try:
        import onnxscript  # noqa: F401  # torch.onnx needs it, but only fails after the trace
    except ImportError as error:
        raise ImportError(
            "exporting to ONNX needs two packages: pip install 'onnx>=1.19' 'onnxscript>=0.5'"
        ) from error
    program = export_program(encoder, grid_thw)
    assert program.example_inputs is not None
    _, *metadata = program.example_inputs[0]
    names = ["pixel_values", *(metadata[0] if metadata else ())]
    # The program returns a dict, whose keys are the ``context`` of its pytree spec.
    outputs = program.call_spec.out_spec.context
    torch.onnx.export(program, (), path, input_names=names, output_names=outputs, verbose=False)


def _check_exportable(encoder: object) -> None:
    name = type(encoder).__name__
    if not isinstance(encoder, Encoder):
        raise ValueError(
            f"encoder is of type {name}: export_program takes what load_encoder returns; of a "
            "GraphedEncoder pass its encoder, graphed.encoder"
        )
    if encoder.paths["image"] is not encoder:
        calls = " and ".join(
            f"export_program(encoder.paths[{path_name!r}])" for path_name in encoder.paths
        )
        raise ValueError(
            f"{name} runs several towers or joins their tokens, which is more than one program: "
            f"call {calls}, and encoder.join on what they return"
        )


def _takes_tiles(encoder: VisionEncoder) -> bool:
    """Return whether an encoder's ``pixel_values`` are tiles [B, 3, H, W], not patches [P, ..]."""
    return len(encoder.row_shape) == 3


def _example_pixels(encoder: VisionEncoder, grids: GridLike) -> Tensor:
    """Return zeros in the shape and dtype of an encoder's ``pixel_values`` for items of these
    grids.

    Raises:
        ValueError: there is no grid.
    """
    specs, weight = encoder.item_specs(grids), next(encoder.parameters())
    if not specs:
        raise ValueError("grid_thw is empty: pass the grid of one item or more")
    shape = encoder.row_shape
    if _takes_tiles(encoder):
        _, h, w = read_grid(grids)[0]
        patch = shape[1] // encoder.grid_for(1)[1]
        shape = (shape[0], h * patch, w * patch)
    rows = sum(spec.input_size for spec in specs)
    return torch.zeros(rows, *shape, dtype=weight.dtype, device=weight.device)


class _Traced(nn.Module):
    """An encoder with the metadata that all calls share as buffers; ``forward`` takes the rest."""

    def __init__(self, encoder: VisionEncoder, fixed: Metadata) -> None:
        super().__init__()
        self.encoder = encoder
        for name, value in fixed.items():
            self.register_buffer(name, value)
        self.fixed = list(fixed)

    def forward(self, pixel_values: Tensor, metadata: Metadata | None = None) -> dict[str, Tensor]:
        fixed = {name: self.get_buffer(name) for name in self.fixed}
        hidden, pooled, deepstack, _ = self.encoder(
            pixel_values, encoder_metadata={**fixed, **(metadata or {})}
        )
        layers = {f"deepstack_features_{number}": layer for number, layer in enumerate(deepstack)}
        return {"last_hidden_state": hidden, "pooler_output": pooled, **layers}


def _without_unread(metadata: Metadata) -> Metadata:
    return {name: value for name, value in metadata.items() if name not in UNREAD}


def _dynamic_shapes(encoder: VisionEncoder, varying: Metadata) -> tuple[object, ...]:
    """Return ``dynamic_shapes`` of ``torch.export``: which axes of the inputs vary between calls.

    The number of rows of pixels varies by whole tiles or whole tokens; the lengths of metadata vary
    with the numbers of tokens, attention segments and windows.
    """
    if _takes_tiles(encoder):
        return ({0: Dim("tiles")},)
    assert isinstance(encoder, PatchEncoder)
    unit = encoder.config.spatial_merge_size**2
    tokens = Dim("tokens")
    sizes = {
        "cu_seqlens": Dim("segments") + 1,
        "cu_window_seqlens": Dim("windows") + 1,
        "window_index": tokens,
        "reverse_index": tokens,
        "pool_index": tokens,
        "token_index": Dim("learned_and_tokens"),
    }
    return {0: unit * tokens}, {name: {0: sizes.get(name, unit * tokens)} for name in varying}


def _segment_lengths(metadata: Metadata) -> dict[int, list[int]]:
    """Return number of offsets -> lengths of the segments between them, for segments and windows.

    The number of offsets tells which of the two a call of attention is for: the numbers are equal
    only if every window is a whole segment.
    """
    offsets = [metadata[name].tolist() for name in metadata if name.startswith("cu_")]
    return {len(ends): [b - a for a, b in pairwise(ends)] for ends in offsets}


_Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, int], Tensor]


def _dense_attention(lengths: dict[int, list[int]]) -> _Attend:
    """Return a function that replaces the operator for attention over packed segments."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: Tensor,
        padding: Tensor | None,
        segment_rows: int,
        causal_half: bool = False,
    ) -> Tensor:
        if segment_rows:
            return _attend_equal(q, k, v, segment_rows, causal_half)
        if not lengths:
            return _attend_masked(q, k, v, cu_seqlens)
        return _attend_runs(q, k, v, lengths[cu_seqlens.shape[0]])

    return attend


def _attend_equal(q: Tensor, k: Tensor, v: Tensor, rows: int, causal_half: bool = False) -> Tensor:
    q, k, v = (x.unflatten(0, (-1, rows)).transpose(1, 2) for x in (q, k, v))
    mask = None
    if causal_half:  # each row sees the first half, and those of the second also what precedes them
        mask = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        mask[:, : rows // 2] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1)


def _attend_runs(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Return attention within each segment; neighbouring segments of equal length run as one
    batch.
    """
    parts, start = [], 0
    for length, equal in groupby(lengths):
        end = start + length * len(list(equal))
        parts.append(_attend_equal(q[start:end], k[start:end], v[start:end], length))
        start = end
    return torch.cat(parts)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return attention within each segment, by a mask [T, T] over all pairs of rows."""
    rows = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
    segment = (rows[:, None] >= cu_seqlens[None, 1:]).sum(1)
    mask = segment[:, None] == segment[None, :]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
