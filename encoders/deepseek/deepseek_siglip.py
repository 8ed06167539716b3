"""SigLIP's vision tower, as DeepSeek-VL and DeepSeek-VL2 use it: no class token, a final norm.

Source: ``VisionTransformer`` in ``siglip_vit.py`` of deepseek-ai/DeepSeek-VL at commit 681bffb and
of deepseek-ai/DeepSeek-VL2 at commit ef9f91e; ``SiglipVisionModel`` of transformers 5.23.0. Modules
have the names of the first two, which are timm's. The checkpoints' ``attn_pool.*``, which pools to
one vector, is not used by these models.

Shapes: B views of h*w patches, D width.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
- Views of another size than the config's are accepted; their positions are interpolated as
  ``SiglipVisionModel(interpolate_pos_encoding=True)`` does, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..hf_config import read_size, require_value
from ..layers.blocks import Block, BlockSizes, resize_table
from ..layers.products import PatchEmbed

_TRANSFORMERS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "hidden_act": "gelu_pytorch_tanh",
}
"""Defaults of ``SiglipVisionConfig`` that differ from those of ``siglip_large_patch16_384``."""


def read_siglip(section: Mapping[str, object], *, converted: bool) -> dict[str, int]:
    """Return the sizes of SigLIP in a config of DeepSeek-VL, by the names of this library's fields.

    Args:
        section: the part of the config that describes SigLIP.
        converted: whether transformers wrote the config. A missing size is then the default of
            ``SiglipVisionConfig``, since transformers 4 writes only values that differ from the
            defaults; otherwise it is the size of ``siglip_large_patch16_384``.

    Raises:
        ValueError: a value that is not implemented or is not a size.
    """
    if converted:
        section = {**_TRANSFORMERS, **section}
    require_value(section, "model_name", "siglip_large_patch16_384")
    require_value(section, "select_layer", -1)
    require_value(section, "hidden_act", "gelu")
    require_value(section, "layer_norm_eps", 1e-6)
    width = read_size(section, "width", "hidden_size", default=1024)
    return {
        "depth": read_size(section, "layers", "num_hidden_layers", default=24, limit=1024),
        "hidden_size": width,
        "intermediate_size": read_size(section, "intermediate_size", default=4 * width),
        "num_heads": read_size(section, "heads", "num_attention_heads", default=16),
        "image_size": read_size(section, "image_size", default=384),
        "patch_size": read_size(section, "patch_size", default=16),
        "in_channels": read_size(section, "num_channels", default=3),
    }


class Siglip(nn.Module):
    """The layers of a SigLIP tower; the encoder that contains it runs its ``blocks``."""

    def __init__(self, sizes: BlockSizes, positions: int, patch_size: int, channels: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(sizes.hidden_size, patch_size, channels)
        self.pos_embed = nn.Parameter(torch.randn(1, positions, sizes.hidden_size))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """Return patches with their positions, [B, h*w, D], of views [B, C, H, W]."""
        rows: Tensor = self.patch_embed(pixels)
        h, w = rows.shape[1:3]
        return rows.flatten(1, 2) + resize_table(self.pos_embed[0], h, w, antialias=False)
