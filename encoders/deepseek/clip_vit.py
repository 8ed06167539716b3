"""CLIP's vision tower over the features of another tower, as DeepSeek-OCR uses it.

A feature map takes the place of the patch embeddings; a class token is prepended, positions are
added, and there is a norm before the blocks and none after them.

Source: ``VitModel`` in ``deepencoder/clip_sdpa.py`` of deepseek-ai/DeepSeek-OCR at commit e4ac34e
and ``UnlimitedOcrVisionEncoder`` of transformers 5.23.0.
``embeddings.patch_embedding.weight`` of the checkpoints is never used.

Shapes: B views of h*w features, D width.

Deliberate differences:

- The norm before the blocks runs in the dtype of the tower, as in transformers; the first source
  runs it in float32. PyTorch's norm sums in float32 in either case.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layers.blocks import Block, BlockSizes, resize_table


class ClipVit(nn.Module):
    """The layers of a CLIP tower; the encoder that contains it runs its ``blocks``."""

    def __init__(self, sizes: BlockSizes, positions: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes.hidden_size, positions)
        self.pre_layrnorm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))

    def embed_patches(self, features: Tensor) -> Tensor:
        """Put the class token before the features [B, h, w, D] and add positions: [B, 1+h*w, D]."""
        return self.pre_layrnorm(self.embeddings(features))


class Embeddings(nn.Module):
    """Prepends a class token to a feature map and adds learned positions."""

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.position_embedding = nn.Parameter(torch.randn(positions, width))

    def forward(self, features: Tensor) -> Tensor:
        h, w = features.shape[1:3]
        cls = self.class_embedding.expand(features.shape[0], 1, -1)
        first, patches = self.position_embedding[:1], self.position_embedding[1:]
        positions = torch.cat((first, resize_table(patches, h, w, antialias=True)))
        return torch.cat((cls, features.flatten(1, 2)), dim=1) + positions
