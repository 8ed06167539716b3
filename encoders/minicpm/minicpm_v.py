"""The vision tower and the merger of MiniCPM-V 4.6 and 4.7 and of MiniCPM-OCR.

SigLIP's blocks over packed patches of images of any size, with the nearest entries of a 70x70 table
of positions. After block 6, a merger inside the tower turns windows of 2x2 patches into one row
each: attention inside each window, then an MLP over its four rows, added to their mean. The other
blocks run on a quarter of the rows. A last merger makes one token of 2x2 rows. In mode "4x" there
is no merger inside the tower, and four times as many tokens. A large image is encoded whole and in
slices of one size; the tokens of the whole image come first. So is each frame of a video, whose
tokens come frame by frame.

Source: ``MiniCPMV4_6VisionModel`` and ``MiniCPMV4_6Merger`` of transformers 5.23.0; the classes of
MiniCPM-V 4.7 and MiniCPM-OCR are the same.
Repo ids: openbmb/MiniCPM-V-4.6.

Shapes: P patches row by row, W windows of 2x2 patches, N tokens, D width.

Deliberate differences:

- ``last_hidden_state`` is the output of the last block, before the final norm.
- Outputs of blocks after the merger are given once per patch, so that all have P rows.
- The patch embedding is a Linear over the stored Conv2d weight, the same sums.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.checks import check_input_size, check_rows, require_metadata
from ..base.patch_encoder import RasterEncoder, merge_order, merge_order_positions
from ..base.paths_encoder import TilesThenImage
from ..base.raster import raster_maps, stitch_items
from ..data import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata, Tiling
from ..hf_config import (
    find_section,
    read_choice,
    read_epsilon,
    read_layer,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes
from ..layers.products import FlatPatchEmbed
from ..layers.segments import TileSegments, padding_rows

if TYPE_CHECKING:
    from ..contract import Preprocessor, Step


@dataclass(frozen=True)
class MiniCPMVConfig:
    """Sizes of tower and merger; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    blocks_before_merger: int = 7
    """The number of blocks that run before windows of 2x2 rows are merged."""
    merges_inside: bool = True
    """Whether windows are merged (mode "16x"); False keeps all rows (mode "4x")."""
    image_size: int = 980
    patch_size: int = 14
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_sizes({"patches per side": self.position_side})
        if self.merges_inside and self.blocks_before_merger >= self.depth:
            raise ValueError(
                f"config: insert_layer_id={self.blocks_before_merger - 1}: must be the number, "
                f"from 0, of one of the {self.depth} blocks, but not of the last"
            )

    @property
    def spatial_merge_size(self) -> int:
        """Side of a token in patches."""
        return 4 if self.merges_inside else 2

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> MiniCPMVConfig:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        require_value(vision, "window_kernel_size", [2, 2], (2, 2), 2)
        require_value(config, "merge_kernel_size", [2, 2], (2, 2), 2)
        require_value(config, "merger_times", 1)
        require_value(config, "drop_vision_last_layer", False)
        is_ocr = str(config.get("model_type")).startswith("minicpm_ocr")
        mode = read_choice(
            config, "downsample_mode", "16x", "4x", default="4x" if is_ocr else "16x"
        )
        inserted = read_layer(config, "insert_layer_id", default=6)
        if inserted < 0:
            raise ValueError(f"config field insert_layer_id={inserted}: must be at least 0")
        return cls(
            depth=read_size(vision, "num_hidden_layers", limit=1024),
            hidden_size=read_size(vision, "hidden_size"),
            intermediate_size=read_size(vision, "intermediate_size"),
            num_heads=read_size(vision, "num_attention_heads"),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            blocks_before_merger=inserted + 1,
            merges_inside=mode == "16x",
            image_size=read_size(vision, "image_size"),
            patch_size=read_size(vision, "patch_size"),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


class MiniCPMVEncoder(TilesThenImage):
    """Encodes images, and the slices of large ones, to hidden states and merged tokens."""

    config: MiniCPMVConfig
    _image_first = True
    _takes_clips = True

    def __init__(self, config: MiniCPMVConfig, preprocessor: Preprocessor | None = None) -> None:
        tower = MiniCPMVTower(config)
        super().__init__(tower, copy.copy(tower), preprocessor)

    def _default_preprocessor(self) -> Preprocessor:
        from .minicpm_v_pixels import SlicePreprocessor

        sizes = self.config.patch_size, self.config.spatial_merge_size
        return SlicePreprocessor(sizes[0], token_size=sizes[1])


class MiniCPMVTower(RasterEncoder):
    """Encodes packed patches, of whole images (input path "image") or their slices ("tiles")."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        self.config: MiniCPMVConfig = config
        self.patch_embed = FlatPatchEmbed(config.hidden_size, config.patch_size, config.in_channels)
        self.pos_embed = nn.Parameter(torch.randn(config.position_side**2, config.hidden_size))
        self.blocks: nn.ModuleList = nn.ModuleList(map(Block, [config.block_sizes] * config.depth))
        self.window_merger = WindowMerger(config.block_sizes)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.merger = Merger(config)

    @property
    def budget_range(self) -> tuple[int, int]:
        """The fewest and most tokens of a CUDA graph: as many patches in both modes."""
        smallest, largest = super().budget_range
        return smallest, largest // 4 if self.config.merges_inside else largest

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's patches, tokens, views, patches per view, and rows at the end."""
        specs = super().item_specs(grid_thw)
        if not self.config.merges_inside:
            return specs
        return [spec._replace(merged_rows=spec.input_size // 4) for spec in specs]

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P/4, D] before the last norm, or [P, D] in mode "4x",
            ``pooler_output`` [N, out], no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)  # the block after the merger merges windows before it runs
        tokens = self.merger(self.norm(hidden)[metadata["merge_index"]])
        return EncoderOutput(hidden, tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add the nearest entries of the table, [P, D]."""
        pixels = self._admit_pixels(pixel_values, self.pos_embed)
        require_metadata(metadata, "pos_embed_index")
        index = metadata["pos_embed_index"]
        check_rows(pixels.shape[0], index.shape[0], "but encoder_metadata is for")
        patches: Tensor = self.patch_embed(pixels)
        return patches + self.pos_embed[index]

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return rows [P, ..] in input order; a row of a window is given to each of its patches."""
        index = metadata.get("patch_window")
        return rows if index is None or len(rows) == len(index) else rows[index]

    def _steps(
        self,
        blocks: nn.ModuleList,
        run: Sequence[nn.Module],
        hidden: Tensor,
        metadata: Metadata,
        read_after: Collection[int],
        start: int = 0,
    ) -> Iterable[Step]:
        """Return the blocks ``run`` as functions; the one after the merger merges windows first."""
        first = self.config.blocks_before_merger
        if not self.config.merges_inside or len(run) <= first:
            return super()._steps(blocks, run, hidden, metadata, read_after, start)
        before = super()._steps(blocks, run[:first], hidden, metadata, read_after, start)
        steps_of = partial(super()._steps, blocks, run[first:])
        numbers = {number - first for number in read_after}
        after: list[Step] = []

        def merge(hidden: Tensor) -> Tensor:
            windows = self.window_merger(hidden[metadata["window_index"]].unflatten(0, (-1, 4)))
            after.extend(steps_of(windows, _of_windows(metadata), numbers, first))
            return after[0](windows)

        def later(number: int, hidden: Tensor) -> Tensor:
            return after[number](hidden)

        return [*before, merge, *(partial(later, n) for n in range(1, len(run) - first))]

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> TileSegments:
        """Return the tensors that blocks read: offsets of segments, and padding."""
        offsets = metadata["cu_seqlens"]
        return TileSegments(offsets, metadata["max_seqlen"], padding_rows(offsets, len(hidden)))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the entries of the table of positions per patch, and rows by window and token.

        ``pos_embed_index`` int64 [P] is a patch's row of the table. ``window_index`` int64 [P] has
        the patches of each window one after another, and ``patch_window`` int64 [P] the window of
        each patch. ``merge_index`` int64 [W] has the windows of each token one after another; in
        mode "4x" it has the patches, [P], and there are no windows. P is ``max_input_size``, with
        padding at the end, or the patches of ``grids``.
        """
        merge, side = self.config.spatial_merge_size, self.config.position_side
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        cells = merge_order_positions(grids, 1, rows)
        index = torch.zeros(rows, dtype=torch.int64, device="cpu")
        start = 0
        for t, h, w in grids:
            stop = start + t * h * w
            r, c = cells[start:stop].unbind(1)
            index[start:stop] = r * side // h * side + c * side // w
            start = stop
        if not self.config.merges_inside:
            return {"pos_embed_index": index, "merge_index": merge_order(grids, 2, rows)}
        window_index = merge_order(grids, 2, rows)
        halves = [(t, h // 2, w // 2) for t, h, w in grids]
        return {
            "pos_embed_index": index,
            "window_index": window_index,
            "patch_window": window_index.argsort() // 4,
            "merge_index": merge_order(halves, 2, rows // 4),
        }

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        grids = self._read(grid_thw)
        if self.config.merges_inside and len(features) == sum(t * h * w for t, h, w in grids) // 4:
            halves = [(t, h // 2, w // 2) for t, h, w in grids]
            return stitch_items(raster_maps(features, halves, 1), tiles)
        return super()._maps_of_grids(features, grid_thw, tiles)


class WindowMerger(nn.Module):
    """Turns windows of 2x2 patches [W, 4, D] into one row each, [W, D]."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        width, inner = 4 * sizes.hidden_size, 4 * sizes.intermediate_size
        self.norm1 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.attn = WindowAttention(sizes)
        self.norm2 = nn.LayerNorm(width, eps=sizes.layer_norm_eps)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, sizes.hidden_size)

    def forward(self, windows: Tensor) -> Tensor:
        windows = windows + self.attn(self.norm1(windows))
        inner = F.gelu(self.fc1(self.norm2(windows.flatten(1))), approximate="tanh")
        return self.fc2(inner) + windows.mean(1)


class WindowAttention(nn.Module):
    """Full attention inside each window [W, 4, D]."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.num_heads, width = sizes.num_heads, sizes.hidden_size
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, windows: Tensor) -> Tensor:
        q, k, v = rearrange(
            self.qkv(windows), "w n (three h k) -> three w h n k", three=3, h=self.num_heads
        )
        # A kernel of CUDA has a block per window, and at most 65,535 on that axis.
        most = len(q) if torch.compiler.is_compiling() else max(min(len(q), 65535), 1)
        parts = zip(*(x.split(most) for x in (q, k, v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in parts])
        return self.proj(rearrange(out, "w h n k -> w n (h k)"))


class Merger(nn.Module):
    """Normalises the four rows of a token together, and projects them to that token."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        self.width = width = 4 * config.hidden_size
        self.pre_norm = nn.LayerNorm(width, eps=1e-6)
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, config.out_hidden_size)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = self.pre_norm(rows.view(-1, self.width))
        return self.linear_2(F.gelu(self.linear_1(tokens)))


def _of_windows(metadata: Metadata) -> Metadata:
    """Return the metadata of the blocks after the merger: segments with a quarter of the rows.

    The offsets are computed from those of patches, so that no caller has to pad a second set.
    """
    quarters = {name: metadata[name] // 4 for name in ("cu_seqlens", "max_seqlen")}
    return {**metadata, **quarters}
