"""The form of a folder that holds only a tower, so that no library takes it for a whole model.

``config.json`` describes the tower: its fields stand at the top, with the ``model_type`` and
``architectures`` of the class of transformers that reads the tensors. Without such a class, these
two name the encoder class of this library, which no version of transformers knows, so that
``AutoModel`` refuses the folder. Further facts for ``load_encoder`` stand under one more key::

    "vitgraph": {
      "family": "intern_vit",           # the record by which load_encoder reads the folder
      "type": "internvl_vision",        # the published model type of the tower's part of the config
      "config": {...},                  # the published config without that part, if there was more
      "projector": true                 # whether projector.safetensors belongs to the folder
    }

A projector outside the tower, for which the class of transformers has no place, lies in a file of
its own, so that the class finds exactly its tensors in ``model.safetensors``. timm must find its
configs as they were published, so in those only the key ``vitgraph`` is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CheckpointError, legible
from ..published import family_names
from ..strict_json import JsonDict, JsonObject

if TYPE_CHECKING:  # families import torch, which reading a folder does not need
    from ..families.family import Family, TransformersClass
    from ..layouts import Layout

KEY = "vitgraph"
PROJECTOR = "projector.safetensors"
_SECTIONS = (
    "vision_config",
    "vit_config",
    *(f"{whole}.vision_config" for whole in ("thinker_config", "vlm_config", "detector_config")),
)
"""The keys, joined by dots, under which published configs describe the vision tower; the config of
a tower alone has none of them."""
QUANTISATION = ("quantization_config", "compression_config")
"""The keys under which configs say how weights are quantised; those of a loaded tower are not."""
_REPLACED = (
    *("model_type", "architectures", "dtype", "torch_dtype", "auto_map", KEY),
    *QUANTISATION,
)
_AUTO = """\
`AutoModel` of transformers reads the tower as `{cls}`:

```python
from transformers import AutoModel

tower = AutoModel.from_pretrained("{{name}}")
```
"""
_CLASS = """\
The class `{cls}` of transformers reads the tower (`AutoModel` does not know its model type):

```python
from transformers.models.{module}.modeling_{module} import {cls}

tower = {cls}.from_pretrained("{{name}}")
```
"""
_TIMM = """\
timm reads the tower: `timm.create_model("hf-hub:{name}", pretrained=True)`.
"""
_NONE = """\
No class of transformers reads the tower: `AutoModel` refuses the folder.
"""


@dataclass(frozen=True)
class Described:
    """A published config, and the facts that the config of a tower's folder has beside it."""

    config: JsonObject
    family: str | None = None
    """The name of the family; None unless it is the folder of a tower."""
    projector: bool = False


def vision_section(config: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
    """Return the tower's part of a config, and the JSON objects around that part, innermost first.

    The list of objects is empty for the config of an extracted tower.
    """
    for path in _SECTIONS:
        parents: list[JsonObject] = [config]
        for name in path.split("."):
            inner = parents[0].get(name)
            if not isinstance(inner, Mapping):
                break
            parents.insert(0, inner)
        else:
            return parents[0], parents[1:]
    return config, []


def parse_description(config: JsonObject, label: str) -> Described:
    """Return the published config that the config of a tower's folder was made from.

    Any other config is returned unchanged. A CheckpointError, which names the checkpoint by
    ``label``, says that the notes under ``vitgraph`` name no known family.
    """
    note = config.get(KEY)
    if note is None:
        return Described(config)
    notes: JsonObject = note if isinstance(note, Mapping) else {}
    family, outer_config = notes.get("family"), notes.get("config")
    if family not in family_names() or not isinstance(outer_config, Mapping | None):
        raise CheckpointError(
            f"{label}: config.json: {KEY}={legible(str(note))}: must name one of the families "
            f"{', '.join(family_names())}: use the config.json that was saved with the tower"
        )
    section = {name: value for name, value in config.items() if name not in ("model_type", KEY)}
    if notes.get("type") is not None:
        section["model_type"] = notes["type"]
    published = section if outer_config is None else {**outer_config, "vision_config": section}
    return Described(published, str(family), notes.get("projector") is True)


def describe(
    config: JsonObject, family: Family, layout: Layout, dtype: str, *, projector: bool
) -> JsonDict:
    """Return the ``config.json`` of a tower's folder.

    Args:
        config: the published config.
        family: the record that the tower was loaded by.
        layout: the layout of its tensors.
        dtype: the dtype of the tensors, such as ``"bfloat16"``, to which transformers casts them.
        projector: whether the folder has :data:`PROJECTOR`.
    """
    section, parents = vision_section(config)
    note: JsonDict = {"family": family.name}
    if "architecture" in config:  # a config of timm
        return {**config, KEY: note}
    if section.get("model_type") is not None:
        # The name is not "model_type": transformers would read the section as the tower's config.
        note["type"] = section["model_type"]
    if parents:
        note["config"] = _without_section(config)
    if projector:
        note["projector"] = True
    reader = transformers_class(config, family, layout)
    also = reader.fields if reader else {}
    around = {**(parents[-1] if parents else {}), **section}
    return {
        "model_type": reader.model_type if reader else f"{KEY}_{family.name}",
        "architectures": [reader.name if reader else family.encoder.__name__],
        "dtype": dtype,
        **{name: value for name, value in section.items() if name not in _REPLACED},
        **{also[name]: value for name, value in around.items() if name in also},
        **(reader.make_fields(section) if reader else {}),
        KEY: note,
    }


def _without_section(config: JsonObject) -> JsonDict:
    """Return a config without the section of the vision tower, wherever that section lies."""
    section = vision_section(config)[0]
    return {
        name: _without_section(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value is not section
    }


def transformers_class(
    config: JsonObject, family: Family, layout: Layout
) -> TransformersClass | None:
    """Return the class of transformers that reads a tower with a layout's tensor names, or None.

    Where several classes of the ``family`` read the layout, the model types of the published
    ``config`` decide.
    """
    usual = family.classes.get(layout.name)
    if usual is None:
        return None
    section, parents = vision_section(config)
    kinds = [str(part.get("model_type")).removesuffix("_vision") for part in (section, *parents)]
    reader = next((family.classes[kind] for kind in kinds if kind in family.classes), usual)
    return reader if reader.reads(section) else None


def usage(config: JsonObject, family: Family, layout: Layout) -> str:
    """Return the text of a model card that says how transformers or timm read the tower's folder.

    The text has ``{name}`` in place of the repo id. The arguments are the published config, and the
    family's record and the layout with which the tower was loaded.
    """
    reader = transformers_class(config, family, layout)
    if reader is not None:
        return (_AUTO if reader.auto else _CLASS).format(cls=reader.name, module=reader.module)
    return _TIMM if config.get("architecture", "open_clip") != "open_clip" else _NONE
