"""The encoder of Granite for Docling: SigLIP over tiles of a page, a connector of two routes.

A pre-norm ViT without a class token: learned positions, layer norms, a final norm. The connector
puts squares of patches side by side and projects them to one token: 4x4 patches on the coarse
route, 2x2 on the fine one, which makes four times the tokens. Fixed sinusoids, layer norms and a
second linear layer follow. DeepStack mergers of the route read the hidden state after a few blocks.
A page is cut into tiles of one size; the whole page, resized to such a tile, comes last.

Source: ``GraniteDoclingVisionModel`` and ``GraniteDoclingModel`` of transformers 5.23.0.
Repo ids: ibm-granite/granite-for-docling-500m. granite-docling-258M has the tower of Idefics3.

Shapes: B tiles, n patches of a tile, D width, N tokens.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
- The route is chosen with ``at_route``, coarse by default. In the source the user chooses it, too,
  or asks the density router, which is no part of the tower and is not loaded.
- Tiles of another size than in the config are accepted: their positions are interpolated
  bicubically, and sinusoids go on with their rows and columns.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.checks import require_metadata
from ..base.tile_encoder import TileEncoder
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_flag,
    read_indices,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes, resize_table
from ..layers.products import PatchEmbed

if TYPE_CHECKING:
    from ..contract import Preprocessor

RouteName: TypeAlias = Literal["coarse", "fine"]
"""The route of the connector: tokens of 4x4 patches, or of 2x2."""


@dataclass(frozen=True)
class GraniteDoclingConfig:
    """Sizes of tower and connector; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int
    patch_size: int
    scale_factor: int
    """The side in patches of a token of the coarse route; of the fine route it is half of it."""
    out_hidden_size: int
    deepstack_visual_indexes: tuple[int, ...] = (3, 7, 10)
    use_fine_route: bool = True
    """Whether the connector has the fine route beside the coarse one."""
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_sizes({"patches per side": self.side})
        require_divisible("patches per side", self.side, "scale_factor", self.scale_factor)
        require_divisible("out_hidden_size", self.out_hidden_size, "sines and cosines", 4)
        if self.use_fine_route:
            require_divisible("scale_factor", self.scale_factor, "fine route", 2)
        if any(not 0 <= index < self.depth for index in self.deepstack_visual_indexes):
            raise ValueError(
                f"config: deepstack_visual_indexes={list(self.deepstack_visual_indexes)}: "
                f"must be among blocks 0 to {self.depth - 1} of the tower"
            )

    @property
    def tile_size(self) -> int:
        """Side of a tile in pixels, rounded down to whole patches."""
        return self.side * self.patch_size

    @property
    def side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def factors(self) -> dict[RouteName, int]:
        """The side of a token in patches, by the name of each route of this checkpoint."""
        fine: dict[RouteName, int] = {"fine": self.scale_factor // 2} if self.use_fine_route else {}
        return {"coarse": self.scale_factor, **fine}

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> GraniteDoclingConfig:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=12, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=768),
            intermediate_size=read_size(vision, "intermediate_size", default=3072),
            num_heads=read_size(vision, "num_attention_heads", default=12),
            image_size=read_size(vision, "image_size", default=512),
            patch_size=read_size(vision, "patch_size", default=16),
            scale_factor=read_size(vision, "scale_factor", default=4, limit=64),
            out_hidden_size=read_size(vision, "out_hidden_size", default=1024),
            deepstack_visual_indexes=read_indices(vision, "deepstack_visual_indexes", (3, 7, 10)),
            use_fine_route=read_flag(vision, "use_fine_route", default=True),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


class GraniteDoclingEncoder(TileEncoder):
    """Encodes tiles to hidden states, tokens and DeepStack features."""

    _grid_multiple_name = "the connector"
    _route: RouteName = "coarse"

    def __init__(
        self, config: GraniteDoclingConfig, preprocessor: Preprocessor | None = None
    ) -> None:
        super().__init__()
        self.config: GraniteDoclingConfig = config
        self._preprocessor = preprocessor
        self._grid_multiple = config.scale_factor
        sizes, width = config.block_sizes, config.hidden_size
        self.patch_embed = PatchEmbed(width, config.patch_size, config.in_channels)
        self.pos_embed = nn.Parameter(torch.randn(config.side**2, width))
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.connector = Connector(config)

    def at_route(self, route: RouteName) -> GraniteDoclingEncoder:
        """Return a copy of this encoder for a route, which shares its parameters.

        Args:
            route: "coarse", or "fine" for four times as many tokens of a dense page.

        Raises:
            ValueError: a route that the checkpoint does not have.
        """
        if route not in self.config.factors:
            routes = " or ".join(map(repr, self.config.factors))
            raise ValueError(f"route={route!r}: the connector of this checkpoint has {routes}")
        routed = copy.copy(self)  # the copy shares the modules, parameters and hooks
        routed._route = route
        return routed

    @property
    def _factor(self) -> int:
        """The side of a token in patches."""
        return self.config.factors[self._route]

    def _default_preprocessor(self) -> Preprocessor:
        from .granite_docling_pixels import PagePreprocessor

        return PagePreprocessor(self.config.patch_size, image_size=self.config.image_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B tiles of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] before the last norm, ``pooler_output`` [N, out], and
            ``deepstack_features``, a tuple of [N, out] with one entry per DeepStack block.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        h = pixel_values.shape[2] // self.config.patch_size
        stacked, deepstack = self.config.deepstack_visual_indexes, list[Tensor]()
        path = self.connector.path(self._route)
        steps = self.steps(self.blocks, hidden, metadata, read_after=stacked)
        for number, block in enumerate(steps):
            hidden = block(hidden)
            if number in stacked:
                merger = path.deepstack_mergers[len(deepstack)]
                deepstack.append(merger(self._squares(hidden, h)).flatten(0, 1))
        normed = self._squares(self.connector.ln_in(self.norm(hidden)), h)
        tokens = self.connector(normed, metadata["token_positions"], path)
        return EncoderOutput(hidden, tokens.flatten(0, 1), tuple(deepstack))

    def _squares(self, rows: Tensor, h: int) -> Tensor:
        """Put the patches of each token side by side: [B, h*w, D] to [B, tokens, x*x*D]."""
        side = self._factor
        return rearrange(rows, "b (r x c y) d -> b (r c) (x y d)", r=h // side, x=side, y=side)

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed tiles [B, C, H, W] as patches with positions, [B, n, D]."""
        pixels = self._admit_tiles(pixel_values, self.pos_embed)
        require_metadata(metadata, "token_positions")
        patches: Tensor = self.patch_embed(pixels)
        h, w = patches.shape[1:3]
        return patches.flatten(1, 2) + resize_table(self.pos_embed, h, w, antialias=False)

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of ``h`` x ``w`` patches: one per square of patches."""
        return h // self._factor, w // self._factor

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return ``token_positions`` [tokens of a tile, out], the sinusoids, which tiles share."""
        rows, columns = self._token_grid(*self._shared_grid(grids, max_input_size))
        dtype = torch.promote_types(self.pos_embed.dtype, torch.float32)
        table = sinusoids(rows, columns, self.config.out_hidden_size)
        return {"token_positions": table.to(dtype)}


class Connector(nn.Module):
    """Makes tokens of normed patches; norms and the last linear layer are those of both routes."""

    def __init__(self, config: GraniteDoclingConfig) -> None:
        super().__init__()
        out = config.out_hidden_size
        self.ln_in = nn.LayerNorm(config.hidden_size)
        for route, factor in config.factors.items():
            self.add_module(route, RouteLayers(config, factor))
        self.ln_mid = nn.LayerNorm(out)
        self.mlp_fc2 = nn.Linear(out, out, bias=False)
        self.ln_out = nn.LayerNorm(out)

    def path(self, route: RouteName) -> RouteLayers:
        """Return the layers of one route."""
        path = self.get_submodule(route)
        assert isinstance(path, RouteLayers)
        return path

    def forward(self, squares: Tensor, positions: Tensor, path: RouteLayers) -> Tensor:
        tokens = path.projection(squares)
        tokens = self.ln_mid(tokens + positions.to(tokens.dtype))
        out: Tensor = self.ln_out(self.mlp_fc2(F.gelu(tokens)))
        return out


class RouteLayers(nn.Module):
    """The layers of one route: a projection, and a DeepStack merger per block that is read."""

    def __init__(self, config: GraniteDoclingConfig, factor: int) -> None:
        super().__init__()
        width, out = config.hidden_size * factor**2, config.out_hidden_size
        self.projection = nn.Linear(width, out, bias=False)
        mergers = (Merger(width, out) for _ in config.deepstack_visual_indexes)
        self.deepstack_mergers = nn.ModuleList(mergers)


class Merger(nn.Module):
    """Normalises the patches of a token together, and projects them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.linear_1 = nn.Linear(width, out)
        self.linear_2 = nn.Linear(out, out)

    def forward(self, squares: Tensor) -> Tensor:
        out: Tensor = self.linear_2(F.gelu(self.linear_1(self.layer_norm(squares))))
        return out


def sinusoids(rows: int, columns: int, width: int) -> Tensor:
    """Return the fixed positions of tokens row by row, float64 [rows*columns, width] on the CPU.

    A quarter of the columns each has the sines of a token's column, its cosines, and the sines and
    the cosines of its row.
    """
    quarter = width // 4
    steps = torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter
    axes = torch.meshgrid(
        *(torch.arange(count, dtype=torch.float64, device="cpu") for count in (rows, columns)),
        indexing="ij",
    )
    angles = [axis.flatten()[:, None] / 10000.0**steps for axis in reversed(axes)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
