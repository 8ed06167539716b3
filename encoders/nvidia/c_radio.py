"""C-RADIO v3 and v4: NVIDIA's towers, distilled from several teachers, over packed patches.

A pre-norm ViT with a class token per teacher and registers before the patches, and full attention
inside each image; nothing follows the last block. The learned 128x128 table of positions is resized
to a square as large as the longer side of an image, of which the top left part is taken. The class
tokens of some teachers, side by side, are the summary of an image (``embed(pool="head")``).

Source: ``RadioModel`` of transformers 5.23.0, and for v3 ``NaFlexVit`` and ``VisionTransformer`` of
timm 1.0.31.
Repo ids: nvidia/C-RADIOv4-{SO400M,H}, nvidia/C-RADIOv3-{B,L,H,g},
timm/{vit,naflexvit}_{base,large,huge,giant}_patch16_radio_v3.c_radio,
timm/{vit,naflexvit}_{so400m,huge}_patch16_radio_v4.c_radio. ``nemotron.py`` has the tower with
the projectors of Nemotron.

Shapes: P patches row by row, S segments (images or frames), r rows before the patches of a segment
(class tokens and registers), T = P + S*r packed rows, D width, s side of the table of positions.

Deliberate differences:

- Images of any size are packed.
- Mean and std, which the source subtracts and divides by inside the model, are the preprocessor's.
- ``last_hidden_state`` and ``pooler_output`` are equal and have only patches; the class tokens and
  registers are ``extras["prefix"]``.
- Positions are interpolated in float32 or wider and rounded once. As in timm, the corners of table
  and grid coincide in v3 B and H (``align_corners``), as their authors' code had it.
- timm's ``vit_*`` checkpoints have the table resized to 32x32: at another size than 512x512, their
  features differ from those of the other layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..base.checks import check_input_size, check_rows, require_metadata
from ..base.patch_encoder import RasterEncoder
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_choice,
    read_count,
    read_epsilon,
    read_flag,
    read_indices,
    read_ratio,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import MLP, Attention, Block, BlockSizes
from ..layers.products import FlatPatchEmbed
from ..layers.segments import TileSegments, mean_segments, padding_rows

if TYPE_CHECKING:
    from ..contract import Preprocessor
    from ..streams.pooling import PoolingHead

_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_SIZES = {  # width, depth, heads, ratio of the MLP's width
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "so400m": (1152, 27, 16, 4304 / 1152),
    "huge": (1280, 32, 16, 4.0),
    "giant": (1536, 40, 24, 4.0),
}
_ALIGN_CORNERS = {  # by version of the checkpoint
    "c-radio_v3-b": True,
    "c-radio_v3-l": False,
    "c-radio_v3-h": True,
    "c-radio_v3-g": False,
    "c-radio_v4-so400m": False,
    "c-radio_v4-h": False,
}


@dataclass(frozen=True)
class CRadioConfig:
    """The sizes of a C-RADIO tower, and how its checkpoint stores it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    class_tokens: int = 3
    prefix_rows: int = 10
    """The number of rows before the patches of an image: class tokens and registers."""
    summary: tuple[int, ...] = (0, 1)
    """The numbers of the class tokens that are the summary of an image."""
    position_side: int = 128
    """The number of rows, and of columns, of the learned table of positions."""
    align_corners: bool = False
    """Whether the corners of the table of positions are at the corner patches of an image."""
    layer_scale: bool = False
    """Whether each branch of a block is scaled per channel."""
    tokens_apart: bool = False
    """Whether the first class token is a tensor of its own, as in timm's checkpoints."""
    patch_weight: Literal["rows", "kernel", "channels_last"] = "rows"
    """The form of the weight that embeds patches: rows with the axes channel, row, column, a kernel
    of these axes, or rows with the axes row, column, channel."""
    patch_bias: bool = False
    image_size: tuple[int, int] = (512, 512)
    """The height and width in pixels to which images are stretched by default."""
    patch_size: int = 16
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        if not self.summary or not all(0 <= n < self.class_tokens for n in self.summary):
            raise ValueError(
                f"config: summary={self.summary} must be numbers of class tokens, from 0 to "
                f"{self.class_tokens - 1}"
            )

    @property
    def registers(self) -> int:
        """The number of rows before the patches that belong to no teacher."""
        return self.prefix_rows - self.class_tokens

    @property
    def spatial_merge_size(self) -> int:
        """The side in patches of the square that becomes one token: 1, so that each patch is a
        token."""
        return 1

    @property
    def image_dim(self) -> int:
        """The values of a patch of an image: channels * height * width."""
        return self.in_channels * self.patch_size**2

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``, which is a patch of an image."""
        return self.image_dim

    @property
    def out_hidden_size(self) -> int:
        """The number of columns of a token, which is the width of the tower."""
        return self.hidden_size

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> CRadioConfig:
        """Read the ``config.json`` of a checkpoint, in the form of NVIDIA or of transformers.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        section = find_section(config, "vision_config")
        if "args" in section:
            section = {**_of_nvidia(section), **section}
        for part in (config, section):
            require_value(part, "norm_mean", _MEAN)
            require_value(part, "norm_std", _STD)
        require_value(section, "hidden_act", "gelu")
        require_value(section, "use_swiglu_ffn", False)
        require_value(section, "qkv_bias", True)
        width = read_size(section, "hidden_size", default=1280)
        heads = 16 if width == 1280 else None  # else required: no tensor's shape shows it
        patch = read_size(section, "patch_size", default=16)
        largest = read_size(section, "max_img_size", default=2048)
        require_divisible("max_img_size", largest, "patch_size", patch)
        # The product is a whole number but for its last bits.
        inner = int(width * read_ratio(section, "mlp_ratio", default=4.0) + 1e-6)
        height, image_width = read_indices(section, "preferred_resolution", (512, 512))
        classes = read_size(section, "num_cls_tokens", default=3)
        return cls(
            depth=read_size(section, "num_hidden_layers", default=32, limit=1024),
            hidden_size=width,
            intermediate_size=inner,
            num_heads=read_size(section, "num_attention_heads", default=heads),
            class_tokens=classes,
            prefix_rows=classes + read_count(section, "num_registers", default=7),
            summary=read_indices(section, "summary_idxs", (0, 1)),
            position_side=largest // patch,
            align_corners=read_flag(section, "align_corners", default=False),
            layer_scale=read_flag(section, "layer_scale", default=False),
            tokens_apart=read_flag(section, "tokens_apart", default=False),
            patch_weight=read_choice(
                section, "patch_weight", "rows", "kernel", "channels_last", default="rows"
            ),
            patch_bias=read_flag(section, "patch_bias", default=False),
            image_size=(height, image_width),
            patch_size=patch,
            in_channels=read_size(section, "num_channels", default=3),
            layer_norm_eps=read_epsilon(section, "layer_norm_eps", default=1e-6),
        )


class CRadioEncoder(RasterEncoder):
    """Encodes packed patches to one token per patch, and to class tokens and registers."""

    class_token = True

    def __init__(self, config: CRadioConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: CRadioConfig = config
        self._preprocessor = preprocessor
        self.prefix_rows = config.prefix_rows
        width, sizes, first = config.hidden_size, config.block_sizes, config.prefix_rows
        self.patch_embed: FlatPatchEmbed | nn.Linear
        if config.patch_weight == "kernel":
            shape = config.patch_size, config.in_channels
            self.patch_embed = FlatPatchEmbed(width, *shape, bias=config.patch_bias)
        else:
            self.patch_embed = nn.Linear(config.image_dim, width, bias=config.patch_bias)
        self.other_tokens: nn.Parameter | None = None
        if config.tokens_apart:
            self.other_tokens, first = nn.Parameter(torch.randn(first - 1, width)), 1
        self.tokens = nn.Parameter(torch.randn(first, width))
        self.pos_embed = nn.Embedding(config.position_side**2, width)
        block = ScaledBlock if config.layer_scale else Block
        self.blocks: nn.ModuleList = nn.ModuleList(block(sizes) for _ in range(config.depth))

    def _default_preprocessor(self) -> Preprocessor:
        from .c_radio_pixels import CRadioPreprocessor

        return CRadioPreprocessor.c_radio(self.config.patch_size, *self.config.image_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to P tokens.

        Returns:
            ``last_hidden_state`` [P, D] and ``pooler_output`` [P, D], which are equal, no DeepStack
            features, ``"prefix"`` [S, r, D], the class tokens and registers.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        return self.prefixed_output(hidden, hidden, metadata)

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], add positions, and pack them behind r rows, [T, D]."""
        pixels = self._admit_pixels(pixel_values, self.tokens)
        require_metadata(metadata, "pos_embed_index")
        taps, weight = metadata["pos_embed_index"], metadata["pos_embed_weight"]
        check_rows(pixels.shape[0], taps.shape[0], "but encoder_metadata is for")
        patches = self._add_weighted_rows(self._project(pixels), self.pos_embed, taps, weight)
        apart = () if self.other_tokens is None else (self.other_tokens,)
        return self.pack(torch.cat((self.tokens, *apart)), patches, metadata)

    def _project(self, pixels: Tensor) -> Tensor:
        """Return patches [P, patch_dim] as rows [P, D], without positions."""
        if self.config.patch_weight == "channels_last":
            planes = pixels.unflatten(1, (self.config.in_channels, -1))
            pixels = planes.transpose(1, 2).flatten(1)
        rows: Tensor = self.patch_embed(pixels)
        return rows

    @property
    def pooling_head(self) -> PoolingHead | None:
        """The summary of an image: the class tokens of some teachers, side by side."""
        from ..streams.pooling import PoolingHead

        return PoolingHead(self._summarise, "prefix")

    def _summarise(self, prefixes: Sequence[Tensor]) -> Tensor:
        """Return [items, k*D] of the rows [segments, r, D] of each item, k numbers of ``summary``.

        The summary of an item of several segments is their mean.
        """
        rows = mean_segments(prefixes)
        return torch.cat([rows[:, number] for number in self.config.summary], dim=1)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> TileSegments:
        """Return the tensors that all blocks read: offsets of segments, and padding."""
        offsets = metadata["cu_seqlens"]
        return TileSegments(offsets, metadata["max_seqlen"], padding_rows(offsets, len(hidden)))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the four entries of the table of positions that each patch sums.

        ``pos_embed_index`` int64 [P, 4] has their numbers and ``pos_embed_weight`` [P, 4] their
        weights. P is ``max_input_size``, with padding at the end, or the patches of ``grids``.
        """
        dtype = torch.promote_types(self.pos_embed.weight.dtype, torch.float32)
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size)
        index = torch.zeros(rows, 4, dtype=torch.int64, device="cpu")
        weight = torch.zeros(rows, 4, dtype=dtype, device="cpu")
        start = 0
        for t, h, w in grids:
            taps = square_taps(h, w, self.config.position_side, self.config.align_corners)
            stop = start + t * h * w
            index[start:stop], weight[start:stop] = (part.repeat(t, 1) for part in taps)
            start = stop
        return {"pos_embed_index": index, "pos_embed_weight": weight}


class ScaledBlock(Block):
    """Pre-norm attention and MLP, each scaled per channel and added to the residual (v3 B, L)."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__(sizes)
        width = sizes.hidden_size
        self.ls1, self.ls2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor, context: TileSegments) -> Tensor:
        hidden = torch.addcmul(hidden, self.attn(self.norm1(hidden), context), self.ls1)
        return torch.addcmul(hidden, self.mlp(self.norm2(hidden)), self.ls2)

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (ScaledBlock, Attention, MLP):
            return None
        parts = plain_parts(self, self.mlp.activation)
        return parts._replace(scale1=self.ls1, scale2=self.ls2)


def square_taps(height: int, width: int, side: int, align_corners: bool) -> tuple[Tensor, Tensor]:
    """Return the entries of a table of positions that each patch of a grid sums, and the weights.

    The table is resized to a square as large as the longer side of the grid, bilinearly and not
    antialiased, and the grid is its top left part.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        side: rows and columns of the table.
        align_corners: whether the corners of table and square coincide, not their outer edges.

    Returns:
        Numbers int64 [h*w, 4] and weights float64 [h*w, 4].
    """
    longer = max(height, width)
    steps = torch.arange(longer, dtype=torch.float64, device="cpu")
    if align_corners:
        centres = steps * ((side - 1) / max(longer - 1, 1))
    else:
        centres = ((steps + 0.5) * (side / longer) - 0.5).clamp(min=0)
    low = centres.floor()
    entries = torch.stack((low, low + 1), 1).clamp(max=side - 1).to(torch.int64)
    weights = torch.stack((1 - (centres - low), centres - low), 1)
    shape = (height, width, 2, 2)
    index = entries[:height, None, :, None] * side + entries[None, :width, None]
    weight = weights[:height, None, :, None] * weights[None, :width, None]
    return index.expand(shape).reshape(-1, 4), weight.expand(shape).reshape(-1, 4)


def _of_nvidia(section: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of transformers' config that the ``args`` of NVIDIA's config stand for.

    Raises:
        ValueError: a tower that is not supported.
    """
    for name in ("adaptor_names", "vitdet_window_size", "feature_normalizer_config"):
        require_value(section, name, None, [])
    require_value(section, "inter_feature_normalizer_config", None)
    args = find_section(section, "args")
    require_value(args, "model_norm", None, False)
    model = str(args.get("model"))
    size = next((size for size in _SIZES if model.startswith(f"vit_{size}_")), None)
    if size is None:
        known = ", ".join(f"vit_{size}" for size in _SIZES)
        raise ValueError(f"config field model={model!r} is not implemented: must be of {known}")
    width, depth, heads, ratio = _SIZES[size]
    own = args.get("model_kwargs") or {}
    if not isinstance(own, Mapping) or set(own) - {"embed_dim", "depth", "num_heads"}:
        raise ValueError(
            f"config field model_kwargs={own!r} is not implemented: must be embed_dim, depth and "
            "num_heads"
        )
    names, summarised = _read_teachers(args)
    version = read_choice(section, "version", *_ALIGN_CORNERS, default="")
    multiple = read_count(args, "register_multiple", default=0)
    registers = multiple - len(names) % multiple if multiple else 0
    return {
        "hidden_size": own.get("embed_dim", width),
        "num_hidden_layers": own.get("depth", depth),
        "num_attention_heads": own.get("num_heads", heads),
        "mlp_ratio": ratio,
        "num_cls_tokens": len(names),
        "num_registers": read_count(args, "cpe_num_registers", default=registers),
        "summary_idxs": [number for number, name in enumerate(names) if name in summarised],
        "max_img_size": args.get("cpe_max_size"),
        "align_corners": _ALIGN_CORNERS[version],
        "layer_scale": "_v2_" in model,
    }


def _read_teachers(args: Mapping[str, object]) -> tuple[list[str], set[str]]:
    """Return the names of teachers that have a class token, and of those in the summary."""
    teachers = args.get("teachers")
    if not isinstance(teachers, list) or not all(
        isinstance(teacher, Mapping) and "name" in teacher for teacher in teachers
    ):
        raise ValueError(f"config field teachers={teachers!r}: must be a list of named teachers")
    names = list(dict.fromkeys(str(teacher["name"]) for teacher in teachers))
    if not read_flag(args, "cls_token_per_teacher", default=True):
        return names[:1], set(names[:1])
    return names, {str(t["name"]) for t in teachers if read_flag(t, "use_summary", default=True)}
