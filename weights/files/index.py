"""The config of a checkpoint, and its index: which tensor lies in which file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..errors import AbsentError, CheckpointError, legible
from ..strict_json import JsonDict, JsonObject
from .adapter_file import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    KEPT,
    AdapterFile,
    adapter_error,
    adapter_names,
    read_adapter_file,
)
from .checkpoint import Checkpoint, check_name
from .tensor_file import Header
from .tower_folder import PROJECTOR, parse_description

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OPEN_CLIP = "open_clip_config.json"
PROCESSOR_FILES = ("processor_config", "preprocessor_config", "video_preprocessor_config")
"""The names, without ``.json``, of files in which a repo may say how images are prepared."""

_WRAPPERS = {
    "base_model.model.": "merge the adapter (merge_and_unload of peft) and save the model",
    "_orig_mod.": "strip `_orig_mod.`, which torch.compile adds, from the names",
    "module.": "strip `module.`, which data-parallel wrappers add, from the names",
}
"""The prefix that a wrapper gives all names -> how to save the model without it."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Contents:
    """The parts of a checkpoint that are read first: its config, and the file of each tensor."""

    checkpoint: Checkpoint
    config: JsonObject
    """The published config, without the notes that an extracted tower adds to it."""
    files: Mapping[str, str]
    family: str | None = None
    """The name of the family, if the folder of an extracted tower states it, else None."""
    adapter: AdapterFile | None = None
    """The adapter beside the weights, None without one."""

    def small_files(self) -> dict[str, bytes]:
        """Return the config, processor and adapter files, which are cached beside a tower."""
        names = [f"{name}.json" for name in ("config", *PROCESSOR_FILES)]
        if self.config.get("architecture") == "open_clip":
            names.append(OPEN_CLIP)
        return self.checkpoint.contents([*names, ADAPTER_CONFIG] if self.adapter else names)

    def headers(self, files: Collection[str]) -> dict[str, Header]:
        """Return the headers of the safetensors ``files``, by name, in as few requests as possible.

        The length of a header is estimated: a tensor takes its name and some 85 characters.
        A file that is not there raises a CheckpointError.
        """
        guesses = dict.fromkeys(sorted(files), 256)
        for name, file in self.files.items():
            if file in guesses:
                guesses[file] += len(name) + 88
        try:
            return self.checkpoint.headers(guesses)
        except AbsentError as error:
            missing = f"{error}, which its index names: download the rest of the checkpoint"
            raise CheckpointError(missing) from error


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Read a checkpoint's config, and its index or, if it is one file, the file's header."""
    config = checkpoint.read_json("config.json")
    if config is None:
        config = _other_config(checkpoint)
    description = parse_description(config, checkpoint.label)
    all_files = _tensor_files(checkpoint)
    files = {name: file for name, file in all_files.items() if not name.startswith(KEPT)}
    if description.projector and (checkpoint.weights is None or checkpoint.has(PROJECTOR)):
        files = {**files, **_projector_files(checkpoint)}
    adapter = adapter_names(files)
    if adapter and len(adapter) == len(files):
        raise adapter_error(checkpoint.label)
    _refuse_wrapped(files, checkpoint.label)
    adapter_file = read_adapter_file(checkpoint)
    return Contents(checkpoint, description.config, files, description.family, adapter_file)


def _refuse_wrapped(files: Collection[str], label: str) -> None:
    """Raise a :class:`CheckpointError` if all names begin with the prefix of a known wrapper."""
    for prefix, advice in _WRAPPERS.items():
        if files and all(name.startswith(prefix) for name in files):
            raise CheckpointError(
                f"{label}: all {len(files)} names begin with {prefix!r}, as a wrapped model's do: "
                f"{advice}"
            )


def _projector_files(checkpoint: Checkpoint) -> dict[str, str]:
    try:
        header = checkpoint.headers({PROJECTOR: 0})[PROJECTOR]
    except AbsentError as error:
        raise CheckpointError(
            f"{error}, which its config.json names: copy it from the folder that the tower was "
            "saved or extracted to"
        ) from error
    return dict.fromkeys(header.tensors, PROJECTOR)


def _tensor_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the name of the file that holds each tensor, by the name of the tensor.

    The names come from the index or, if the weights are a single file, from its header.
    """
    name = INDEX
    index = None if checkpoint.weights else checkpoint.read_json(INDEX)
    if index is None:
        single = checkpoint.weights or (SINGLE if checkpoint.has(SINGLE) else None)
        name = single or _only_safetensors(checkpoint)
        if not name.endswith(".index.json"):
            return dict.fromkeys(checkpoint.headers({name: 0})[name].tensors, name)
        index = checkpoint.read_json(name) or {}
    label = f"{checkpoint.label}: {name}"
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{label}: needs a weight_map of tensor names to file names")
    for file in sorted(set(files.values())):
        if not check_name(file, label).endswith(".safetensors"):
            raise CheckpointError(
                f"{label}: names {legible(file)!r}, which is not a .safetensors file"
            )
    _refuse_second_weights(checkpoint, name, set(files.values()))
    return files


def _refuse_second_weights(checkpoint: Checkpoint, index: str, shards: set[str]) -> None:
    """Raise a :class:`CheckpointError` if a single file of all weights lies beside ``index``.

    An example is ``model.safetensors`` beside ``model.safetensors.index.json``; the file is allowed
    if it is one of the ``shards`` that the index names. The two may hold different weights, and
    nobody can tell which are meant: transformers reads the single file.
    """
    single = index.removesuffix(".index.json")
    if single not in shards and checkpoint.has(single):
        shard_names = ", ".join(sorted(shards)[:3]) + (" and more" if len(shards) > 3 else "")
        raise CheckpointError(
            f"{checkpoint.label}: holds weights twice: {single}, and {index} with the shards "
            f"{shard_names}; which of them is meant is not guessed at: remove those that are not, "
            "or load a file by its path"
        )


def _only_safetensors(checkpoint: Checkpoint) -> str:
    """Return the name of the only index, else of the only safetensors file, of a checkpoint.

    This is for checkpoints without ``model.safetensors`` and its index. Several such files raise a
    CheckpointError, because nothing says which of them holds the tower.
    """
    names = _safetensors(checkpoint)
    for ending in (".safetensors.index.json", ".safetensors"):
        here = [name for name in names if name.endswith(ending) and "/" not in name]
        matching = [name for name in here if name != ADAPTER_FILE] or here
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise CheckpointError(
                f"{checkpoint.label}: {len(matching)} files end in {ending} "
                f"({', '.join(matching[:6])}), and no {INDEX} says which holds what: pass the one "
                "file that holds the tower"
            )
    raise _without_safetensors(checkpoint.label, names)


def _safetensors(checkpoint: Checkpoint) -> list[str]:
    """Return the names of a checkpoint's safetensors files and indexes.

    A CheckpointError is raised if there are none; it says so if there are pickle files instead.
    """
    names = checkpoint.names()
    endings = (".safetensors", ".safetensors.index.json")
    if weight_files := [name for name in names if name.endswith(endings)]:
        return weight_files
    raise _without_safetensors(checkpoint.label, names)


def _without_safetensors(label: str, names: list[str]) -> CheckpointError:
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return CheckpointError(
            f"{label}: only pickle weights ({', '.join(pickles[:3])}); they can run code and are "
            "never opened: use a repo with safetensors, or convert it (save_pretrained writes them)"
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return CheckpointError(
            f"{label}: only GGUF weights ({', '.join(map(legible, ggufs[:3]))}), which are not "
            "read: use the original repo with safetensors"
        )
    return CheckpointError(
        f"{label}: no safetensors files ({', '.join(names[:8]) or 'no file at all'}): pass "
        "the repo or folder that holds config.json and the weights, or its subfolder"
    )


def _other_config(checkpoint: Checkpoint) -> JsonDict:
    """Return the config of a checkpoint of open_clip, in the form of timm's configs.

    Raises:
        CheckpointError: the checkpoint has no config at all.
    """
    adapter = checkpoint.read_json("adapter_config.json")
    if adapter is not None:
        raise adapter_error(checkpoint.label, adapter.get("base_model_name_or_path"))
    _safetensors(checkpoint)
    published = checkpoint.read_json(OPEN_CLIP) if OPEN_CLIP in checkpoint.names() else None
    if published is not None:
        return {**published, "architecture": "open_clip", "model_args": published.get("model_cfg")}
    raise CheckpointError(
        f"{checkpoint.label}: no config.json beside the weights: the tower's sizes are in it; put "
        "the one of the original repo there"
    )
