"""DINOv2, with and without registers: Meta's self-supervised ViT, over packed patches.

A pre-norm ViT with a class token, a learned 37x37 table of positions that is resized to the grid of
each image, a scale per channel on each branch, full attention inside each image, and a final norm.
The largest size has gated MLPs; later checkpoints have four registers behind the class token.

Source: ``Dinov2Model`` and ``Dinov2WithRegistersModel`` of transformers 5.24.0.
Repo ids: facebook/dinov2-{small,base,large,giant}, facebook/dinov2-with-registers-{..},
timm/vit_{small,base,large,giant}_patch14_{dinov2,reg4_dinov2}.lvd142m.

Shapes: P patches row by row, S segments (images or frames), r rows before the patches of a segment
(class token and registers), T = P + S*r packed rows, D width, s side of the table of positions.

Deliberate differences:

- Images of any size are packed; transformers takes batches of one size.
- ``last_hidden_state`` and ``pooler_output`` have only patches; the class token and the registers,
  normed, are ``extras["prefix"]``. transformers' ``pooler_output`` is the first of them.
- The patch embedding is a product with the stored Conv2d weight, the same sums.
- Positions are interpolated as transformers does: without antialiasing if there are no registers,
  with it if there are. timm antialiases always, and Meta's code shifts the samples by 0.1 of a
  patch if there are no registers: features at another grid than 37x37 differ by about 0.5 %.
- Positions are interpolated in float32 or wider and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..base.checks import check_input_size, check_rows, require_metadata
from ..base.patch_encoder import RasterEncoder, merge_order_positions
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    read_count,
    read_epsilon,
    read_flag,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.products import FlatPatchEmbed
from ..layers.segments import TileSegments, padding_rows
from ..layers.table_taps import axis_weights, grid_taps
from .blocks import Block, DinoBlockSizes

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Dinov2Config:
    """The sizes of a DINOv2 tower, with or without registers."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    prefix_rows: int = 1
    """The number of rows before the patches of an image: the class token and the registers."""
    gated: bool = False
    """Whether the MLPs have a gate with SiLU (SwiGLU); else their activation is exact GELU."""
    class_position: bool = True
    """Whether the first entry of the table of positions is that of the class token; timm's
    checkpoints with registers have it added to the class token instead."""
    mask_token: bool = True
    """Whether the checkpoint has the token that replaces masked patches in training; no forward
    pass reads it."""
    image_size: int = 518
    """The side in pixels of the square images whose grid the table of positions fits."""
    patch_size: int = 14
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)

    @property
    def registers(self) -> int:
        """The number of learned rows behind the class token; positions are resized by another rule
        if it is 0."""
        return self.prefix_rows - 1

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def spatial_merge_size(self) -> int:
        """The side of a token in patches: 1, because each patch is a token."""
        return 1

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def out_hidden_size(self) -> int:
        """The number of columns of a token, which is the width of the tower."""
        return self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Dinov2Config:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        with_registers = config.get("model_type") == "dinov2_with_registers"
        require_value(config, "hidden_act", "gelu")
        require_value(config, "qkv_bias", True)
        width = read_size(config, "hidden_size", default=768)
        heads = 12 if width == 768 else None  # else required: no tensor's shape shows it
        gated = read_flag(config, "use_swiglu_ffn", default=False)
        inner = width * read_size(config, "mlp_ratio", default=4, limit=64)
        return cls(
            depth=read_size(config, "num_hidden_layers", default=12, limit=1024),
            hidden_size=width,
            intermediate_size=(inner * 2 // 3 + 7) // 8 * 8 if gated else inner,
            num_heads=read_size(config, "num_attention_heads", default=heads),
            prefix_rows=1
            + read_count(config, "num_register_tokens", default=4 if with_registers else 0),
            gated=gated,
            class_position=read_flag(config, "class_position", default=True),
            mask_token=read_flag(config, "use_mask_token", default=True),
            image_size=read_size(config, "image_size", default=224),
            patch_size=read_size(config, "patch_size", default=16 if with_registers else 14),
            in_channels=read_size(config, "num_channels", default=3),
            layer_norm_eps=read_epsilon(config, "layer_norm_eps", default=1e-6),
        )


class Dinov2Encoder(RasterEncoder):
    """Encodes packed patches to hidden states and one normed token per patch."""

    class_token = True

    def __init__(self, config: Dinov2Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Dinov2Config = config
        self._preprocessor = preprocessor
        self.prefix_rows = config.prefix_rows
        width, entries = config.hidden_size, config.position_side**2 + config.class_position
        self.patch_embed = FlatPatchEmbed(width, config.patch_size, config.in_channels)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.register_tokens: nn.Parameter | None = None
        if config.registers:
            self.register_tokens = nn.Parameter(torch.randn(1, config.registers, width))
        if config.mask_token:
            self.register_buffer("mask_token", torch.zeros(1, width))
        self.pos_embed = nn.Embedding(entries, width)
        sizes = DinoBlockSizes(
            width,
            config.intermediate_size,
            config.num_heads,
            config.layer_norm_eps,
            config.gated,
            key_bias=True,
        )
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def _default_preprocessor(self) -> Preprocessor:
        from .dino_pixels import DinoPreprocessor

        return DinoPreprocessor.dinov2(self.config.patch_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to P tokens.

        Returns:
            ``last_hidden_state`` [P, D] before the last norm, ``pooler_output`` [P, D] after it, no
            DeepStack features, ``"prefix"`` [S, r, D], the normed class token and registers.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        return self.prefixed_output(hidden, self.norm(hidden), metadata)

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], add positions, and pack them behind r rows, [T, D]."""
        pixels = self._admit_pixels(pixel_values, self.cls_token)
        require_metadata(metadata, "patch_index")
        check_rows(pixels.shape[0], metadata["patch_index"].shape[0], "but encoder_metadata is for")
        patches = self._add_positions(self.patch_embed(pixels), metadata)
        prefix = self.cls_token[0]
        if self.config.class_position:
            prefix = prefix + self.pos_embed.weight[:1]
        if self.register_tokens is not None:
            prefix = torch.cat((prefix, self.register_tokens[0]))
        return self.pack(prefix, patches, metadata)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> TileSegments:
        """Return the tensors that all blocks read: offsets of segments, and padding."""
        offsets = metadata["cu_seqlens"]
        return TileSegments(offsets, metadata["max_seqlen"], padding_rows(offsets, len(hidden)))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the weights with which each patch sums entries of the table of positions.

        Without registers, these are sixteen entries per patch, ``pos_embed_index`` int64 [P, 16],
        and their weights, ``pos_embed_weight`` [P, 16]. With registers, they are weights of all
        rows and of all columns of the table, ``pos_embed_rows`` and ``pos_embed_columns`` [P, s];
        the weight of an entry is its row's times its column's. P is ``max_input_size``, with
        padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.pos_embed.weight.dtype, torch.float32)
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size)
        side = self.config.position_side
        if not self.config.registers:
            positions = merge_order_positions(grids, 1, rows)
            index, weight = grid_taps(positions, grids, side, dtype)
            return {
                "pos_embed_index": index + int(self.config.class_position),
                "pos_embed_weight": weight,
            }
        taps = torch.zeros(2, rows, side, dtype=dtype, device="cpu")
        start = 0
        for t, h, w in grids:
            cells = merge_order_positions([(1, h, w)], 1, h * w)
            for axis, size in enumerate((h, w)):
                weights = axis_weights(side, size, cubic=True)[cells[:, axis]]
                taps[axis, start : start + t * h * w] = weights.repeat(t, 1)
            start += t * h * w
        return {"pos_embed_rows": taps[0], "pos_embed_columns": taps[1]}

    def _add_positions(self, patches: Tensor, metadata: Metadata) -> Tensor:
        """Return ``patches`` [P, D] plus the interpolated positions of each."""
        if not self.config.registers:
            taps, weight = metadata["pos_embed_index"], metadata["pos_embed_weight"]
            return self._add_weighted_rows(patches, self.pos_embed, taps, weight)
        rows, columns = metadata["pos_embed_rows"], metadata["pos_embed_columns"]
        weights = (rows[:, :, None] * columns[:, None]).flatten(1)
        table = self.pos_embed.weight[int(self.config.class_position) :]
        return patches + (weights @ table.to(weights.dtype)).to(patches.dtype)
