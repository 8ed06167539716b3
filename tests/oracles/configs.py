"""Published configs, and the same configs with other numbers."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def vision_of(config: Config) -> Config:
    """Return the tower's part of a published config, which may be of a tower alone."""
    outer: Config = config.get("thinker_config") or config.get("detector_config") or config
    vision: Config = outer.get("vision_config") or outer.get("vit_config", outer)
    return vision


CHAT_KEYS = (
    "force_image_size",
    "select_layer",
    "ps_version",
    "mm_tokens_per_image",
    "projector_hidden_size",
    "projection_dim",
    "pixel_shuffle_factor",
    "image_grid_pinpoints",
    "vision_aspect_ratio",
    "insert_layer_id",
    "downsample_mode",
)
"""Keys that InternVL's chat models, Gemma 3, MiniMax-M3 and others have outside the vision part."""


def _is_inner(config: Config, key: str) -> bool:
    return key not in config and key in config.get("vision_config", {})


def edited(config: Config, **changes: Any) -> Config:
    """Return a published config with other values in its vision part.

    Args:
        config: a whole config.
        changes: new values; those of CHAT_KEYS go to the top level, and ``llm_width`` is the width
            of the language model beside an InternViT, a Step or a DeepSeek tower.
    """
    for outer in ("thinker_config", "detector_config"):
        if outer in config:
            return {**config, outer: edited(config[outer], **changes)}
    outer_keys = [key for key in CHAT_KEYS if key in changes and not _is_inner(config, key)]
    config = {**config, **{key: changes.pop(key) for key in outer_keys}}
    if "llm_width" in changes and "language_config" in config:
        name = "aligner_config" if "aligner_config" in config else "projector_config"
        width = {"n_embed": changes.pop("llm_width")}
        params = config[name].get("params")
        config[name] = {**config[name], **(width if params is None else {"params": params | width})}
    elif "llm_width" in changes and "hidden_size" in config:
        config["hidden_size"] = changes.pop("llm_width")
    elif "llm_width" in changes:
        name = "llm_config" if "llm_config" in config else "text_config"
        config[name] = {**config[name], "hidden_size": changes.pop("llm_width")}
    if "vit_config" in config:  # of Molmo2, whose adapter has fields of the same names
        parts = {}
        for part, own in (("vit_config", {}), ("adapter_config", changes.pop("adapter", {}))):
            fields = config[part]
            parts[part] = {**fields, **{x: y for x, y in changes.items() if x in fields}, **own}
        return {**config, **parts}
    if "vision_config" not in config:  # of a tower alone
        return {**config, **changes}
    vision = config["vision_config"]
    if "backbone_config" in vision:  # of SAM 3, whose neck has its sizes beside it
        neck = {key: changes.pop(key) for key in (*changes,) if key in vision}
        vision = {**vision, **neck}
        changes = {"backbone_config": {**vision["backbone_config"], **changes}}
    return {**config, "vision_config": {**vision, **changes}}
