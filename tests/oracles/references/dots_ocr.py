"""The reference of dots.ocr, written from the description of vLLM's tower, frame by frame.

vLLM has the only upstream tower, and it is in no environment but that of the engines, where
``tests/engines`` compares the two. Here norms, attention and rotation are sums and complex numbers,
so that one mistake is unlikely to stand in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed

DOTS_NARROW = {
    "embed_dim": 64,
    "intermediate_size": 92,
    "num_attention_heads": 4,
    "hidden_size": 48,
}


class DotsReference(nn.Module):
    """The tower with the published names of its tensors."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = vision_of(config)
        width, eps = sizes["embed_dim"], sizes["rms_norm_eps"]
        self.heads, self.patch = sizes["num_attention_heads"], sizes["patch_size"]
        self.patchifier = nn.ModuleDict(
            {
                "proj": nn.Conv2d(3, width, self.patch, self.patch),
                "norm": RootMeanSquare(width, eps),
            }
        )
        self.blocks = nn.ModuleList(
            DotsBlock(width, sizes["intermediate_size"], self.heads, eps)
            for _ in range(sizes["num_hidden_layers"])
        )
        self.post_trunk_norm = RootMeanSquare(width, eps)
        self.ln_q = nn.LayerNorm(width, eps=1e-6)
        self.first = nn.Linear(4 * width, 4 * width)
        self.second = nn.Linear(4 * width, sizes["hidden_size"])

    def forward(self, pixels: Tensor, grids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the rows [P, D] of the last block, and the tokens."""
        patches = self.patchifier["proj"](pixels.view(-1, 3, self.patch, self.patch))
        hidden = self.patchifier["norm"](patches.flatten(1))
        frames = [(h, w) for t, h, w in grids for _ in range(t)]
        turns = torch.cat([self._turns(h, w, hidden) for h, w in frames])
        for block in self.blocks:
            hidden = block(hidden, turns, [h * w for h, w in frames])
        inner = self.first(
            self.ln_q(self.post_trunk_norm(hidden)).reshape(-1, self.first.in_features)
        )
        gelu = inner * (1 + torch.erf(inner / 2**0.5)) / 2
        return hidden, self.second(gelu)

    def _turns(self, h: int, w: int, like: Tensor) -> Tensor:
        """The rotation of each pair of channels as a complex number [h*w, K/2], token by token."""
        places = [
            (2 * y + dy, 2 * x + dx)
            for y in range(h // 2)
            for x in range(w // 2)
            for dy in (0, 1)
            for dx in (0, 1)
        ]
        head = like.shape[1] // self.heads
        rates = [10000.0 ** (-4 * number / head) for number in range(head // 4)]
        angles = [[row * r for r in rates] + [column * r for r in rates] for row, column in places]
        radians = torch.tensor(angles, dtype=torch.float64, device=like.device).to(wide_of(like))
        return torch.polar(torch.ones_like(radians), radians)


class RootMeanSquare(nn.Module):
    """Divide rows by their root mean square."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(1, keepdim=True) + self.eps).sqrt() * self.weight


class DotsBlock(nn.Module):
    """One block, which attends frame by frame and head by head."""

    def __init__(self, width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RootMeanSquare(width, eps), RootMeanSquare(width, eps)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.fc1, self.fc3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor, turns: Tensor, lengths: list[int]) -> Tensor:
        rows = self.norm1(hidden)
        frames = zip(rows.split(lengths), turns.split(lengths), strict=True)
        hidden = hidden + self.proj(torch.cat([self._attend(*frame) for frame in frames]))
        rows = self.norm2(hidden)
        gate = self.fc1(rows)
        return hidden + self.fc2(gate / (1 + torch.exp(-gate)) * self.fc3(rows))

    def _attend(self, rows: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.qkv(rows).chunk(3, dim=1)
        out = []
        for q1, k1, v1 in zip(*(x.chunk(self.heads, dim=1) for x in (q, k, v)), strict=True):
            scores = _turned(q1, turns) @ _turned(k1, turns).T / q1.shape[1] ** 0.5
            weights = (scores - scores.amax(1, keepdim=True)).exp()
            out.append(weights / weights.sum(1, keepdim=True) @ v1)
        return torch.cat(out, dim=1)


def _turned(rows: Tensor, turns: Tensor) -> Tensor:
    """Turn channels i and i + K/2 of a head as the real and imaginary part of a number."""
    first, second = rows.to(wide_of(rows)).chunk(2, dim=1)
    product = torch.complex(first, second) * turns
    return torch.cat([product.real, product.imag], dim=1).to(rows.dtype)


def wide_of(rows: Tensor) -> torch.dtype:
    """The dtype in which rows are turned: float32 at least, because no half is a complex number."""
    return torch.promote_types(rows.dtype, torch.float32)


def dots_keys(state: State) -> State:
    """Map to the reference's names."""
    return renamed(
        state,
        [
            (r"^patch_embed\.proj\.", "patchifier.proj."),
            (r"^norm_pre\.", "patchifier.norm."),
            (r"^norm\.", "post_trunk_norm."),
            (r"^merger\.ln_q\.", "ln_q."),
            (r"^merger\.mlp\.0\.", "first."),
            (r"^merger\.mlp\.2\.", "second."),
            (r"\.(attn|mlp)\.", "."),
        ],
    )


def dots_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run the reference."""
    hidden, tokens = reference(pixels, grid_thw.tolist())
    return EncoderOutput(hidden, tokens, ())


ROWS = [
    make_row(
        "dots_ocr", "rednote-hilab/dots.ocr", DotsReference, dots_keys, dots_output,
        shallow={"num_hidden_layers": 1},
        narrow=DOTS_NARROW,
        tiny={**DOTS_NARROW, "num_hidden_layers": 3},
        slow=True,
        casts=(),  # the reference has none
    ),
]  # fmt: skip
