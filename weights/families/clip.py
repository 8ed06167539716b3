"""CLIP's tower as OpenAI, LAION, Meta, timm and LLaVA publish it.

Source of the names: ``CLIPModel``, ``CLIPVisionModel``, ``MetaClip2Model``, ``LlavaModel`` and
``LlavaNextModel`` of transformers 5.24.0, ``VisionTransformer`` of timm 1.0.31 and of
open_clip 3.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from encoders import (
    ClipConfig,
    ClipEncoder,
    LlavaConfig,
    LlavaEncoder,
    LlavaNextConfig,
    LlavaNextEncoder,
)
from encoders.hf_config import (
    find_section,
    read_choice,
    read_indices,
    read_ratio,
    read_size,
    require_value,
)

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonDict, JsonObject
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, square
from .siglip import QKV, siglip_names

_NAMES = {
    "embeddings.class_embedding": "class_embedding",
    **siglip_names("", "patch_embed.proj"),
    "pre_layrnorm": "norm_pre",
}
_CLIP = Layout(
    name="clip",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    marks=("embeddings.class_embedding",),
    projector=("visual_projection.",),
    joins={"blocks.N.attn.qkv": QKV},
    renames={**_NAMES, "visual_projection": "head"},
    processor_files=family_facts("clip").processors["clip"],
)
_TIMM = Layout(  # timm/vit_*_clip_*
    name="timm",
    prefixes=(Prefix("", ""),),
    marks=("cls_token", "blocks."),
    reshapes={"class_embedding": "d -> one again d", "pos_embed": "n d -> one n d"},
    renames={"cls_token": "class_embedding"},
)
_RESBLOCK = "transformer.resblocks.N"
_OPEN_CLIP = Layout(  # laion/*, apple/*, timm/*: open_clip_model.safetensors
    name="open_clip",
    prefixes=(Prefix("", "visual."), Prefix("", "")),
    marks=("class_embedding",),
    renames={
        "conv1": "patch_embed.proj",
        "positional_embedding": "pos_embed",
        "ln_pre": "norm_pre",
        f"{_RESBLOCK}.ln_1": "blocks.N.norm1",
        f"{_RESBLOCK}.attn.in_proj_weight": "blocks.N.attn.qkv.weight",
        f"{_RESBLOCK}.attn.in_proj_bias": "blocks.N.attn.qkv.bias",
        f"{_RESBLOCK}.attn.out_proj": "blocks.N.attn.proj",
        f"{_RESBLOCK}.ln_2": "blocks.N.norm2",
        f"{_RESBLOCK}.mlp.c_fc": "blocks.N.mlp.fc1",
        f"{_RESBLOCK}.mlp.c_proj": "blocks.N.mlp.fc2",
        "ln_post": "norm",
        "proj": "head.weight",
    },
    transposed=("head.weight",),
)
_PROJECTOR = "multi_modal_projector"
_LLAVA = Layout(
    name="llava",
    prefixes=(
        Prefix("", "vision_tower.vision_model."),  # llava-hf/llava-1.5-*
        Prefix("model.", "vision_tower.vision_model."),
        Prefix("model.", "vision_tower."),  # as transformers 5.24.0 saves it
        Prefix("", "vision_tower."),
        Prefix("", ""),
    ),
    marks=_CLIP.marks,
    projector=(f"{_PROJECTOR}.",),
    joins=_CLIP.joins,
    renames={**_NAMES, _PROJECTOR: "projector"},
    processor_files=family_facts("llava").processors["llava"],
)

_LLAVA_NEXT = replace(
    _LLAVA,
    name="llava_next",
    projector=(*_LLAVA.projector, "image_newline"),
    processor_files=family_facts("llava_next").processors["llava_next"],
)

_PATCH = "patch_embed.proj.weight"
_FIELDS: Fields = {  # the number of heads cannot be inferred from shapes, nor the activation
    ("hidden_size",): length(_PATCH, 0),
    ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
    ("num_hidden_layers",): block_count("blocks."),
    ("patch_size",): length(_PATCH, 3),
    ("image_size",): square("pos_embed", 0, _PATCH, extra=1),
}


def _parse_config(config: JsonObject, shapes: Shapes) -> ClipConfig:
    """Return the encoder's config; a tower alone has a projection if there are tensors of it."""
    built, bias = ClipConfig.from_hf(config), "head.bias" in shapes
    columns = built.projection_dim or shapes.get("head.weight", (None,))[0]
    return replace(built, projection_dim=columns, projection_bias=bias)


_TIMM_TOWERS = {  # depth, width, heads, width of the MLP, side of a patch
    "base_patch32": (12, 768, 12, 3072, 32),
    "base_patch16": (12, 768, 12, 3072, 16),
    "large_patch14": (24, 1024, 16, 4096, 14),
    "huge_patch14": (32, 1280, 16, 5120, 14),
    "giant_patch14": (40, 1408, 16, 6144, 14),
    "gigantic_patch14": (48, 1664, 16, 8192, 14),
}
_TIMM_NAMES = (
    *(f"vit_base_patch32_clip_{side}" for side in ("224", "256", "384", "448", "quickgelu_224")),
    *(f"vit_base_patch16_clip_{side}" for side in ("224", "384", "quickgelu_224")),
    *(f"vit_large_patch14_clip_{side}" for side in ("224", "336", "quickgelu_224")),
    "vit_large_patch14_clip_quickgelu_336",
    *(f"vit_huge_patch14_clip_{side}" for side in ("224", "336", "378", "quickgelu_224")),
    "vit_huge_patch14_clip_quickgelu_378",
    "vit_giant_patch14_clip_224",
    *(f"vit_gigantic_patch14_clip_{side}" for side in ("224", "378", "quickgelu_224")),
)


def _timm_section(name: str, arguments: JsonObject) -> JsonDict:
    """Return the config of a timm architecture, such as "vit_base_patch16_clip_224".

    As in timm, the activation is that of the name, whatever the weights were trained with.
    """
    size, _, rest = name.removeprefix("vit_").partition("_clip_")
    depth, width, heads, inner, patch = _TIMM_TOWERS[size]
    own = read_size(arguments, "embed_dim", default=width)
    return {
        "hidden_size": own,
        "intermediate_size": round(read_ratio(arguments, "mlp_ratio", default=inner / width) * own),
        "num_hidden_layers": arguments.get("depth", depth),
        "num_attention_heads": arguments.get("num_heads", heads),
        "image_size": arguments.get("img_size", int(rest.removeprefix("quickgelu_"))),
        "patch_size": patch,
        "hidden_act": "quick_gelu" if rest.startswith("quickgelu_") else "gelu",
    }


_OPEN_CLIP_FIELDS = ("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio")


def _open_clip_section(arguments: JsonObject) -> JsonDict:
    """Return the config of a tower of open_clip."""
    vision = find_section(arguments, "vision_cfg")
    for name in vision:
        if name not in (*_OPEN_CLIP_FIELDS, "patch_dropout"):
            require_value(vision, name, None, False)
    width = read_size(vision, "width", default=768)
    return {
        "hidden_size": width,
        "intermediate_size": int(width * read_ratio(vision, "mlp_ratio", default=4.0)),
        "num_hidden_layers": read_size(vision, "layers", default=12),
        "num_attention_heads": width // read_size(vision, "head_width", default=64),
        "image_size": read_size(vision, "image_size", default=224),
        "patch_size": read_size(vision, "patch_size", default=16),
        "hidden_act": "quick_gelu" if arguments.get("quick_gelu") else "gelu",
    }


def _open_clip_processor(config: JsonObject) -> JsonDict:
    """Return the processor file that says what ``preprocess_cfg`` of open_clip's config does."""
    images = find_section({"none": {}, **config}, "preprocess_cfg", "none")
    side = read_size(find_section(config, "model_args.vision_cfg"), "image_size", default=224)
    squashed = read_choice(images, "resize_mode", "shortest", "squash", default="shortest")
    return _transforms(images, None if squashed == "squash" else side, side)


def _processor_of(config: JsonObject) -> JsonDict | None:
    """Return the processor file that a config of timm or open_clip describes."""
    if config.get("architecture") == "open_clip":
        return _open_clip_processor(config)
    return timm_processor(config)


_TIMM_IMAGES = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "crop_pct": 0.875,
}
"""The defaults of ``resolve_data_config`` of timm 1.0.31 for what ``pretrained_cfg`` lacks."""


def timm_processor(config: JsonObject) -> JsonDict | None:
    """Return the processor file that says what ``pretrained_cfg`` of a timm config does.

    A value that the config lacks is timm's default.

    Raises:
        ValueError: a size that is not that of a square, or a way to crop that is not implemented.
    """
    given = config.get("pretrained_cfg")
    if not isinstance(given, Mapping) or "input_size" not in given:
        return None
    images = {**_TIMM_IMAGES, **{name: value for name, value in given.items() if value is not None}}
    sizes = read_indices(given, "input_size", ())
    if len(sizes) != 3 or sizes[1] != sizes[2]:
        raise ValueError(
            f"config field input_size={given['input_size']!r}: must be the number of channels and "
            "two equal sides, such as [3, 224, 224]"
        )
    side = sizes[2]
    short = int(side / read_ratio(images, "crop_pct", default=0.875))
    mode = images.get("crop_mode")
    if mode == "border" or (mode == "squash" and short != side):
        raise ValueError(
            f"config field crop_mode={mode!r} with crop_pct={images['crop_pct']!r} is not "
            'implemented: it must be "center", or "squash" with 1.0'
        )
    return _transforms(images, None if mode == "squash" else short, side)


def _transforms(images: JsonObject, short_side: int | None, side: int) -> JsonDict:
    """Return the processor file for torchvision's transforms of PIL images.

    Args:
        images: the part of a config that has the mean, the std and the filter.
        short_side: the length in pixels of the short side after resizing, before the square in the
            middle is taken; None: images are stretched to a square.
        side: the side of the square in pixels.
    """
    from encoders.inputs import PIL_TRANSFORMS  # here, because it imports PIL and numpy

    kinds = {"bicubic": 3, "bilinear": 2}
    return {
        "image_processor_type": PIL_TRANSFORMS,
        "image_mean": images.get("mean"),
        "image_std": images.get("std"),
        "resample": kinds.get(str(images.get("interpolation", "bicubic")), 0),
        "size": {"height": side, "width": side} if short_side is None else short_side,
        "do_center_crop": short_side is not None,
        "crop_size": side,
    }


_CLIP_CLASS = TransformersClass("clip", "CLIPVisionModel", "clip_vision_model")
CLIP = Family(
    name="clip",
    encoder=ClipEncoder,
    config=ClipConfig,
    model_types=("clip", "clip_vision_model", "metaclip_2", "metaclip_2_vision_model"),
    signs=(("embeddings.class_embedding", "pre_layrnorm.weight"),),
    layouts=(_CLIP, _TIMM, _OPEN_CLIP),
    classes={
        "clip": _CLIP_CLASS,
        "metaclip_2": TransformersClass(
            "metaclip_2", "MetaClip2VisionModel", "metaclip_2_vision_model", auto=False
        ),
    },
    fields=_FIELDS,
    timm={
        **{name: partial(_timm_section, name) for name in _TIMM_NAMES},
        "open_clip": _open_clip_section,
    },
    outer_fields={("projection_dim",): length("head.weight", 0)},
    processor_of=_processor_of,
    parse_config=_parse_config,
)
LLAVA = Family(
    name="llava",
    encoder=LlavaEncoder,
    config=LlavaConfig,
    model_types=("llava",),
    signs=((f"{_PROJECTOR}.linear_1.weight", "pre_layrnorm.weight"),),
    layouts=(_LLAVA,),
    classes={"llava": _CLIP_CLASS},
    fields=_FIELDS,
    outer_fields={("text_config.hidden_size",): length("projector.linear_2.weight", 0)},
    without=("image_newline",),
    refusals={
        "llava_llama": "its checkpoint leaves out the tower, which the repos of llava-hf have",
        "vipllava": "it reads several layers of the tower, which is not implemented",
    },
)
LLAVA_NEXT = Family(
    name="llava_next",
    encoder=LlavaNextEncoder,
    config=LlavaNextConfig,
    model_types=("llava_next",),
    signs=(("image_newline", "pre_layrnorm.weight"),),
    layouts=(_LLAVA_NEXT,),
    classes={"llava_next": _CLIP_CLASS},
    fields=_FIELDS,
    outer_fields=LLAVA.outer_fields,
)
