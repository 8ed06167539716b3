"""The reference of Nemotron: RadioModel of transformers, and the projector of its omni model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import make_row
from ..keys import State, renamed
from ..versions import skip_without
from .c_radio import C_RADIO_NARROW, OLDER, c_radio_keys, c_radio_output, c_radio_reference

_SMALL = {**C_RADIO_NARROW, "projector_hidden_size": 96, "llm_width": 48}


def nemotron_reference(config: Config) -> nn.ModuleDict:
    """Build transformers' tower and projector; pixels are normalised outside."""
    skip_without(*OLDER)
    from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as theirs

    tower = c_radio_reference(config["vision_config"])
    width: int = tower.config.hidden_size  # type: ignore[assignment,union-attr]
    sizes = 4 * width, config["projector_hidden_size"], config["llm_config"]["hidden_size"]
    projector = theirs.NemotronH_Omni_Reasoning_V3MultiModalProjector(*sizes)
    return nn.ModuleDict({"tower": tower, "projector": projector})


def nemotron_keys(state: State) -> State:
    """Map to the names of transformers' tower and projector."""
    state = renamed(state, [(r"^video_embed\.", "embeddings.video_patch_projection.")])
    tower = {name: x for name, x in state.items() if not name.startswith("projector.")}
    projector = {name: x for name, x in state.items() if name.startswith("projector.")}
    return {
        **{f"tower.{name}": x for name, x in c_radio_keys(tower).items()},
        **{name.replace(".norm.", ".layer_norm."): x for name, x in projector.items()},
    }


def packed_output(tower: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on rows with columns for an image and for a pair of frames.

    It embeds either; the sum is that of whichever is not zero.
    """
    image, embeddings = pixels[:, :768], tower.embeddings
    if pixels.shape[1] == 768:
        return c_radio_output(tower, pixels, grid_thw)
    frames = embeddings.video_patch_projection(pixels[:, 768:])
    hook = embeddings.patch_projection.register_forward_hook(lambda *call: call[2] + frames)
    try:
        return c_radio_output(tower, image, grid_thw)
    finally:
        hook.remove()


def nemotron_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on packed frames, and its pixel shuffle and projector on each."""
    from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as theirs

    shuffle: Any = theirs.NemotronH_Omni_Reasoning_V3.pixel_shuffle
    out = packed_output(reference["tower"], pixels, grid_thw)
    frames = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    rows = out.pooler_output.split([h * w for h, w in frames])
    squares = [
        shuffle(None, part.view(1, h, w, -1)).flatten(0, 2)
        for part, (h, w) in zip(rows, frames, strict=True)
    ]
    empty = out.pooler_output.new_empty(0, 4 * out.pooler_output.shape[1])
    return out._replace(pooler_output=reference["projector"](cat([empty, *squares])))


ROWS = [
    make_row(
        "nemotron",
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
        nemotron_reference,
        nemotron_keys,
        nemotron_output,
        shallow={"num_hidden_layers": 1, "projector_hidden_size": 256},
        narrow=_SMALL,
        tiny={**_SMALL, "num_hidden_layers": 3, "max_img_size": 192},
        renamed=True,
        filled=("input_conditioner.norm_mean", "input_conditioner.norm_std", "summary_idxs"),
        required=("num_attention_heads",),
        not_in_tensors=("summary", "tile_size"),
        casts=(("to", "float"),),
        blocks=lambda reference: reference["tower"].encoder.layer,
        block_rows=lambda encoder, grids, seen: [
            x[0][encoder.prepare_encoder_metadata(grids)["patch_index"]] for x in seen
        ],
    ),
]
