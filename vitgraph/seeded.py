"""Small checkpoints with random weights, written in the form of published repos of the Hub.

The demo, the notebooks and the tests use them. They have the tensor names, the nested config, the
processor files, the shards with their index and the language model's tensors around the tower of a
published repo; only the sizes are small. The loader makes no exception for such checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor

from encoders.stored_tensors import in_halves
from weights import FAMILIES, Family, JsonDict, JsonObject, Layout, Prefix, build_config
from weights.files import vision_section
from weights.published import PublishedModel, family_facts

__all__ = ["SEEDED", "write_seeded_checkpoint"]

TEXT_WIDTH = 96
"""The width of the small language models to which the towers project; only a few of their tensors
exist."""
HEAD = 32
"""The width of an attention head in small checkpoints."""

if TYPE_CHECKING:
    SEEDED: Mapping[str, Seeded]
    """Every kind of small checkpoint, by the name that ``write_seeded_checkpoint`` takes."""


@dataclass(frozen=True)
class Seeded:
    """One kind of small checkpoint: the published model and tensor layout that it imitates."""

    family: Family
    model: PublishedModel
    layout: Layout
    around: Sequence[str]
    """First the name prefix of the language model's tensors, then names of other tensors outside
    the tower."""


@cache
def _kinds() -> Mapping[str, Seeded]:
    """Return every kind of small checkpoint by name, read once from ``weights/families/facts``."""
    kinds = {}
    for family in FAMILIES.values():
        models = {model.repo_id: model for model in family.facts.published}
        layouts = {layout.name: layout for layout in family.layouts}
        for name, small in family.facts.small.items():
            model = models[small.repo_id]
            layout = layouts[small.layout or model.layout]
            kinds[name] = Seeded(family, model, layout, small.around)
    return kinds


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Return :data:`SEEDED`, which is read from files when it is first used (PEP 562)."""
        if name == "SEEDED":
            return _kinds()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def write_seeded_checkpoint(
    folder: str | Path,
    family: str,
    *,
    depth: int = 2,
    width: int = 128,
    seed: int = 0,
    shards: int = 2,
    decoy_shards: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    prefix: str | None = None,
) -> Path:
    """Write a small checkpoint of random weights in the layout of a published repo.

    Equal seeds make equal towers in every layout of a family. One shard makes a
    ``model.safetensors`` without an index.

    Args:
        folder: the folder to write to, made if it does not exist.
        family: name of a kind of small checkpoint, a key of :data:`SEEDED`.
        depth: number of blocks of the tower.
        width: width of the tower, a multiple of 32.
        seed: seed of the weights.
        shards: number of files that hold the tower and some tensors of a language model.
        decoy_shards: number of further files, which hold no tensor of the tower.
        dtype: dtype of all tensors.
        prefix: prefix of the names of the tower's tensors; None takes the published one.

    Returns:
        ``folder``.

    Raises:
        ValueError: an unknown family, a prefix that the family's layout does not have, a width that
            is not a multiple of 32, or no shards.
    """
    kinds = _kinds()
    if family not in kinds:
        raise ValueError(f"family {family!r}: must be one of {', '.join(kinds)}")
    seeded = kinds[family]
    if width % HEAD:
        raise ValueError(f"width={width}: must be a multiple of {HEAD}, the size of a head")
    if shards < 1 or decoy_shards < 0:
        raise ValueError(
            f"shards={shards}, decoy_shards={decoy_shards}: at least 1 file must hold the tower"
        )
    tower_prefix = _find_prefix(seeded, prefix)
    # A tower whose names have no prefix is alone in its repo. In the repo of Cosmos3 neither its
    # names nor those of the language model (``around[0]``) have one.
    in_one_model = seeded.model.prefix == seeded.around[0] == ""
    has_no_prefix = not tower_prefix.full and not in_one_model
    if decoy_shards and has_no_prefix:
        raise ValueError(
            f"decoy_shards={decoy_shards}: a tower without a prefix is alone in its repo"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(seeded.family, seeded.model.config, depth, width)
    tower = seeded_tower(seeded.family, config, seed, dtype)
    tensors = _publish(seeded.layout, tower_prefix, tower, width // HEAD)
    if not has_no_prefix:
        tensors = _surround(tensors, tower_prefix, seeded.around, dtype)
    names = list(tensors)
    cuts = pairwise(len(names) * number // shards for number in range(shards + 1))
    files = [{name: tensors[name] for name in names[start:stop]} for start, stop in cuts]
    files += [_decoys(_language_layer(seeded.around[0], 2 + n), dtype) for n in range(decoy_shards)]
    _write_files(folder, files)
    for name, content in {"config": config, **seeded.layout.processor_files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    return folder


def _find_prefix(seeded: Seeded, prefix: str | None) -> Prefix:
    name = seeded.model.prefix if prefix is None else prefix
    for candidate in seeded.layout.prefixes:
        if candidate.full == name:
            return candidate
    names = ", ".join(repr(candidate.full) for candidate in seeded.layout.prefixes)
    raise ValueError(f"prefix={prefix!r}: layout {seeded.layout.name} has {names}")


def small_config(family: Family, published: JsonObject, depth: int, width: int) -> JsonDict:
    """Return a published config with small sizes.

    The tower gets ``depth`` blocks of ``width``, heads of 32 channels, and MLPs whose ratio to the
    width is the published one, rounded; the language model gets a width of 96. Lists of block
    indexes (DeepStack) are spread evenly over the blocks and name at most half of them. The
    family's JSON file says which further fields are sizes. All other fields keep their values.

    Args:
        family: family of the tower.
        published: a whole ``config.json``.
        depth: number of blocks of the tower.
        width: width of the tower, a multiple of 32.

    Returns:
        The small config.
    """
    config: JsonDict = deepcopy(dict(published))
    if "architecture" in config:  # timm names an architecture; model_args override its sizes
        sizes = {"embed_dim": width, "depth": depth, "num_heads": width // HEAD}
        if "out_features" in _section_of(config, "model_args"):
            sizes["out_features"] = TEXT_WIDTH
        return {**config, "model_args": sizes}
    facts = family_facts(family.name)
    section = vision_section(config)[0]
    assert isinstance(section, dict)  # part of the copied config, so a dict
    for part in (_section_of(config, "llm_config"), _section_of(config, "text_config")):
        if part:
            part["hidden_size"] = TEXT_WIDTH
    # PaddleOCR-VL has the sizes of its language model at the top level of the config.
    if section is not config and "hidden_size" in config:
        config["hidden_size"] = TEXT_WIDTH
    for part in _sections(section):
        name = part.get("model_name", part.get("model"))
        part.update(deepcopy(dict(facts.named_sizes.get(str(name), {}))))
    # SAM 3 has the sizes of its tower in a section inside that of the tower and its neck.
    small = _tower_sizes(_section_of(section, "backbone_config") or section, depth, width)
    sections = ("high_res_vision_config", "adapter_config")  # DeepSeek-VL's, and Molmo2's
    for outer in (section, *(_section_of(config, name) for name in sections)):
        for part in _sections(outer):
            _shrink(part, small, depth)
    tower_fields = {name: _times(scale, width) for name, scale in facts.small_widths.items()}
    tower_fields |= dict.fromkeys(facts.text_widths, TEXT_WIDTH)
    tower_fields["insert_layer_id"] = max(depth // 2 - 1, 0)  # MiniCPM-V merges after this block
    for part in _sections(config):
        part.update({name: size for name, size in tower_fields.items() if name in part})
    return config


def _section_of(config: JsonDict, name: str) -> JsonDict:
    """Return the section ``name`` of a config, an empty one if there is none."""
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _sections(config: JsonDict) -> Iterator[JsonDict]:
    """Yield a config or section of it, then every section inside it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _sections(value)


def _tower_sizes(section: JsonObject, depth: int, width: int) -> JsonDict:
    """Return the small sizes of a tower, under the field names in the configs of many families."""
    sizes = {_field(name): value for name, value in section.items() if isinstance(value, int)}
    names = ("embed_dim", "width", "hidden_size")
    width_name = next((name for name in names if name in sizes), "hidden_size")
    ratio = sizes.get("intermediate_size", 0) / sizes.get(width_name, 1)
    grouped = sizes.get("num_key_value_heads") != sizes.get("num_attention_heads")
    is_tower_width = sizes.get("hidden_size") == sizes.get(width_name)
    heads = width // HEAD
    return {
        **dict.fromkeys(("depth", "num_hidden_layers", "layers"), depth),
        **dict.fromkeys(("num_heads", "num_attention_heads", "heads"), heads),
        "head_dim": HEAD,
        # EXAONE has grouped-query attention, with four query heads per key and value head.
        "num_key_value_heads": max(heads // 4, 1) if grouped else heads,
        "intermediate_size": round(ratio) * width,
        "out_hidden_size": TEXT_WIDTH,
        # Qwen2-VL's name for the language model's width; ERNIE's second name for the tower's.
        "hidden_size": width if is_tower_width else TEXT_WIDTH,
        "width": width,
        "embed_dim": width,
        width_name: width,
    }


def _field(name: str) -> str:
    """Return the usual name of a field; in Kimi-K2.5's config, names of sizes begin with "vt_"."""
    return name.removeprefix("vt_")


def _times(scale: float | Sequence[float], width: int) -> int | list[int]:
    """Return the product of a width and a scale, or of the width and each scale of a list."""
    if isinstance(scale, Sequence):
        return [int(width * part) for part in scale]
    return int(width * scale)


def _shrink(section: JsonDict, small: JsonObject, depth: int) -> None:
    """Replace sizes in a section of a config, in place, but not in the sections inside it."""
    for name, value in section.items():
        if isinstance(value, dict):
            continue
        if _field(name) in small:
            section[name] = small[_field(name)]
        elif name == "layer_types" and isinstance(value, list):  # the last block is unlike others
            section[name] = value[-depth:]
        elif name == "vit_layers":  # the last one, and another
            section[name] = [-1, -depth]
        elif name.endswith("_indexes") and isinstance(value, list):
            count = min(len(value), max(depth // 2, 1))
            section[name] = [depth * (number + 1) // count - 1 for number in range(count)]


def seeded_tower(
    family: Family, config: JsonObject, seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Draw random weights of a tower, and of its projector if there is one.

    The values of a tensor depend only on its name and the seed. Linear layers keep the scale of
    their input and norms are near one, so that features of a photograph show its structure.

    Args:
        family: family of the tower.
        config: a whole ``config.json``.
        seed: seed of the weights.
        dtype: dtype of all tensors.

    Returns:
        Tensors by their names in the encoder.
    """
    encoder = family.on_meta(build_config(family, config, None, "seeded"))
    norms = {name for name, module in encoder.named_modules() if "Norm" in type(module).__name__}
    return {
        name: _random_like(name, tensor, name.rsplit(".", 1)[0] in norms, seed).to(dtype)
        for name, tensor in encoder.state_dict().items()
    }


def _random_like(name: str, tensor: Tensor, norm: bool, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(name.encode()) ^ seed)
    noise = torch.randn(tensor.shape, generator=generator)
    if norm and name.endswith("weight"):
        return 1 + 0.05 * noise
    if name.endswith((".ls1", ".ls2", ".ls_1", ".ls_2")):
        return 0.1 + 0.01 * noise
    if name.endswith(("_min", "_max")):  # bounds that clamp a linear layer's inputs and outputs
        return (3 + noise.abs()) * (-1 if name.endswith("_min") else 1)
    if name == "std_scale":
        return 1 + 0.05 * noise
    if tensor.ndim < 2 or "pos" in name or "class" in name:
        return 0.02 * noise
    scale: float = tensor[0].numel() ** -0.5
    return noise * scale


def _publish(
    layout: Layout, prefix: Prefix, tower: Mapping[str, Tensor], heads: int
) -> dict[str, Tensor]:
    """Return the tensors of an encoder under the names and in the shapes of a published layout."""
    published: dict[str, Tensor] = {}
    for encoder_name, tensor in tower.items():
        names = layout.published_names(encoder_name)
        tensor = tensor.view(layout.published_shape(encoder_name, tuple(tensor.shape)))
        # A scalar cannot be split into chunks of rows.
        parts = tensor.chunk(len(names)) if len(names) > 1 else [tensor]
        for name, rows in zip(names, parts, strict=True):
            slot = layout.to_slot(name)
            if slot is not None and slot.rotary_halves:
                rows = in_halves(rows, heads)
            published[layout.full_name(prefix, name)] = rows.contiguous()
    return published


def _surround(
    tower: dict[str, Tensor], prefix: Prefix, around: Sequence[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Add tensors of a language model, full of NaN, before the tower's, among them and after
    them.
    """
    body = [name for name in tower if name.startswith(prefix.full)]
    language, *extra_names = around
    half = len(body) // 2
    return {
        **_decoys([f"{language}embed_tokens.weight"], dtype),
        **{name: tower[name] for name in body[:half]},
        **_decoys(_language_layer(language, 0), dtype),
        **{name: tower[name] for name in body[half:]},
        **_decoys([*_language_layer(language, 1), *extra_names], dtype),
        **{name: tensor for name, tensor in tower.items() if name not in body},
    }


def _language_layer(prefix: str, number: int) -> list[str]:
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm")
    return [f"{prefix}layers.{number}.{part}.weight" for part in parts]


def _decoys(names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    blank = (TEXT_WIDTH, TEXT_WIDTH)
    return {name: torch.full(blank, float("nan"), dtype=dtype) for name in names}


def _write_files(folder: Path, files: list[dict[str, Tensor]]) -> None:
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", {"format": "pt"})
        return
    file_of_tensor: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        file_of_tensor.update(dict.fromkeys(tensors, name))
    total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of_tensor.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
