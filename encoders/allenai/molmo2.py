"""The encoder of Molmo2: SigLIP2 over overlapping crops, tokens pooled of patches by attention.

A pre-norm ViT over square views without a class token: learned positions, layer norms, no final
norm. The hidden states after two blocks lie side by side. An image is seen whole, and in crops that
overlap: of a map of all crops, each patch is taken of the crop in which it lies farther inside. A
token is pooled of a window of 2x2 patches, which may belong to several crops: the mean of the
window attends to its patches. A gated MLP projects the token. A frame of a video is seen whole,
with windows of 3x3 patches.

Source: ``Molmo2Model`` of transformers 5.23.0, ``Molmo2VisionBackbone`` of vLLM 0.32.0.
Repo ids: allenai/Molmo2-4B; Molmo2-8B and Molmo2-O-7B have the same model type.

Shapes: B views, n patches of a view, D width, L blocks that are read, N tokens, each of a
window of patches, H heads, K head size.

Deliberate differences:

- Views of another size than in the config are accepted by the tower; their positions are
  interpolated as in vLLM.
- Blocks that are not in the config's ``vit_layers`` or before them do not exist, as in the source:
  published configs have 27, and their checkpoints 25.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.paths_encoder import PathsEncoder
from ..base.tile_encoder import TileEncoder
from ..data import (
    EncoderOutput,
    GridLike,
    Metadata,
    Output,
    PartialOutput,
    VisionInputs,
    output_like,
)
from ..hf_config import (
    find_section,
    read_epsilon,
    read_field,
    read_indices,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes, resize_table

if TYPE_CHECKING:
    from ..contract import Preprocessor

WINDOW = 2
"""The side in patches of the window that a token is pooled of."""
FRAME_WINDOW = 3
"""The side in patches of the window that a token of a frame is pooled of."""
MARGINS = (4, 4)
"""The patches at the left (top) and at the right (bottom) of a crop that a neighbour has, too."""


@dataclass(frozen=True)
class Molmo2Config:
    """Sizes of tower, pooling and projector; ``out_hidden_size`` is the language model's width."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    pool_heads: int
    projector_size: int
    """The width between the two layers of the projector."""
    out_hidden_size: int
    vit_layers: tuple[int, ...] = (24, 18)
    """The numbers, from 0, of the blocks whose outputs lie side by side, in this order."""
    image_size: int = 378
    patch_size: int = 14
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        layers = self.vit_layers
        if not layers or min(layers) < 0 or max(layers) != self.depth - 1:
            raise ValueError(
                f"config: vit_layers={list(layers)} must name the last of {self.depth} "
                "blocks, and others before it"
            )
        if self.side <= sum(MARGINS):
            raise ValueError(
                f"config: image_size={self.image_size} makes crops of {self.side} patches per "
                f"side, which must be more than their margins of {MARGINS[0]} and {MARGINS[1]}"
            )

    @property
    def tile_size(self) -> int:
        """Side of a view in pixels, rounded down to whole patches."""
        return self.side * self.patch_size

    @property
    def side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Molmo2Config:
        """Read the ``config.json`` of a Molmo2 model, as published or as transformers saves it.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config", "vit_config")
        adapter = find_section(config, "adapter_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        require_value(adapter, "hidden_act", "silu")
        require_value(adapter, "pooling_attention_mask", True)
        width = read_size(vision, "hidden_size", default=1152)
        usual = 16 if width == 1152 else None  # else required: no tensor's shape shows it
        heads, pool_heads = (
            read_size(part, "num_attention_heads", default=usual) for part in (vision, adapter)
        )
        for part, count in ((vision, heads), (adapter, pool_heads)):
            require_value(part, "hidden_size", width)
            require_value(part, "num_key_value_heads", count)
            require_value(part, "head_dim", width // count)
            require_value(part, "attention_bias", True)
        require_value(adapter, "mlp_bias", False)
        blocks = read_size(vision, "num_hidden_layers", default=25, limit=1024)
        name = "vit_layers" if "vit_layers" in adapter else "vision_feature_layer"
        layers = read_indices(adapter, name, (24, 18))
        if not layers or any(not -blocks <= layer < blocks for layer in layers):
            raise ValueError(
                f"config: {name}={list(layers)}: must name some of {blocks} blocks, negative ones "
                "from the end"
            )
        numbers = tuple(layer % blocks for layer in layers)
        image_size = read_field(vision, "image_default_input_size", "image_size", default=378)
        return cls(
            depth=max(numbers) + 1,
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=4304),
            num_heads=heads,
            pool_heads=pool_heads,
            projector_size=read_size(adapter, "intermediate_size"),
            out_hidden_size=read_size(adapter, "text_hidden_size"),
            vit_layers=numbers,
            image_size=read_size({"image_size": image_size}, "image_size"),
            patch_size=read_size(vision, "image_patch_size", "patch_size", default=14),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


class Molmo2Tower(TileEncoder):
    """The ViT of Molmo2, which encodes views of one size to the outputs of several blocks."""

    def __init__(self, config: Molmo2Config) -> None:
        super().__init__()
        self.config: Molmo2Config = config
        sizes, width = config.block_sizes, config.hidden_size
        self.patch_embed = nn.Linear(config.in_channels * config.patch_size**2, width)
        self.pos_embed = nn.Parameter(torch.randn(config.side**2, width))
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``: the blocks' outputs side by side."""
        return self.config.hidden_size * len(self.config.vit_layers)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each.

        Returns:
            ``last_hidden_state`` [B, n, D], ``pooler_output`` [B*n, L*D], the outputs of the blocks
            that are read side by side, no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        layers, read = self.config.vit_layers, dict[int, Tensor]()
        for number, block in enumerate(
            self.steps(self.blocks, hidden, metadata, read_after=layers)
        ):
            hidden = block(hidden)
            if number in layers:
                read[number] = hidden
        rows = torch.cat([read[number] for number in layers], dim=-1)
        return EncoderOutput(hidden, rows.flatten(0, 1), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as patches with positions, [B, n, D]."""
        pixels, side = self._admit_tiles(pixel_values, self.pos_embed), self.config.patch_size
        rows = rearrange(pixels, "b c (h p) (w q) -> b (h w) (p q c)", p=side, q=side)
        h, w = (size // side for size in pixels.shape[2:])
        return self.patch_embed(rows) + resize_table(self.pos_embed, h, w, antialias=True)


class Molmo2Encoder(PathsEncoder):
    """Encodes an image and its crops, or a clip, to hidden states and a sequence of tokens."""

    paths: Mapping[str, Molmo2Tower]

    def __init__(self, config: Molmo2Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Molmo2Config = config
        self._preprocessor = preprocessor
        tower = Molmo2Tower(config)
        self._share_modules(tower, tensors=True)
        self.paths = {"image": tower}
        self.pool = WindowPool(tower.out_features, config.hidden_size, config.pool_heads)
        self.projector = Projector(
            config.hidden_size, config.projector_size, config.out_hidden_size
        )

    def _default_preprocessor(self) -> Preprocessor:
        from .molmo2_pixels import OverlapPreprocessor

        return OverlapPreprocessor(
            self.config.patch_size,
            image_size=self.config.image_size,
            margins=MARGINS,
            window=WINDOW,
            frame_window=FRAME_WINDOW,
        )

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Pool the tokens of each image of its views, and of each clip of its frames.

        Returns:
            For each item ``last_hidden_state`` [views, n, D], the whole image first, and
            ``pooler_output`` [N, out], the tokens of the whole image, then of the crops.
        """
        items = list(zip(self.split_paths(outputs, inputs), self._crops_of(inputs), strict=True))
        if not items:
            return []
        counts = [crops.tokens for _, crops in items]
        tokens: list[Tensor | None] = [None] * len(items)
        if (rows := outputs["image"].pooler_output) is not None:
            tokens = list(self._tokens(rows, [crops for _, crops in items]).split(counts))
        results = []
        for (item, _), pooled in zip(items, tokens, strict=True):
            hidden, _, deepstack, extras = PartialOutput(*item["image"])
            results.append(output_like(item["image"], hidden, pooled, deepstack, extras))
        return results

    def _tokens(self, rows: Tensor, items: list[Crops | Frames]) -> Tensor:
        """Return the tokens [N, out] of all items, from the rows [B*n, L*D] of all their views."""
        windows, first = [], 0
        widest = max(crops.windows().shape[1] for crops in items)
        for crops in items:
            window = F.pad(crops.windows(), (0, widest - crops.windows().shape[1]), value=-1)
            windows.append(torch.where(window < 0, window, window + first))
            first += crops.patches
        index = torch.cat(windows).to(rows.device)
        valid = index >= 0
        tokens: Tensor = self.projector(self.pool(rows[index.clamp(min=0)], valid))
        return tokens

    def _crops_of(self, inputs: VisionInputs) -> list[Crops | Frames]:
        """Return how the crops of each item lie; an item without crops is a clip.

        Raises:
            ValueError: ``inputs`` lack tiles, or do not agree with each other.
        """
        grids = inputs.grid_thw.tolist()
        if inputs.tiles is None:
            if not grids:
                return []
            raise ValueError(
                "inputs without tiles: the tokens of an image depend on them; pass what preprocess "
                "returned"
            )
        items: list[Crops | Frames] = []
        for (views, h, w), (columns, rows, tiled) in zip(grids, inputs.tiles, strict=True):
            if not tiled:
                items.append(Frames(views, h, w))
                continue
            if views != 1 + columns * rows or min(h, w) <= sum(MARGINS):
                raise ValueError(
                    f"an item has {views} views of {h}x{w} patches, and its tiles make "
                    f"{1 + columns * rows}: pass what preprocess returned"
                )
            items.append(Crops(columns, rows, h, w))
        return items

    def _check_inputs(self, inputs: VisionInputs) -> None:
        super()._check_inputs(inputs)
        self._crops_of(inputs)

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return per item the maps "image" and "tiles", [1, rows, columns, D].

        The map of the crops has each patch once. A clip has only the map "image", of all its
        frames, [t, rows, columns, D].
        """
        items = self._crops_of(inputs)
        if features.ndim == 3:
            maps = self.paths["image"].feature_maps(features, inputs.grid_thw)
            return [crops.maps_of_views(views) for views, crops in zip(maps, items, strict=True)]
        counts = [crops.tokens for crops in items]
        if len(features) != sum(counts):
            raise ValueError(
                f"features have {len(features)} rows: these inputs make {sum(counts)} tokens of "
                "pooler_output"
            )
        parts = zip(features.split(counts), items, strict=True)
        return [crops.maps_of_tokens(rows) for rows, crops in parts]


@dataclass(frozen=True)
class Crops:
    """How the crops of an image lie, and which of its patches make which token."""

    columns: int
    """The number of crops side by side."""
    rows: int
    """The number of crops one above another."""
    h: int
    """The height of a crop, and of the view of the whole image, in patches."""
    w: int

    @property
    def patches(self) -> int:
        """The number of patches of all views."""
        return (1 + self.columns * self.rows) * self.h * self.w

    @property
    def whole(self) -> tuple[int, int]:
        """The rows and columns of tokens of the whole image."""
        return -(-self.h // WINDOW), -(-self.w // WINDOW)

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of tokens of the crops."""
        margin = sum(MARGINS)
        height = self.rows * (self.h - margin) + margin
        width = self.columns * (self.w - margin) + margin
        return -(-height // WINDOW), -(-width // WINDOW)

    @property
    def tokens(self) -> int:
        """The number of tokens of all views."""
        return prod(self.whole) + prod(self.grid)

    def kept(self) -> Tensor:
        """Return the patch that each place of the map of crops has, [rows, columns] on the CPU."""
        return _kept(self)

    def windows(self) -> Tensor:
        """Return the patches of each token, [N, window] on the CPU; -1 stands for none.

        Patches are numbered view by view, the whole image first.
        """
        return _windows(self)

    def maps_of_views(self, views: Tensor) -> dict[str, Tensor]:
        """Return the maps of views [views, h, w, D] by name."""
        return {"image": views[:1], "tiles": views.flatten(0, 2)[self.kept()][None]}

    def maps_of_tokens(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the maps of tokens [N, D] by name."""
        whole = prod(self.whole)
        return {
            "image": rows[None, :whole].unflatten(1, self.whole),
            "tiles": rows[None, whole:].unflatten(1, self.grid),
        }


@dataclass(frozen=True)
class Frames:
    """The frames of a clip, and which of their patches make which token."""

    frames: int
    h: int
    """The height of a frame in patches."""
    w: int

    @property
    def patches(self) -> int:
        """The number of patches of all frames."""
        return self.frames * self.h * self.w

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of tokens of a frame."""
        return -(-self.h // FRAME_WINDOW), -(-self.w // FRAME_WINDOW)

    @property
    def tokens(self) -> int:
        """The number of tokens of all frames."""
        return self.frames * prod(self.grid)

    def windows(self) -> Tensor:
        """Return the patches of each token, [N, window] on the CPU; -1 stands for none."""
        return _windows_of_frames(self)

    def maps_of_views(self, views: Tensor) -> dict[str, Tensor]:
        """Return the map of views [views, h, w, D] by name."""
        return {"image": views}

    def maps_of_tokens(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the map of tokens [N, D] by name."""
        return {"image": rows.unflatten(0, (self.frames, *self.grid))}


@lru_cache(maxsize=256)
def _kept(crops: Crops) -> Tensor:
    downs, acrosses = _owners(crops.h, crops.rows), _owners(crops.w, crops.columns)
    places = [
        [
            ((1 + down * crops.columns + across) * crops.h + row) * crops.w + column
            for across, column in acrosses
        ]
        for down, row in downs
    ]
    return torch.tensor(places, device="cpu")


def _owners(length: int, count: int) -> list[tuple[int, int]]:
    """Return along one axis the crop, and the place in it, of each patch of the map of crops."""
    before, after = MARGINS
    return [
        (crop, place)
        for crop in range(count)
        for place in range(before * (crop > 0), length - after * (crop < count - 1))
    ]


@lru_cache(maxsize=256)
def _windows(crops: Crops) -> Tensor:
    whole = torch.arange(crops.h * crops.w, device="cpu").view(crops.h, crops.w)
    return torch.cat([_in_windows(grid, WINDOW) for grid in (whole, _kept(crops))])


@lru_cache(maxsize=256)
def _windows_of_frames(clip: Frames) -> Tensor:
    patches = torch.arange(clip.patches, device="cpu").view(-1, clip.h, clip.w)
    return torch.cat([_in_windows(frame, FRAME_WINDOW) for frame in patches])


def _in_windows(grid: Tensor, side: int) -> Tensor:
    """Return the entries of a grid by window, [windows, window]; -1 fills windows at the edges.

    If one row or column is missing, it is the last one; of two, the first and the last one.
    """
    down, across = (-size % side for size in grid.shape)
    padding = (across // 2, across - across // 2, down // 2, down - down // 2)
    filled = F.pad(grid, padding, value=-1)
    return rearrange(filled, "(r a) (c b) -> (r c) (a b)", a=side, b=side)


class WindowPool(nn.Module):
    """Attention of the mean of a window of patches to its patches."""

    def __init__(self, width: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(width, out), nn.Linear(width, 2 * out)
        self.proj = nn.Linear(out, out)

    def forward(self, patches: Tensor, valid: Tensor) -> Tensor:
        """Return tokens [N, D] of patches [N, window, L*D] that are ``valid`` [N, window]."""
        patches = patches * valid[..., None]
        mean = patches.sum(1) / valid.sum(1, keepdim=True).to(patches.dtype)
        q_NHK = self.q(mean).unflatten(-1, (self.heads, -1))
        k_NWHK, v_NWHK = self.kv(patches).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = torch.einsum("nhk,nwhk->nhw", q_NHK, k_NWHK) * q_NHK.shape[-1] ** -0.5
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=dtype).to(v_NWHK.dtype)
        out: Tensor = self.proj(torch.einsum("nhw,nwhk->nhk", weights, v_NWHK).flatten(1))
        return out


class Projector(nn.Module):
    """A gated MLP without biases, ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
