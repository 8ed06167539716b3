"""Small checkpoints of models whose tower is one of ``vitgraph.seeded``, with a language model.

Config, tensors and processor files of the tower are those of the seeded checkpoint, with small
images. The language model has random weights under the names of transformers, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_models import IDS
from tiny_published import published
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engines.models import write_tokenizer
from vitgraph.seeded import SEEDED, TEXT_WIDTH, seeded_tower, write_seeded_checkpoint

WIDTH = 96
"""Width of the towers, a multiple of 6, with which the MLP of Step3-VL is a whole number wide."""
TEXT: dict[str, Any] = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 400,
    "max_position_embeddings": 16384,
    "bos_token_id": IDS["bos_token_id"],
    "eos_token_id": IDS["eos_token_id"],
    "pad_token_id": IDS["bos_token_id"],
    "tie_word_embeddings": False,
}
QWEN = {**TEXT, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN["hidden_act"] = "silu"


CODE = {
    "DotsOCRConfig": """
from vllm.transformers_utils.configs import dotsocr


class DotsOCRConfig(dotsocr.DotsOCRConfig):
    pass
""",
    "StepRoboticsConfig": """
from transformers import PretrainedConfig, Qwen2Config


class StepRoboticsConfig(PretrainedConfig):
    model_type = "step_robotics"

    def __init__(self, text_config=None, vision_config=None, **fields):
        self.text_config = Qwen2Config(**(text_config or {}))
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**fields)
""",
}


class Small(NamedTuple):
    """A model: what its config has besides the tower, its tokens, and its prompts."""

    architecture: str
    text: dict[str, Any]
    """The config of the language model, for transformers."""
    tokens: dict[str, int]
    mark: str
    """What stands for an image in a prompt."""
    language: str = "language_model."
    """The prefix of the names of the language model."""
    place: str = "text_config"
    """The section of the config that has the language model; empty for the top level."""
    config: dict[str, Any] = {}
    """Fields of the config."""
    inner: dict[str, Any] = {}
    """Fields of the config of PaliGemma, which is a section of ColPali's."""
    vision: dict[str, Any] = {}
    """Sizes of the tower that differ from those of the seeded checkpoint."""
    sizes: dict[str, dict[str, Any]] = {}
    """Module and name in vLLM of what makes a part of the tower -> sizes that no config has."""
    files: dict[str, dict[str, Any]] = {}
    """Fields of processor files."""
    named: dict[str, Any] = {}
    """Fields of the tokenizer's config."""
    code: str = ""
    """The name in :data:`CODE` of the class of the config, which some repos bring along."""
    stand_ins: dict[str, str] = {}
    """Architecture of a language model that needs a GPU -> module:class in its place."""
    clip: str = ""
    """What stands for a clip in a prompt; empty if the model takes none."""
    scale: float = 0.1
    """Standard deviation of the weights of the language model."""
    around: dict[str, tuple[int, ...]] = {}
    """Shapes of tensors that are neither of the tower nor of the language model."""
    images: int = 4
    """The most images of a prompt."""
    asked: tuple[str, ...] = ("images", "wide")
    """Names of prompts besides text, an image and a clip."""
    engine: dict[str, Any] = {}
    """Options of the engine."""
    pooling: bool = False
    """Whether answers are embeddings."""


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_SMALL = {"image_size": 56}
_PINS = [[56, 56], [56, 112], [112, 56]]
_STEP = {"<im_patch>": 304, "<im_start>": 310, "<im_end>": 311, "<patch_start>": 312}
_STEP |= {"<patch_end>": 313, "<patch_newline>": 314}
_QWEN35 = {
    **TEXT,
    "model_type": "qwen3_5_text",
    "layer_types": ["full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_SAM = {"width": WIDTH, "layers": 2, "heads": 3, "global_attn_indexes": [1]}
_SAM |= {"downsample_channels": [512, WIDTH]}
_STACK = {"dim": WIDTH, "layers": 2, "heads": 3, "num_key_value_heads": 1}
_STACK |= {"intermediate_size": 128}
_OCR2 = "vllm.model_executor.models.deepseek_ocr2"
_VLLM_SAM = {"embed_dim": WIDTH, "num_heads": 3, "depth": 2, "global_attn_indexes": (1,)}
_VLLM_SAM |= {"last_conv_output": WIDTH}
_VLLM_STACK = {"decoder_layer": 2, "hidden_dimension": WIDTH, "num_attention_heads": 3}
_VLLM_STACK |= {"num_key_value_heads": 1, "intermediate_size": 128}
_KDA = {"kda_layers": [], "full_attn_layers": [1, 2], "num_heads": 3, "head_dim": 32}
_KDA["short_conv_kernel_size"] = 4
_MINICPM = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
SMALL: dict[str, Small] = {
    "llava_onevision": Small(
        "LlavaOnevisionForConditionalGeneration",
        QWEN,
        {"<image>": 304, "<video>": 305},
        "<image>",
        config={"image_grid_pinpoints": _PINS, "image_token_index": 304, "video_token_index": 305},
        vision=_SMALL,
        files={
            "preprocessor_config": {"image_grid_pinpoints": _PINS, "size": _square(56)},
            "video_preprocessor_config": {
                "video_processor_type": "LlavaOnevisionVideoProcessor",
                "size": _square(56),
            },
            "processor_config": {
                "processor_class": "LlavaOnevisionProcessor",
                "num_image_tokens": 16,
                "vision_feature_select_strategy": "full",
                "image_token": "<image>",
                "video_token": "<video>",
            },
        },
        clip="<video>",
    ),
    "llava_next": Small(
        "LlavaNextForConditionalGeneration",
        {**TEXT, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"<image>": 304},
        "<image>",
        config={"image_grid_pinpoints": _PINS, "image_token_index": 304},
        vision=_SMALL,
        files={
            "preprocessor_config": {
                "image_grid_pinpoints": _PINS,
                "size": {"shortest_edge": 56},
                "crop_size": _square(56),
            },
            "processor_config": {
                "processor_class": "LlavaNextProcessor",
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
                "image_token": "<image>",
            },
        },
    ),
    "paligemma": Small(
        "PaliGemmaForConditionalGeneration",
        {**TEXT, "model_type": "gemma", "tie_word_embeddings": True},
        {"<image>": 304, "\n": 310},
        "",
        inner={"image_token_index": 304, "projection_dim": TEXT_WIDTH},
        vision=_SMALL,
        files={"preprocessor_config": {"size": _square(56), "image_seq_length": 16}},
        scale=0.03,
        images=1,
        asked=("other",),
    ),
    "colpali": Small(
        "ColPaliForRetrieval",
        {**TEXT, "model_type": "gemma", "tie_word_embeddings": True},
        {"<image>": 304, "\n": 310},
        "",
        language="vlm.language_model.",
        config={"embedding_dim": 32},
        inner={"image_token_index": 304, "projection_dim": TEXT_WIDTH, "hidden_size": TEXT_WIDTH},
        around={"embedding_proj_layer.weight": (32, TEXT_WIDTH)},
        vision=_SMALL,
        files={"preprocessor_config": {"size": _square(56), "image_seq_length": 16}},
        scale=0.03,
        images=1,
        asked=("other",),
        pooling=True,
    ),
    "dots_ocr": Small(
        "DotsOCRForCausalLM",
        QWEN,
        {"<|imgpad|>": 304, "<|img|>": 310, "<|endofimg|>": 311},
        "<|img|><|imgpad|><|endofimg|>",
        language="",
        place="",
        config={"image_token_id": 304, "video_token_id": 305},
        code="DotsOCRConfig",
    ),
    "deepseek_ocr2": Small(
        "DeepseekOCR2ForCausalLM",
        QWEN,
        {"<image>": 304},
        "<image>",
        language="",
        place="language_config",
        vision={"image_size": 1024, "width": {"sam_vit_b": _SAM, "qwen2-0-5b": _STACK}},
        config={
            "projector_config": {"projector_type": "linear", "input_dim": WIDTH}
            | {"model_type": "mlp_projector", "n_embed": TEXT_WIDTH}
        },
        sizes={f"{_OCR2}:ImageEncoderViT": _VLLM_SAM}
        | {f"{_OCR2}:build_qwen2_decoder_as_encoder": _VLLM_STACK},
    ),
    "minicpm_v": Small(
        "MiniCPMV4_6ForConditionalGeneration",
        _QWEN35,
        {token: 304 + number for number, token in enumerate(_MINICPM.values())},
        "<|image_pad|>",
        language="model.language_model.",
        config={"image_token_id": 304, "video_token_id": 305},
        named={"extra_special_tokens": _MINICPM},
        engine={"enable_prefix_caching": False},
        clip="<|video_pad|>",
    ),
    "step3": Small(
        "Step3VLForConditionalGeneration",
        QWEN,
        _STEP,
        "<im_patch>",
        language="",
        config={"image_token_id": 304},
    ),
    "step3_vl": Small(
        "StepVLForConditionalGeneration",
        QWEN,
        _STEP,
        "<im_patch>",
        language="",
        config={"image_token_id": 304},
        code="StepRoboticsConfig",
    ),
    "kimi_k3": Small(
        "KimiK3ForConditionalGeneration",
        {**QWEN, "linear_attn_config": _KDA},
        {"<|kimi_image_placeholder|>": 310, "<|media_begin|>": 311, "<|media_content|>": 312}
        | {"<|media_pad|>": 304, "<|media_end|>": 313},
        "<|kimi_image_placeholder|>",
        config={"media_placeholder_token_id": 304},
        engine={"enable_prefix_caching": False},
        stand_ins={"KimiLinearForCausalLM": "stand_ins:Llama"},
    ),
}


def write_small(folder: Path, kind: str) -> Path:
    """Write one of :data:`SMALL`."""
    small = SMALL[kind]
    write_seeded_checkpoint(folder, kind, width=WIDTH, dtype=torch.float32, shards=1)
    config = json.loads((folder / "config.json").read_text()) | small.config
    whole = config.get("vlm_config", config)  # ColPali's has that of PaliGemma
    if small.vision:
        whole["vision_config"] |= small.vision
        write_sizes(folder, kind, config)
    known = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in known.items() if not tensor.isnan().any()}
    save_file(tensors | language_tensors(small), folder / "model.safetensors")
    tied = {"tie_word_embeddings": small.text["tie_word_embeddings"]}
    config |= tied | {"architectures": [small.architecture], "torch_dtype": "float32"}
    whole |= small.inner
    if small.place:
        text = whole.setdefault(small.place, {})
        text |= {**small.text, "model_type": text.get("model_type", small.text["model_type"])}
    else:
        config = {**small.text, **config}
    if small.code:
        config["auto_map"] = {"AutoConfig": f"configuration.{small.code}"}
        (folder / "configuration.py").write_text(CODE[small.code])
    write_tokenizer(folder, {**IDS, "image_token_id": 398, "video_token_id": 399}, small.tokens)
    (folder / "config.json").unlink()
    for stem, fields in {"config": config, "tokenizer_config": small.named, **small.files}.items():
        file = folder / f"{stem}.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**content, **fields}, indent=1))
    return folder


def language_tensors(small: Small) -> dict[str, Tensor]:
    """The tensors of a model besides those of its tower, by their published names."""
    torch.manual_seed(0)
    language = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small.text)).float()
    shapes = {_full_name(small, name): x for name, x in language.state_dict().items()}
    if small.text["tie_word_embeddings"]:
        del shapes[_full_name(small, "lm_head.weight")]
    shapes |= {name: torch.empty(shape) for name, shape in small.around.items()}
    return {
        name: small.scale * torch.randn(x.shape) if x.ndim > 1 else x for name, x in shapes.items()
    }


def _full_name(small: Small, name: str) -> str:
    """The published name of a tensor of the language model."""
    if small.language != "model.language_model.":
        return small.language + name
    return name.replace("model.", small.language, 1) if name.startswith("model.") else name


def write_sizes(folder: Path, kind: str, config: dict[str, Any]) -> None:
    """Write the tensors of a tower of the sizes of a config in place of the small ones."""
    kept = SEEDED[kind]
    prefix = next(one for one in kept.layout.prefixes if one.full == kept.model.prefix)
    tower = seeded_tower(kept.family, config, 0, torch.float32)
    save_file(published(kept.layout, prefix, tower), folder / "model.safetensors")
