"""The reference of DeepSeek-VL2, an implementation of our own.

Nothing that can be installed runs DeepSeek-VL2's projector and assembly. It is written from
the description of its forward, with plain loops and sums in float64 in place of the layers and
kernels that the encoder uses, so that one mistake is unlikely to stand in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders.contract import EncoderOutput
from encoders.deepseek.deepseek_vl2 import DeepseekVL2Tower

from ..configs import Config
from ..family import make_row
from ..keys import State, same_keys


class VL2Reference(nn.Module):
    """DeepSeek-VL2's tower, projector and sequence of tokens, slowly and in float64."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vision = config["vision_config"]
        self.heads, self.patch = vision.get("heads", 16), vision["patch_size"]
        self.tensors: State = {}

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Keep the encoder's tensors, widened."""
        self.tensors = {key: value.double() for key, value in state_dict.items()}

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def view(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [h, w, D] and tokens [rows, columns, out] of one view [3, H, W]."""
        h, w = (size // self.patch for size in pixels.shape[1:])
        kernel, side = self.tensors["vision.patch_embed.proj.weight"], self.patch
        patches = [
            pixels[:, top : top + side, left : left + side].double()
            for top in range(0, h * side, side)
            for left in range(0, w * side, side)
        ]
        rows = torch.stack([(kernel * patch).sum((1, 2, 3)) for patch in patches])
        positions = self.tensors["vision.pos_embed"][0]
        if len(positions) != h * w:  # no published view has another size
            side = math.isqrt(len(positions))
            square = positions.T.view(1, -1, side, side)
            positions = F.interpolate(square, (h, w), mode="bicubic").flatten(2)[0].T
        x = rows + self.tensors["vision.patch_embed.proj.bias"] + positions
        for block in range(sum(key.endswith("attn.qkv.weight") for key in self.tensors)):
            name = f"vision.blocks.{block}"
            x = x + self._linear(
                f"{name}.attn.proj", self._attend(name, self._norm(f"{name}.norm1", x))
            )
            inner = self._linear(f"{name}.mlp.fc1", self._norm(f"{name}.norm2", x))
            bend = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)
            x = x + self._linear(f"{name}.mlp.fc2", 0.5 * inner * (1 + bend.tanh()))
        grid = self._norm("vision.norm", x).view(h, w, -1)
        return grid, self._project(grid)

    def _attend(self, name: str, x: Tensor) -> Tensor:
        q, k, v = self._linear(f"{name}.attn.qkv", x).chunk(3, -1)
        size, out = q.shape[1] // self.heads, []
        for head in range(self.heads):
            cut = slice(head * size, (head + 1) * size)
            scores = q[:, cut] @ k[:, cut].T / math.sqrt(size)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            out.append(weights / weights.sum(-1, keepdim=True) @ v[:, cut])
        return torch.cat(out, -1)

    def _project(self, grid: Tensor) -> Tensor:
        h, w, width = grid.shape
        lines = []
        for top in range(0, h, 2):
            line = []
            for left in range(0, w, 2):
                four = grid.new_zeros(width, 2, 2)  # each channel's four values stand together
                for r in range(top, min(top + 2, h)):
                    for c in range(left, min(left + 2, w)):
                        four[:, r - top, c - left] = grid[r, c]
                inner = self._linear("projector.layers.0", four.flatten())
                inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
                line.append(self._linear("projector.layers.2", inner))
            lines.append(torch.stack(line))
        return torch.stack(lines)

    def sequence(self, views: Tensor, columns: int, rows: int) -> Tensor:
        """The tokens of an image, whose ``views`` are the whole of it, then its tiles."""
        tokens = [self.view(pixels)[1] for pixels in views]
        newline, out = self.tensors["image_newline"], []
        for line in tokens[0]:
            out += [*line, newline]
        out.append(self.tensors["view_seperator"])
        for row in range(rows):
            tiles = tokens[1 + row * columns : 1 + (row + 1) * columns]
            for number in range(len(tokens[0])):
                for tile in tiles:
                    out += list(tile[number])
                out.append(newline)
        return torch.stack(out)


def vl2_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run this reference, which stays on the CPU, on every view, without newlines."""
    views = [reference.view(view) for view in pixels.double().cpu()]
    hidden = torch.stack([grid.flatten(0, 1) for grid, _ in views])
    tokens = torch.cat([rows.flatten(0, 1) for _, rows in views])
    return EncoderOutput(hidden, tokens, ()).to(pixels.device)


ROWS = [
    make_row(
        "deepseek_vl2", "deepseek-ai/deepseek-vl2-tiny", VL2Reference, same_keys, vl2_output,
        shallow={"layers": 1},
        narrow={"width": 64, "heads": 4, "mlp_ratio": 1.75, "llm_width": 48},
        tiny={
            "width": 64, "heads": 4, "mlp_ratio": 1.75, "layers": 3, "llm_width": 48,
        },
        variant=True,
        tower=DeepseekVL2Tower,
    ),
]  # fmt: skip
