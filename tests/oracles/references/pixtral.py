"""transformers' tower and projector of Pixtral and Mistral 3, and patches taken back to images."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import LlavaConfig, Mistral3Config
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import Grids, make_row
from ..keys import State, renamed, split_qkv
from ..sizes import PIXTRAL_NARROW


class PixtralReference(nn.Module):
    """The tower and the projector of transformers, side by side as in its models."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vision = {k: v for k, v in config["vision_config"].items() if k != "model_type"}
        vision["head_dim"] = vision["hidden_size"] // vision["num_attention_heads"]
        tower = PixtralVisionConfig(**vision)
        self.vision_tower = PixtralVisionModel._from_config(tower, attn_implementation="sdpa")
        llava = config["model_type"] == "llava"
        text = {**config["text_config"], "model_type": "mistral"}
        fields = {k: v for k, v in config.items() if k != "model_type" and "_config" not in k}
        whole = (LlavaConfig if llava else Mistral3Config)(
            vision_config={**vision, "model_type": "pixtral"}, text_config=text, **fields
        )
        kind = LlavaMultiModalProjector if llava else Mistral3MultiModalProjector
        self.multi_modal_projector = kind(whole)
        self.merge, self.llava = config.get("spatial_merge_size", 1), llava

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the tower."""
        layers = self.vision_tower.transformer.layers
        assert isinstance(layers, nn.ModuleList)
        return layers


def pixtral_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a reference on images made of the patches, and bring patches into merge-block order."""
    merge, grids = reference.merge, grid_thw.tolist()
    hidden, areas = pixtral_states(reference.vision_tower, pixels, grids, merge)
    asked = (hidden,) if reference.llava else (hidden, areas)
    tokens = reference.multi_modal_projector(*asked)
    return EncoderOutput(in_merge_order(hidden, grids, merge), tokens, ())


def pixtral_states(tower: Any, pixels: Tensor, grids: Grids, merge: int) -> tuple[Tensor, Tensor]:
    """Run a tower on padded images made of the patches; return its states and the images' sizes."""
    p, m = tower.config.patch_size, merge
    sizes = [(h, w) for t, h, w in grids for _ in range(t)]
    images = [
        rearrange(
            rows, "(h w a b) (c p q) -> c (h a p) (w b q)", h=h // m, w=w // m, a=m, b=m, p=p, q=p
        )
        for rows, (h, w) in zip(pixels.split([h * w for h, w in sizes]), sizes, strict=True)
    ]
    tall, wide = (max(image.shape[axis] for image in images) for axis in (1, 2))
    batch = pixels.new_full((len(images), images[0].shape[0], tall, wide), 9.0)
    for place, image in zip(batch, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    areas = torch.tensor([(h * p, w * p) for h, w in sizes])
    return tower(batch, image_sizes=areas).last_hidden_state[0], areas


def in_merge_order(states: Tensor, grids: Grids, merge: int) -> Tensor:
    """Bring patches from raster order into merge-block order."""
    counts = [t * h * w for t, h, w in grids]
    order = "(t h a w b) d -> (t h w a b) d"
    blocks = [
        rearrange(rows, order, t=t, h=h // merge, w=w // merge, a=merge, b=merge)
        for rows, (t, h, w) in zip(states.split(counts), grids, strict=True)
    ]
    return torch.cat(blocks)


def pixtral_keys(state: State) -> State:
    """Map to transformers' names, queries, keys and values apart."""
    return renamed(
        split_qkv(state, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^projector\.merging_layer\.", "multi_modal_projector.patch_merger.merging_layer."),
            (r"^projector\.", "multi_modal_projector."),
            (r"^patch_embed\.proj\.", "vision_tower.patch_conv."),
            (r"^ln_pre\.", "vision_tower.ln_pre."),
            (r"^blocks\.", "vision_tower.transformer.layers."),
            (r"\.norm1\.", ".attention_norm."),
            (r"\.norm2\.", ".ffn_norm."),
            (r"\.attn\.proj\.", ".attention.o_proj."),
            (r"\.attn\.", ".attention."),
            (r"\.mlp\.", ".feed_forward."),
        ],
    )


ROWS = [
    make_row(
        "pixtral", "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        PixtralReference, pixtral_keys, pixtral_output,
        shallow={"num_hidden_layers": 2},
        narrow=PIXTRAL_NARROW,
        tiny={**PIXTRAL_NARROW, "num_hidden_layers": 3},
        slow=True,
        eager=True,
        block_rows=lambda encoder, grids, seen: [in_merge_order(x[0], grids, 2) for x in seen],
    ),
    make_row(
        "pixtral_12b", "mistral-community/pixtral-12b",
        PixtralReference, pixtral_keys, pixtral_output,
        shallow={"num_hidden_layers": 2},
        narrow={**PIXTRAL_NARROW, "hidden_act": "gelu"},
        tiny={**PIXTRAL_NARROW, "num_hidden_layers": 3, "hidden_act": "gelu"},
        variant=True,
    ),
]  # fmt: skip
