"""The smallest encoder that meets the contract: a module that inherits nothing of this library.

It multiplies each row by a weight and subtracts the first row of its segment; two rows make a
token. Every sum has two terms, so results are the same bits in any batch, beside any padding and on
any device: a difference means that a wrapper has mixed up rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from encoders.contract import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata
from encoders.grids import read_grid

WIDTH = 3


class ToyEncoder(nn.Module):
    """A toy encoder of items (frames, h, w), w even; a frame is a segment of h * w rows."""

    budget_range = (4, 64)
    row_shape = (WIDTH,)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.25, -3.0]), requires_grad=False)

    def grid_for(self, tokens: int) -> Grid:
        return 1, 1, 2 * tokens

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        grids = read_grid(grid_thw)
        return [EncoderItemSpec(t * h * w, t * h * w // 2, t, h * w) for t, h, w in grids]

    def prepare_encoder_metadata(
        self,
        grid_thw: GridLike,
        *,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        max_seqlen_override: int | None = None,
        max_input_size: int | None = None,
        max_windows_per_batch: int | None = None,
        device: torch.device | str | None = None,
    ) -> Metadata:
        """Return segment offsets and ``first``, the row at which the segment of each row begins."""
        lengths = [spec.longest_segment for spec in self.item_specs(grid_thw)]
        frames = [spec.segments for spec in self.item_specs(grid_thw)]
        rows = sum(n * t for n, t in zip(lengths, frames, strict=True))
        longest, most = max(lengths, default=0), max_frames_per_batch or max_batch_size
        assert most is None or sum(frames) <= most, "more segments than the budget holds"
        assert max_seqlen_override is None or longest <= max_seqlen_override, "segment cut off"
        assert max_input_size is None or rows <= max_input_size, "more rows than the budget holds"
        first = torch.arange(max_input_size or rows)
        start = 0
        for length, count in zip(lengths, frames, strict=True):
            for _ in range(count):
                first[start : start + length] = start
                start += length
        longest = longest if max_seqlen_override is None else max_seqlen_override
        return {"first": first.to(device), "max_seqlen": torch.tensor(longest, dtype=torch.int32)}

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        metadata = encoder_metadata or self.prepare_encoder_metadata(grid_thw or [])
        rows = pixel_values.to(self.weight) * self.weight
        hidden = rows - rows[metadata["first"]]
        tokens = hidden[0::2] + hidden[1::2]
        return EncoderOutput(hidden, tokens, (tokens * 2, tokens * self.weight))

    def split(self, output: EncoderOutput, grid_thw: GridLike) -> list[EncoderOutput]:
        outputs, row, token = [], 0, 0
        for spec in self.item_specs(grid_thw):
            rows = slice(row, row := row + spec.input_size)
            tokens = slice(token, token := token + spec.output_tokens)
            hidden, pooled, deep, *_ = output
            outputs.append(
                EncoderOutput(
                    None if hidden is None else hidden[rows],
                    None if pooled is None else pooled[tokens],
                    None if deep is None else tuple(layer[tokens] for layer in deep),
                )
            )
        return outputs
