"""The pooling head of SigLIP and SigLIP2. Shapes: n tokens of an item, D width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..layers.blocks import MLP, BlockSizes


class Head(nn.Module):
    """Pools the normed tokens of an item to one vector: a learned query attends to all of them."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.probe = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, sizes.num_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(width, eps=sizes.layer_norm_eps)
        self.mlp = MLP(width, sizes.intermediate_size, sizes.activation)

    def forward(self, items: Sequence[Tensor]) -> Tensor:
        """Pool the tokens [n, D] of each item to one vector per item, [items, D]."""
        padding_mask = None
        if len({len(item) for item in items}) == 1:  # padding copies item by item
            rows = torch.stack(list(items))
        else:
            rows = pad_sequence(list(items), batch_first=True)
            counts = torch.tensor([len(item) for item in items], device=rows.device)
            padding_mask = torch.arange(rows.shape[1], device=rows.device) >= counts[:, None]
        probe = self.probe.expand(len(rows), -1, -1)
        pooled, _ = self.attention(
            probe, rows, rows, key_padding_mask=padding_mask, need_weights=False
        )
        out: Tensor = pooled + self.mlp(self.layernorm(pooled))
        return out[:, 0]
