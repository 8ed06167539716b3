"""The tower of Nemotron Omni and Nemotron Nano VL V2: C-RADIO, and a projector of 2x2 patches.

The tower is that of ``c_radio.py``. After the last block, the 2x2 patches of a token are put side
by side, normalised, and projected by two layers with a squared ReLU between them. Omni takes images
of any size; Nano VL V2 cuts them into tiles of 512x512, of which each is a segment of its own.

Omni embeds pairs of frames of a video by a weight of their own (``video_embed``). Images and videos
are packed in one batch by rows that have columns for both, of which those of the other are zero::

    image:          p p p | 0 0 0  0 0 0    the patch, of 3*16*16 values
    pair of frames: 0 0 0 | p p p  p p p    the patch of the first frame, then of the second

The sum of both products is exactly that of the columns in use. Nothing but the pixels says which
these are: the grid (1, h, w) is that of an image and of a clip of one pair. Nano VL V2 embeds each
frame of a video, at 512x512, as an image.

Source: ``RadioModel`` and ``NemotronH_Omni_Reasoning_V3`` of transformers 5.23.0, ``RadioModel``
and ``NemotronH_Nano_VL_V2`` of vLLM 0.32.0.
Repo ids: nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16,
nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16.

Shapes: P patches row by row, S segments (images, tiles, frames or pairs of frames), r rows before
the patches of a segment, D width, N = P/4 tokens.

Deliberate differences: those of ``c_radio.py``, and:

- Projected tokens have the dtype of the weights; vLLM projects in bfloat16.
- Tokens of videos are not pruned (``video_pruning_rate`` of 0, the default of the source).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import merge_order
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_count,
    read_flag,
    read_size,
    require_divisible,
    require_value,
)
from .c_radio import CRadioConfig, CRadioEncoder

if TYPE_CHECKING:
    from ..contract import Preprocessor

_TILED = "NemotronH_Nano_VL_V2"
"""The model type whose images are cut into tiles, unless its config bounds the patches of one."""


@dataclass(frozen=True)
class NemotronConfig(CRadioConfig):
    """The sizes of a C-RADIO tower and its projector, and how images are cut."""

    projector_hidden_size: int = 20480
    out_hidden_size: int = 2688
    """The width of the language model."""
    final_norm: bool = False
    """Whether patches are normalised before they are put side by side, as they are if the language
    model predicts several tokens."""
    final_norm_weights: bool = False
    """Whether that norm has weights, which most checkpoints leave out."""
    tile_size: int | None = None
    """The side of a tile in pixels; None: images keep about their shape."""
    use_thumbnail: bool = True
    """Whether the whole image follows its tiles."""
    min_patches: int = 1024
    """The fewest patches of an image that keeps its shape."""
    max_patches: int = 13312
    video_frames: int = 2
    """The number of frames that are embedded together; 1: each frame is embedded as an image."""
    video_patches: int = 1024
    """About the number of patches of a frame of a video."""
    video_keeps_shape: bool = True
    """Whether frames of videos keep about their shape; otherwise they become squares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_size is not None:
            token = self.patch_size * self.spatial_merge_size
            require_divisible("force_image_size", self.tile_size, "the side of a token", token)
            if self.video_frames > 1 or self.video_keeps_shape:
                raise ValueError(
                    f"config: video_temporal_patch_size={self.video_frames} and "
                    f"video_maintain_aspect_ratio={self.video_keeps_shape} are not implemented for "
                    "a tower of tiles, of which a frame of a video is one: must be 1 and false"
                )

    @property
    def spatial_merge_size(self) -> int:
        """The side in patches of the square that becomes one token."""
        return 2

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: a patch of an image and, if frames are embedded
        together, a patch of each of them."""
        return self.image_dim * (1 + self.video_frames * (self.video_frames > 1))

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> NemotronConfig:
        """Read the ``config.json`` of a checkpoint, in the form of NVIDIA or of transformers.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        text = find_section(config, "llm_config", "text_config")
        require_value(config, "downsample_ratio", 0.5)
        require_value(config, "ps_version", "v2")
        args = find_section({"args": {}, **vision}, "args")
        bounds = {**args, **vision}  # both forms are published
        # A config that lost its model type still names the class.
        is_nano = config.get("model_type") == _TILED or config.get("architectures") == [_TILED]
        tiled = is_nano and bounds.get("min_num_patches") is None
        # All of them have the positions of v4, whatever version their tower is.
        colours = {name: config.get(name) for name in ("norm_mean", "norm_std") if name in config}
        tower = CRadioConfig.from_hf({**vision, **colours, "version": "c-radio_v4-h"})
        frames = read_size(
            vision, "video_temporal_patch_size", default=1 if is_nano else 2, limit=8
        )
        side = read_size(config, "force_image_size", default=512)
        square = 1024 if frames > 1 else (side // tower.patch_size) ** 2
        require_value(vision, "video_target_img_size", None)
        if tiled:
            require_value(vision, "video_target_num_patches", None)
        return cls(
            **vars(tower),
            projector_hidden_size=read_size(config, "projector_hidden_size", default=4096),
            out_hidden_size=read_size(text, "hidden_size"),
            final_norm=read_count(text, "num_nextn_predict_layers", default=0) > 0,
            final_norm_weights=read_flag(config, "final_norm_weights", default=False),
            tile_size=side if tiled else None,
            use_thumbnail=read_flag(config, "use_thumbnail", default=True),
            min_patches=read_size(bounds, "min_num_patches", default=1024),
            max_patches=read_size(bounds, "max_num_patches", default=13312),
            video_frames=frames,
            video_patches=read_size(vision, "video_target_num_patches", default=square),
            video_keeps_shape=read_flag(vision, "video_maintain_aspect_ratio", default=frames > 1),
        )


class NemotronEncoder(CRadioEncoder):
    """Encodes packed patches to hidden states and projected tokens of 2x2 patches."""

    def __init__(self, config: NemotronConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__(config, preprocessor)
        self.config: NemotronConfig = config
        self.video_embed: nn.Linear | None = None
        if config.video_frames > 1:
            columns = config.patch_dim - config.image_dim
            self.video_embed = nn.Linear(columns, config.hidden_size, bias=False)
        self.projector = Projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from .nemotron_pixels import NemotronPreprocessor, NemotronTilesPreprocessor

        config = self.config
        if config.tile_size is None:
            return NemotronPreprocessor.nemotron(
                config.patch_size,
                config.min_patches,
                config.max_patches,
                video_frames=config.video_frames,
                video_patches=config.video_patches,
                video_keeps_shape=config.video_keeps_shape,
            )
        return NemotronTilesPreprocessor(
            config.patch_size, image_size=config.tile_size, use_thumbnail=config.use_thumbnail
        )

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out], no DeepStack features,
            ``"prefix"`` [S, r, D], the class tokens and registers.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        output = self.prefixed_output(hidden, hidden, metadata)
        squares = output.pooler_output[metadata["merge_index"]]
        return output._replace(pooler_output=self.projector(squares))

    def _project(self, pixels: Tensor) -> Tensor:
        """Return patches [P, patch_dim], of images and of frames of videos, as rows [P, D]."""
        if self.video_embed is None:
            return super()._project(pixels)
        columns = self.config.image_dim
        frames: Tensor = self.video_embed(pixels[:, columns:])
        return super()._project(pixels[:, :columns]) + frames

    @property
    def pooling_head(self) -> None:
        """None: the language model reads no summary."""
        return None

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the entries of the table of positions per patch, and the patches by token.

        ``pos_embed_index`` and ``pos_embed_weight`` are those of C-RADIO; ``merge_index`` int64 [P]
        has the patches of each token one after another.
        """
        merge = self.config.spatial_merge_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        entries = super()._grid_metadata(grids, max_input_size, max_windows_per_batch)
        return {**entries, "merge_index": merge_order(grids, merge, rows)}


class Projector(nn.Module):
    """Projects the 2x2 patches of a token, which are neighbouring rows, to that token."""

    def __init__(self, config: NemotronConfig) -> None:
        super().__init__()
        self.patch_norm: nn.LayerNorm | nn.Identity = nn.Identity()
        if config.final_norm:
            sizes = config.hidden_size, config.layer_norm_eps
            self.patch_norm = nn.LayerNorm(*sizes, config.final_norm_weights)
        self.width = width = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.linear_1 = nn.Linear(width, config.projector_hidden_size, bias=False)
        self.linear_2 = nn.Linear(config.projector_hidden_size, config.out_hidden_size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        rows = self.norm(self.patch_norm(patches).view(-1, self.width))
        return self.linear_2(F.relu(self.linear_1(rows)).square())
