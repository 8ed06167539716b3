"""The references of the Step towers: transformers' for Step3-VL, our own for Step3.

Nothing that can be installed runs Step3's tower. It is written from the description of its
forward, in float64 throughout and with sums in place of the layers and kernels that the encoder
uses, so that one mistake is unlikely to stand in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from encoders.contract import EncoderOutput
from encoders.step.step3 import Step3Tower
from encoders.step.step3_vl import Step3VLTower

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, same_keys, split_qkv
from ..sizes import STEP3_NARROW, STEP3_VL_NARROW
from ..versions import STEP_ROTATION, skip_without


class HeadsInHalves(nn.Module):
    """A reference whose heads turn halves, where ours turn pairs of neighbouring channels."""

    heads: int

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load tensors whose rows of queries and keys are in our order."""
        return super().load_state_dict(self.permuted(state_dict), strict, assign)

    def permuted(self, state: Mapping[str, Tensor]) -> State:
        """Put our rows of queries and keys in the order that turns halves of a head."""
        return {
            key: halves(value, self.heads) if ".q_proj." in key or ".k_proj." in key else value
            for key, value in state.items()
        }


class Step3VLReference(HeadsInHalves):
    """transformers' tower and its projector."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        skip_without(*STEP_ROTATION)
        fields = {k: v for k, v in vision_of(config).items() if k != "model_type"}
        vision = Step3p7VisionConfig(**fields)
        self.heads = vision.num_attention_heads
        self.vision_model = Step3p7VisionModel._from_config(vision, attn_implementation="sdpa")
        width, out = vision.hidden_size, config["text_config"]["hidden_size"]
        self.multi_modal_projector = nn.Linear(4 * width, out, bias=config["projector_bias"])

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the tower."""
        return self.vision_model.layers


def halves(rows: Tensor, heads: int) -> Tensor:
    """Row 2i of a head becomes row i, row 2i + 1 becomes row i + K/2, by plain loops."""
    size = len(rows) // heads
    order = [
        head * size + start + 2 * pair
        for head in range(heads)
        for start in (0, 1)
        for pair in range(size // 2)
    ]
    return rows[order]


def step3_vl_keys(state: State) -> State:
    """Map to transformers' names."""
    projected = {key.replace(".attn.in_proj.", ".attn.qkv."): x for key, x in state.items()}
    return renamed(
        split_qkv(projected, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^conv1\.", "vision_model.embeddings.patch_embedding."),
            (r"^positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
            (r"^ln_pre\.", "vision_model.pre_layernorm."),
            (r"^transformer\.resblocks\.", "vision_model.layers."),
            (r"\.attn\.", ".self_attn."),
            (r"\.ln_1\.", ".layernorm_before."),
            (r"\.ln_2\.", ".layernorm_after."),
            (r"\.ls_(\d)$", r".lambda_\1"),
            (r"\.c_fc\.", ".fc1."),
            (r"\.c_proj\.", ".fc2."),
            (r"^vit_downsampler", "vision_model.downsampler"),
            (r"^vit_large_projector\.", "multi_modal_projector."),
        ],
    )


def step3_vl_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower and projector; its hidden state is caught before the convolutions."""
    states: list[Tensor] = []
    last = reference.vision_model.layers[-1]
    handle = last.register_forward_hook(lambda module, inputs, output: states.append(output))
    try:
        tokens = reference.vision_model(pixels).last_hidden_state
    finally:
        handle.remove()
    projected = reference.multi_modal_projector(tokens)
    return EncoderOutput(states[0], projected.flatten(0, 1), ())


class Step3Reference(nn.Module):
    """Step3's tower in float64, view by view, from a state dict with our names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = vision_of(config)
        self.state: dict[str, Tensor] = {}

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        self.state = {key: value.double().cpu() for key, value in state_dict.items()}

    def forward(self, view: Tensor) -> tuple[Tensor, Tensor]:
        """From one view [3, H, W] to hidden rows [4+h*w, D] and tokens [N, out]."""
        patch = self.config["patch_size"]
        h, w = view.shape[1] // patch, view.shape[2] // patch
        hidden = torch.cat([self._first_rows(), self._patches(view, patch, h, w)])
        for number in range(self.config["num_hidden_layers"]):
            hidden = self._block(f"transformer.layers.{number}.", hidden)
        maps = hidden[4:].T.reshape(-1, h, w)
        maps = self._convolve("vit_downsampler", maps, size=2, pad=0)
        maps = self._convolve("vit_downsampler2", maps, size=3, pad=1)
        return hidden, self._linear("vit_large_projector", maps.flatten(1).T)

    def _first_rows(self) -> Tensor:
        token = self.state["embeddings.class_embedding"][0]
        token = token + self.state["embeddings.position_embedding"][0]
        return torch.stack([token] * 4)

    def _patches(self, view: Tensor, patch: int, h: int, w: int) -> Tensor:
        kernel = self.state["embeddings.patch_embedding.weight"]
        bias = self.state["embeddings.patch_embedding.bias"]
        table = self.state["embeddings.position_embedding"][1:]
        side = math.isqrt(len(table))
        vertical, horizontal = _cubic(side, h), _cubic(side, w)
        places = torch.einsum("ha,wb,abd->hwd", vertical, horizontal, table.view(side, side, -1))
        cuts = [
            view[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            for row in range(h)
            for column in range(w)
        ]
        return _sums(kernel, cuts) + bias + places.flatten(0, 1)

    def _block(self, name: str, hidden: Tensor) -> Tensor:
        q, k, v = self._linear(f"{name}self_attn.qkv_proj", hidden).chunk(3, dim=1)
        heads = []
        for q1, k1, v1 in zip(*(x.chunk(self._heads, dim=1) for x in (q, k, v)), strict=True):
            scores = (q1 @ k1.T) / math.sqrt(q1.shape[1])
            weights = (scores - scores.amax(1, keepdim=True)).exp()
            heads.append(weights / weights.sum(1, keepdim=True) @ v1)
        attended = self._linear(f"{name}self_attn.out_proj", torch.cat(heads, dim=1))
        hidden = hidden + self._norm(f"{name}layer_norm1", attended)
        inner = self._linear(f"{name}mlp.fc1", hidden)
        inner = inner / (1 + (-1.702 * inner).exp())
        return hidden + self._norm(f"{name}layer_norm2", self._linear(f"{name}mlp.fc2", inner))

    @property
    def _heads(self) -> int:
        return self.config["num_attention_heads"]

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        out = rows @ self.state[f"{name}.weight"].T
        return out + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else out

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + self.config["layer_norm_eps"]).sqrt()
        return centred / scale * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def _convolve(self, name: str, maps: Tensor, size: int, pad: int) -> Tensor:
        """A convolution of stride 2, position by position."""
        kernel, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        wide = maps.new_zeros(maps.shape[0], maps.shape[1] + 2 * pad, maps.shape[2] + 2 * pad)
        wide[:, pad : pad + maps.shape[1], pad : pad + maps.shape[2]] = maps
        rows = (wide.shape[1] - size) // 2 + 1
        columns = (wide.shape[2] - size) // 2 + 1
        cuts = [
            wide[:, 2 * y : 2 * y + size, 2 * x : 2 * x + size]
            for y in range(rows)
            for x in range(columns)
        ]
        return (_sums(kernel, cuts) + bias).T.reshape(-1, rows, columns)


def _sums(kernel: Tensor, cuts: list[Tensor]) -> Tensor:
    """The sum of each cut [C, k, k] weighted by each kernel [out, C, k, k]: [cuts, out]."""
    return torch.stack([cut.flatten() for cut in cuts]) @ kernel.flatten(1).T


def _cubic(before: int, after: int) -> Tensor:
    """Weights [after, before] of an antialiased bicubic resize of one axis."""
    scale = before / after
    stretch = max(scale, 1.0)
    weights = torch.zeros(after, before, dtype=torch.float64)
    for place in range(after):
        centre = (place + 0.5) * scale
        for tap in range(before):
            weights[place, tap] = _keys((tap + 0.5 - centre) / stretch)
    return weights / weights.sum(1, keepdim=True)


def _keys(x: float, a: float = -0.5) -> float:
    """The cubic convolution kernel of Keys."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return a * (((x - 5) * x + 8) * x - 4) if x < 2 else 0.0


def step3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run this reference, which stays on the CPU, on every view."""
    hidden, tokens = zip(*(reference(view) for view in pixels.double().cpu()), strict=True)
    return EncoderOutput(torch.stack(hidden), torch.cat(tokens), ()).to(pixels.device)


ROWS = [
    make_row(
        "step3_vl", "stepfun-ai/Step3-VL-10B", Step3VLReference, step3_vl_keys, step3_vl_output,
        shallow={"layers": 1},
        narrow=STEP3_VL_NARROW,
        tiny={**STEP3_VL_NARROW, "layers": 3, "image_size": 112},
        tower=Step3VLTower,
        renamed=True,
    ),
    make_row(
        "step3", "stepfun-ai/step3", Step3Reference, same_keys, step3_output,
        shallow={"num_hidden_layers": 1},
        narrow=STEP3_NARROW,
        tiny={**STEP3_NARROW, "num_hidden_layers": 3, "image_size": 112},
        variant=True,
        tower=Step3Tower,
        slow=True,
    ),
]  # fmt: skip
