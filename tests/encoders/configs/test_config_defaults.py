"""A key that a config leaves out has the default of transformers, or the config is refused."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from encoders import GlmOCRConfig
from tests.oracles import BY_FAMILY
from tests.oracles.configs import Config
from weights import FAMILIES, Family
from weights.published import PUBLISHED

NOT_KEYS = {"model_type", "architectures", "dtype", "transformers_version", "_name_or_path"}
TEXT_KEYS = ("hidden_size", "rms_norm_eps")
"""The keys of a language model that towers read."""
OTHER_NAMES = ("unlimited_ocr",)
"""The model types whose configs have names of transformers that no published checkpoint has."""
SECTIONS = ("thinker_config", "vision_config", "high_res_vision_config", "text_config")
Path = tuple[str, ...]
"""The names of a key and of the sections around it, the outermost first."""


def configs() -> Iterator[Any]:
    """The first published config of each model type that transformers knows, else its own."""
    for family in FAMILIES.values():
        published = {
            str(model.config.get("model_type")): dict(model.config)
            for model in reversed(PUBLISHED)
            if model.family == family.name
        }
        for kind in dict.fromkeys((*published, *family.model_types)):
            if kind not in CONFIG_MAPPING or (kind, family.name) == (
                "unlimited_ocr",
                "deepseek_ocr",
            ):
                continue
            if kind in published:
                yield pytest.param(family, kind, published[kind], id=f"{family.name}-{kind}")
            elif hasattr(CONFIG_MAPPING[kind](), "vision_config"):
                config = {"model_type": kind}
                yield pytest.param(family, kind, config, id=f"{family.name}-{kind}")


def spelled_out(theirs: Any) -> Config:
    """A config of transformers with every key of its towers, and what towers read of the rest."""
    config = {key: value for key, value in theirs.to_dict().items() if key not in SECTIONS}
    for name in SECTIONS:
        part = getattr(theirs, name, None)
        if name == "text_config" and part is not None:
            values = {key: getattr(part, key) for key in TEXT_KEYS if key in part.to_dict()}
            config[name] = {"model_type": part.model_type, **values}
        elif part is not None:
            config[name] = spelled_out(part)
    return config


def paths(config: Config, outer: Path = ()) -> Iterator[Path]:
    """The path of each key of a config, those in its sections too."""
    for key, value in config.items():
        if key in SECTIONS:
            yield from paths(value, (*outer, key))
        elif key not in NOT_KEYS:
            yield (*outer, key)


def changed(config: Config, path: Path, *value: Any) -> Config:
    """A copy of a config with another value under a path, or without the key."""
    key, *inner = path
    if inner:
        return {**config, key: changed(config[key], tuple(inner), *value)}
    rest = {name: entry for name, entry in config.items() if name != key}
    return {**rest, key: value[0]} if value else rest


def read(family: Family, config: Config) -> Any:
    """Our config, or None if it is refused."""
    try:
        return family.config.from_hf(config)
    except ValueError:
        return None


@pytest.mark.parametrize(("family", "kind", "config"), [*configs()])
def test_a_missing_key_has_the_default_of_transformers(
    family: Family, kind: str, config: Config
) -> None:
    theirs = CONFIG_MAPPING[kind].from_dict(deepcopy(config))
    whole = spelled_out(theirs)
    required = {*BY_FAMILY[family.name].required, "text_config.hidden_size"}
    assert read(family, whole) is not None
    for path in paths(whole):
        less = changed(whole, path)
        ours = read(family, less)
        if ours == read(family, whole) == read(family, changed(whole, path, "no value")):
            continue  # the key is not read
        section, part = theirs, less
        for name in path[:-1]:
            section, part = getattr(section, name), part[name]
        try:
            section = type(section).from_dict(deepcopy(part))
        except StrictDataclassError:  # the default does not fit the other sizes
            assert ours is None, path
            continue
        usual = getattr(section, path[-1], whole)
        wanted = read(family, whole if usual is whole else changed(less, path, usual))
        if ours is None and wanted is not None:
            assert {path[-1], ".".join(path[-2:])} & required, path
        else:
            assert ours == wanted, path


@pytest.mark.parametrize(("family", "kind", "config"), [*configs()])
def test_a_section_without_a_model_type_has_the_defaults_of_the_whole_model(
    family: Family, kind: str, config: Config
) -> None:
    theirs = CONFIG_MAPPING[kind].from_dict(deepcopy(config))
    whole = spelled_out(theirs)
    sections = type(theirs).sub_configs
    for path in paths(whole):
        if len(path) == 2 and sections[path[0]] is not AutoConfig:
            less = changed(whole, path)
            assert read(family, changed(less, (path[0], "model_type"))) == read(family, less), path


def test_a_limit_alone_tells_that_the_merger_is_glm_5_s() -> None:
    config = next(
        dict(model.config) for model in PUBLISHED if model.config.get("model_type") == "glm5_next"
    )
    tower = changed(config["vision_config"], ("model_type",))
    with_limit = GlmOCRConfig.from_hf({"vision_config": {**tower, "swiglu_limit": 7}})
    assert with_limit == replace(GlmOCRConfig.from_hf(config), swiglu_limit=7.0)
    assert GlmOCRConfig.from_hf({**tower, "swiglu_limit": 7}) == with_limit
    without = GlmOCRConfig.from_hf(changed(tower, ("swiglu_limit",)))
    assert without.swiglu_limit is None
    assert without.merger_size == with_limit.out_hidden_size * 3
    named = {**tower, "model_type": "glm_ocr_vision", "swiglu_limit": 7}
    assert GlmOCRConfig.from_hf(named).swiglu_limit is None
