"""Writing an encoder as the checkpoint that it was loaded from, to a folder or to the Hub.

The files are like those that ``extract_encoder`` writes: the config files of the checkpoint
and its tensors, under the names that they have there without the prefix of the tower.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from torch import Tensor

from ..stored_tensors import STORED_DTYPES, in_halves

LONGEST_PART = 255
"""The most bytes that file systems allow in the name of one file or folder."""
CONFIGS = ("config", "processor_config", "preprocessor_config", "video_preprocessor_config")
"""The names, without ``.json``, that config files of a saved tower may have."""
OWNED = (
    *(f"{name}.json" for name in CONFIGS),
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "projector.safetensors",
)
"""Patterns of the files that belong to a saved tower. Saving removes those that it does not write,
because the next load would follow a processor file of an earlier save."""
ADAPTER_CONFIG = "adapter_config.json"
CARD = """
# {title}

The vision tower of {base}, as vitgraph saved it:
{parameters:,} parameters in {dtype}.

```python
import vitgraph

encoder = vitgraph.load_encoder("{name}")
features = encoder.encode(images=["photo.jpg"])
```

{usage}"""


@dataclass(frozen=True)
class Publication:
    """The names, shapes and config files of the checkpoint that an encoder was loaded from."""

    files: Mapping[str, Mapping[str, object]]
    """``config`` and the processor files: name without ``.json`` -> content."""
    names: Mapping[str, Sequence[str]]
    """Name in ``state_dict`` -> names of the checkpoint's tensors that it concatenates by rows."""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name in ``state_dict`` -> shape in the checkpoint, for tensors that loading has reshaped."""
    transposed: Sequence[str] = ()
    """Names in ``state_dict`` of matrices whose rows and columns the checkpoint exchanges."""
    rotary_halves: Mapping[str, int] = field(default_factory=dict)
    """Name of a tensor of queries or keys in the checkpoint -> number of heads, for those tensors
    whose rows are stored in the order of :func:`in_halves`."""
    projector_file: tuple[str, Sequence[str]] = ("", ())
    """The name of a second file of weights, and the names of the tensors that the checkpoint stores
    there instead of in ``model.safetensors``; empty without such a file."""
    usage: str = ""
    """The sentences of the model card about other libraries; ``{name}`` stands for the repo."""
    repo_id: str | None = None
    """The repo on the Hub; None for a folder."""
    commit: str | None = None
    """The commit of the repo from which all files were read; None for a folder."""


class SavedEncoder(Protocol):
    """An encoder that can be saved: its tensors, and how its checkpoint names and stores them."""

    @property
    def published(self) -> Publication | None: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


def save_encoder(encoder: SavedEncoder, save_directory: str | os.PathLike[str]) -> Path:
    """Write the checkpoint of an encoder; see :meth:`encoders.Encoder.save_pretrained`."""
    folder = _checked_folder(save_directory)
    _save(encoder, folder, folder.name)
    return folder


def push_encoder(
    encoder: SavedEncoder,
    repo_id: str,
    commit_message: str,
    private: bool | None,
    token: str | bool | None,
    branch: str | None,
    create_pr: bool,
) -> str:
    """Upload the checkpoint of an encoder and return the commit's address.

    :meth:`encoders.Encoder.push_to_hub` describes the arguments.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with TemporaryDirectory() as folder:
        _save(encoder, Path(folder), repo_id)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if api.file_exists(repo_id, ADAPTER_CONFIG, revision=branch):
            raise ValueError(
                f"{repo_id} has {ADAPTER_CONFIG}: the next load would merge that adapter into this "
                "tower: remove the adapter's files from the repo, or push to another one"
            )
        has_card = api.file_exists(repo_id, "README.md", revision=branch)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=Path(folder),
            commit_message=commit_message,
            revision=branch,
            create_pr=create_pr,
            delete_patterns=list(OWNED),
            ignore_patterns=["README.md"] if has_card else None,
        )
    return str(commit.commit_url)


def _save(encoder: SavedEncoder, folder: Path, name: str) -> None:
    """Write the configs, the weights and a model card, whose example loads ``name``."""
    published = _require_published(encoder.published)
    tensors = _published_tensors(encoder.state_dict(), published)
    dtype = _only_dtype(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_weights(folder, tensors)
    file, names = published.projector_file
    _write_tensors({name: tensors[name] for name in tensors if name not in names}, folder)
    _write_beside({name: tensors[name] for name in names}, folder / file)
    files = {**published.files, "config": _with_dtype(published.files["config"], dtype)}
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")
    for file in CONFIGS:
        if file not in files:
            (folder / f"{file}.json").unlink(missing_ok=True)
    if not (folder / "README.md").exists():
        card = CARD.format(
            title=type(encoder).__name__,
            base=published.repo_id or "a local checkpoint",
            parameters=sum(tensor.numel() for tensor in tensors.values()),
            dtype=str(dtype).removeprefix("torch."),
            name=name,
            usage=published.usage.format(name=name),
        )
        _write_card(folder / "README.md", card, published.repo_id)


def _checked_folder(save_directory: str | os.PathLike[str]) -> Path:
    """Return the path of the folder to write, with the home folder in place of ``~``.

    Raises:
        ValueError: the path is empty or a file, or a part of it has more than ``LONGEST_PART``
            bytes.
    """
    if not os.fspath(save_directory):
        raise ValueError("save_directory='': pass a folder ('.' is the current one)")
    folder = Path(save_directory).expanduser()
    if long := [part for part in folder.parts if len(os.fsencode(part)) > LONGEST_PART]:
        raise ValueError(
            f"save_directory={str(folder)[:80]!r}...: has a name of {len(os.fsencode(long[0]))} "
            f"bytes, and no file system allows more than {LONGEST_PART}; pass a shorter name"
        )
    if folder.is_file():
        raise ValueError(f"save_directory={str(folder)!r}: is a file; pass a folder")
    return folder


def _require_published(published: Publication | None) -> Publication:
    if published is None:
        raise ValueError(
            "this encoder was not loaded from a checkpoint, so nothing says what its config.json "
            "holds: save its state_dict(), or load the same tower with load_encoder and give this "
            "one its publication: encoder.published = loaded.published"
        )
    return published


def _published_tensors(state: Mapping[str, Tensor], published: Publication) -> dict[str, Tensor]:
    """Return tensors by their names in the checkpoint, on the CPU, each with its own memory."""
    extra = [name for name in state if name not in published.names]
    missing = [name for name in published.names if name not in state]
    if extra or missing:
        raise ValueError(
            f"state_dict() is not that of the tower that was loaded: {len(extra)} tensors more "
            f"({', '.join(extra[:3])}), {len(missing)} missing ({', '.join(missing[:3])}); merge "
            "adapters (merge_and_unload) and remove parametrizations before saving"
        )
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        parts = published.names[name]
        tensor = tensor.T if name in published.transposed else tensor
        tensor = tensor.reshape(tuple(published.shapes.get(name, tensor.shape)))
        chunks = tensor.chunk(len(parts)) if len(parts) > 1 else [tensor]  # 0-dim: no rows to chunk
        for part, rows in zip(parts, chunks, strict=True):
            if part in published.rotary_halves:
                rows = in_halves(rows, published.rotary_halves[part])
            tensors[part] = _with_own_storage(rows.cpu(), storages)
    return tensors


def _with_own_storage(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return ``tensor``, or a copy if it shares its storage or fills only a part of it.

    Of several tensors in one storage, safetensors' writer would keep only one. Tied parameters
    share a storage, and all do after ``torch.nn.utils.vector_to_parameters``. The address of the
    storage is added to ``storages``, which are in use.
    """
    storage = tensor.untyped_storage()
    fills_storage = storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
    if fills_storage and storage.data_ptr() not in storages:
        storages.add(storage.data_ptr())
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _only_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= {*STORED_DTYPES.values()}:
        saved = ", ".join(map(str, STORED_DTYPES.values()))
        raise ValueError(
            f"the tensors are of dtype {', '.join(sorted(map(str, dtypes)))}: a tower is saved in "
            f"one of {saved}; cast it first, e.g. encoder.float()"
        )
    return dtypes.pop()


def _refuse_other_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if ``folder`` has weights of other names than ``tensors``.

    Such a folder holds another model or a whole one, which saving a tower would damage.
    """
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            other_names = [name for name in stored.keys() if name not in tensors]  # noqa: SIM118
        if other_names:
            raise ValueError(
                f"{folder} holds other weights ({file.name} has {other_names[0]}), which saving "
                "would mix with this tower or replace: pass another folder"
            )


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, folder)


def _write_beside(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    if tensors:
        save_file(tensors, file, {"format": "pt"})


def _with_dtype(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return a copy of ``config`` that names ``dtype`` as the dtype that transformers casts to."""
    name = str(dtype).removeprefix("torch.")
    return {**config, **{key: name for key in ("dtype", "torch_dtype") if key in config}}


def _write_card(file: Path, text: str, base_model: str | None) -> None:
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        library_name="vitgraph",
        pipeline_tag="image-feature-extraction",
        base_model=base_model,
        tags=["vision", "feature-extraction"],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(file)
