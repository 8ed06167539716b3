"""The attention of a block in fused steps: norms and rotation of heads in place, then a kernel.

Shapes: T rows, D width, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from ...block_parts import BlockParts, PartNorm, RelativePositions
from ...data import Metadata
from ...layers.segments import check_equal_segments
from ...layers.torch_internals import is_plain, is_untouched
from ..obstacles import is_norm
from ..shapes import AttentionShape, RelativeShape
from .candidates import AttentionKernel, kernel_errors
from .choices import KernelChoices


@dataclass
class BlocksRun:
    """The record of one pass over a stack of blocks: kernels used, or why blocks ran as modules."""

    kernels: set[str] = field(default_factory=set)
    """Names of the attention kernels that ran."""
    called_count: int = 0
    """Number of layers and blocks called as modules; 0 if device or mode ruled out all kernels."""
    because: str | None = None
    """The reason why the blocks ran as modules, without fused kernels; None if kernels ran."""


class FusedAttention:
    """Computes the attention of each block in one forward, between the ``qkv`` and ``proj`` layers.

    Args:
        choices: the attention kernels of the encoder.
        hidden: the hidden states that the pass starts with, [T, D] or views [B, .., D].
        metadata: the result of the encoder's ``prepare_encoder_metadata``.
        run_record: the record to which the kernels that run are added.

    Raises:
        ValueError: the metadata has rotary angles for views of another size.
    """

    def __init__(
        self, choices: KernelChoices, hidden: Tensor, metadata: Metadata, run_record: BlocksRun
    ) -> None:
        from ..triton_kernels import norms, rotary  # need Triton

        self.norms, self.rotary = norms, rotary
        self.choices, self.run_record = choices, run_record
        self.shape, self.dtype = hidden.shape, str(hidden.dtype)
        self.metadata = {name: entry.contiguous() for name, entry in metadata.items()}
        self.tile_rows = prod(hidden.shape[1:-1]) if hidden.ndim > 2 else 0
        angles = metadata.get("rotary_pos_emb_cos")
        if self.tile_rows and angles is not None and len(angles) != self.tile_rows:
            raise ValueError(  # the kernel would rotate rows by angles of other rows
                f"encoder_metadata has angles for views of {len(angles)} patches, and these pixels "
                f"make views of {self.tile_rows}: pass what prepare_encoder_metadata makes of the "
                "grid_thw of these pixels"
            )
        self.buffer: Tensor | None = None
        self.picks: dict[tuple[bool, bool], tuple[AttentionShape, AttentionKernel]] = {}
        """Shape and attention kernel, by whether it is window attention and half of it causal."""

    def takes(self, parts: BlockParts, hidden: Tensor) -> bool:
        """Return whether :meth:`attend` can compute the attention of a block, for states [T, D]."""
        if parts.relative is None:
            return True
        # A replaced layer would get whole views here, but padded windows in the block itself.
        return is_plain(parts.qkv, parts.proj) and self.choices.takes_relative(
            hidden, self._relative_shape(parts, parts.relative)
        )

    def attend(self, parts: BlockParts, rows: Tensor) -> Tensor:
        """Return the attention of a block, [rows, heads * head size].

        Args:
            parts: the layers of the block.
            rows: the result of the block's qkv product, [rows, columns]; overwritten.
        """
        if parts.relative is not None:
            return self._attend_relative(parts, parts.relative, rows)
        offsets, longest = self._segments(parts)
        heads = parts.num_heads
        shared = parts.num_key_value_heads or heads
        qkv = rows.unflatten(-1, (heads + 2 * shared, -1))
        q, k, v = qkv.split((heads, shared, shared), 1)
        for norm, part in ((parts.q_norm, q), (parts.k_norm, k), (parts.v_norm, v)):
            if norm is not None and not (type(norm) is nn.Identity and is_untouched(norm)):
                self._norm_in_place(norm, part if parts.head_norms else part.flatten(1))
        cos, sin = self._angles(parts)
        if self.buffer is None:  # zeros, because kernels leave padded rows unwritten
            self.buffer = torch.zeros_like(q, memory_format=torch.contiguous_format)
        kind = parts.windowed, parts.causal_half
        if kind not in self.picks:
            shape = self._shape_of(q, len(offsets) - 1, longest, heads // shared)
            shape = shape._replace(causal_half=parts.causal_half)
            name = self.choices.pick(q, shape)
            self.picks[kind] = shape, self.choices.kernel(name)
            self.run_record.kernels.add(name)
        shape, kernel = self.picks[kind]
        scale = parts.softmax_scale
        factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5  # kernels scale by K ** -0.5
        # The rotation of queries and keys clears padding, too.
        if cos is not None and sin is not None:
            queries = 0 if scale is None else heads
            rotated_heads = heads + shared
            self.rotary.rotate_in_place(
                qkv, cos, sin, offsets, rotated_heads, parts.rotary_pair_distance, queries, factor
            )
        else:
            if scale is not None:
                q.mul_(factor)
            if kernel.reads_beyond and shape.pads:
                self.rotary.clear_rows(qkv.flatten(1), offsets, kernel.reads_beyond)
        return self._run_kernel(kernel, shape, (q, k, v), self.buffer, offsets).flatten(1)

    def _run_kernel(
        self,
        kernel: AttentionKernel,
        shape: AttentionShape,
        qkv: tuple[Tensor, Tensor, Tensor],
        buffer: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Return the attention of queries, keys and values [rows, heads, head size] by a kernel."""
        try:
            return kernel.attend(*qkv, buffer, offsets, shape)
        except torch.OutOfMemoryError:
            raise
        except kernel_errors() as error:
            raise RuntimeError(
                f"attention kernel {kernel.name!r} failed on {shape}: {error}; pin another "
                "one with kernels=..., or use the reference"
            ) from error

    def _attend_relative(
        self, parts: BlockParts, relative: RelativePositions, rows: Tensor
    ) -> Tensor:
        """Return the attention of a block with relative positions, [rows, heads * head size]."""
        from ..triton_kernels.relative_attention import attend  # needs Triton

        shape = self._relative_shape(parts, relative)
        out = rows.new_empty(len(rows), parts.num_heads, shape.size)
        self.run_record.kernels.add("triton")
        return attend(rows, parts.qkv.bias, relative.tables(*shape.segment), shape, out).flatten(1)

    def _relative_shape(self, parts: BlockParts, relative: RelativePositions) -> RelativeShape:
        _, h, w, width = self.shape
        return RelativeShape(width // parts.num_heads, h, w, relative.window, self.dtype)

    def _segments(self, parts: BlockParts) -> tuple[Tensor, int]:
        """Return the offsets of the segments of a block, int32 [S+1], and the longest length."""
        if parts.windowed:
            return self.metadata["cu_window_seqlens"], int(self.metadata["max_window_seqlen"])
        longest = self.metadata["max_seqlen"]
        if self.tile_rows:
            check_equal_segments(longest, self.tile_rows)
        return self.metadata["cu_seqlens"], self.tile_rows or int(longest)

    def _angles(self, parts: BlockParts) -> tuple[Tensor | None, Tensor | None]:
        """Return the rotary cos and sin of a block; windows of equal size may have their own."""
        name = "rotary_pos_emb_"
        if parts.windowed and f"window_{name}cos" in self.metadata:
            name = f"window_{name}"
        return self.metadata.get(f"{name}cos"), self.metadata.get(f"{name}sin")

    def _shape_of(self, q: Tensor, segments: int, longest: int, group: int) -> AttentionShape:
        rows, heads, size = q.shape
        tiles = rows // longest if self.tile_rows else segments
        equal = self.tile_rows > 0
        return AttentionShape(heads, size, rows, tiles, longest, equal, str(q.dtype), group)

    def _norm_in_place(self, norm: PartNorm, rows: Tensor) -> None:
        """Apply ``norm`` in place to queries, keys or values: [T, D], or heads [T, H, K]."""
        if not is_norm(norm, weighted=rows.ndim == 2):
            self.run_record.called_count += 1
            rows.copy_(norm(rows.clone()))  # a hook may hold the input of the norm
        elif rows.ndim == 3:
            self.norms.normalise_heads(rows, self.norms.Norm.of(norm))
        else:
            self.norms.normalise(self.norms.Sum(rows), self.norms.Norm.of(norm), out=rows)
