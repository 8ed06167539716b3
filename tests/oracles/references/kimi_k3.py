"""The reference of Kimi-K3, written from its description.

transformers has no such tower, and vLLM's classes need vLLM's process groups. This one takes a clip
at a time, with torch's interpolation of the table, complex numbers for the rotation, and sums in
place of the layers that the encoder uses, so that one mistake is unlikely to stand in both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed
from .moonvit import KIMI_K25, cut

KIMI_K3 = {**KIMI_K25, "qkv_hidden_size": 96}
"""Widths of small towers, by the names of the published config: four heads of 24."""
_EPSILON = 2.0**-23
"""What ``torch.nn.RMSNorm`` without an epsilon takes for every dtype but float64."""


class KimiK3Reference(nn.Module):
    """The tower and the projector, with the names of the checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = vision_of(config)
        self.frames = self.sizes["init_pos_emb_time"]
        width, inner = self.sizes["vt_hidden_size"], self.sizes["vt_intermediate_size"]
        heads, side = self.sizes["qkv_hidden_size"], self.sizes["patch_size"]
        table = self.sizes["init_pos_emb_height"], self.sizes["init_pos_emb_width"]
        self.patch = _weight(width, 3 * side**2)
        self.pos_emb = _weight(*table, width)
        self.blocks = nn.ModuleList(
            nn.ParameterDict(
                {
                    "norm0": _weight(width),
                    "wqkv": _weight(3 * heads, width),
                    "wo": _weight(width, heads),
                    "norm1": _weight(width),
                    "fc0": _weight(inner, width),
                    "fc1": _weight(width, inner),
                }
            )
            for _ in range(self.sizes["vt_num_hidden_layers"])
        )
        self.final_layernorm = _weight(width)
        out = config["text_config"]["hidden_size"]
        self.proj_0, self.proj_2 = _weight(4 * width, 4 * width), _weight(out, 4 * width)
        self.post_norm = _weight(out)

    def forward(self, patches: Tensor, t: int, h: int, w: int) -> tuple[Tensor, Tensor]:
        """From one clip [t*h*w, 588] to rows of the last block and tokens [h*w/4, out]."""
        hidden = patches @ self.patch.T + self._positions(t, h, w).to(patches.dtype)
        blocks: Any = self.blocks
        for block in blocks:
            hidden = hidden + self._attention(block, _rms(hidden, block["norm0"]), t, h, w)
            inner = F.gelu(_rms(hidden, block["norm1"]) @ block["fc0"].T, approximate="tanh")
            hidden = hidden + inner @ block["fc1"].T
        mean = _rms(hidden, self.final_layernorm).unflatten(0, (t, h, w)).mean(0)
        cells = [
            mean[row : row + 2, column : column + 2].flatten()
            for row in range(0, h, 2)
            for column in range(0, w, 2)
        ]
        tokens = F.gelu(torch.stack(cells) @ self.proj_0.T) @ self.proj_2.T
        return hidden, _rms(tokens, self.post_norm, self.sizes["projector_ln_eps"])

    def _positions(self, t: int, h: int, w: int) -> Tensor:
        wide = torch.promote_types(self.pos_emb.dtype, torch.float32)
        table = self.pos_emb.to(wide).permute(2, 0, 1)[None]
        places = F.interpolate(table, (h, w), mode="bilinear")[0].flatten(1).T
        if t == 1:
            return places
        steps = torch.arange(places.shape[1] // 2, dtype=wide, device=places.device)
        turns = 10000 ** (-2 * steps / places.shape[1])
        times = [torch.cat([(n * turns).sin(), (n * turns).cos()]) for n in range(t)]
        return torch.cat([places + time for time in times])

    def _attention(self, block: Any, x: Tensor, t: int, h: int, w: int) -> Tensor:
        heads = self.sizes["vt_num_attention_heads"]
        q, k, v = (x @ block["wqkv"].T).unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)
        size = q.shape[-1]
        speed = 10000 ** (-4 * torch.arange(size // 4, dtype=torch.float32, device=x.device) / size)
        axes = (torch.arange(n, device=x.device).float() for n in (h, w))
        rows, columns = torch.meshgrid(*axes, indexing="ij")
        angles = torch.stack([columns[..., None] * speed, rows[..., None] * speed], -1)
        turn = torch.polar(torch.ones_like(angles), angles).flatten(2).flatten(0, 1).repeat(t, 1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.float().unflatten(-1, (-1, 2))) * turn)
            .flatten(-2)
            .to(x.dtype)
            for part in (q, k)
        )
        weights = (q @ k.mT * size**-0.5).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1) @ block["wo"].T


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def _rms(x: Tensor, weight: Tensor, eps: float = _EPSILON) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def kimi_k3_keys(state: State) -> State:
    """Map to the reference's names, the table as a square, patches flat."""
    table = state["pos_embed.weight"]
    side = round(len(table) ** 0.5)
    changed = {"pos_embed.weight": table.unflatten(0, (side, side))}
    changed["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    return renamed(
        {**state, **changed},
        [
            (r"^(blocks\..*|norm|projector\..*|pos_embed|patch_embed\..*)\.weight$", r"\1"),
            (r"^pos_embed$", "pos_emb"),
            (r"^patch_embed\.proj$", "patch"),
            (r"^norm$", "final_layernorm"),
            (r"^projector\.post_norm$", "post_norm"),
            (r"^projector\.linear_1$", "proj_0"),
            (r"^projector\.linear_2$", "proj_2"),
            (r"\.norm1$", ".norm0"),
            (r"\.norm2$", ".norm1"),
            (r"\.attn\.qkv$", ".wqkv"),
            (r"\.attn\.proj$", ".wo"),
            (r"\.mlp\.fc1$", ".fc0"),
            (r"\.mlp\.fc2$", ".fc1"),
        ],
    )


def kimi_k3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run the reference on one segment after the other."""
    segments = cut(grid_thw.tolist(), reference.frames)
    parts = pixels.split([t * h * w for t, h, w in segments])
    runs = [reference(part, *segment) for part, segment in zip(parts, segments, strict=True)]
    hidden, tokens = zip(*runs, strict=True)
    return EncoderOutput(torch.cat(hidden), torch.cat(tokens), ())


ROWS = [
    make_row(
        "kimi_k3", "moonshotai/Kimi-K3", KimiK3Reference, kimi_k3_keys, kimi_k3_output,
        shallow={"vt_num_hidden_layers": 2},
        narrow=KIMI_K3, tiny={**KIMI_K3, "vt_num_hidden_layers": 3}, variant=True,
        joins=True,
        segment_rows=4,
    ),
]  # fmt: skip
