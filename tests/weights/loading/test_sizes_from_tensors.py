"""Sizes that a config does not name are those of the tensors, or the checkpoint is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import BY_FAMILY
from tests.support.hub.checkpoints import LAYOUTS, edit_tensors, read_json
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import SEEDED, write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder

NOT_IN_TENSORS = {
    *("num_heads", "num_key_value_heads", "fullatt_block_indexes", "activation"),
    *("image_size", "projector_norm_eps", "candidate_resolutions"),
    *("ps_version", "dynamic_image_size", "max_dynamic_patch", "use_thumbnail"),
}
"""The fields of many families that no tensor shows: without an entry in the config, they take the
defaults of the published class."""


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, value


@pytest.mark.parametrize("kind", LAYOUTS)
def test_sizes_left_out_of_a_config_are_those_of_the_tensors(tmp_path: Path, kind: str) -> None:
    folder = write_seeded_checkpoint(tmp_path, kind, width=64)
    config, expected = read_json(folder / "config.json"), inspect_checkpoint(folder)
    for path, _ in leaves(config):
        edited: dict[str, Any] = deepcopy(config)
        part = edited
        for name in path[:-1]:
            part = part[name]
        del part[path[-1]]
        (folder / "config.json").write_text(json.dumps(edited))
        try:
            info = inspect_checkpoint(folder)
        except CheckpointError:
            continue
        assert type(info.config) is type(expected.config)
        fields = dict(leaves(asdict(info.config)))
        changed = [name for name, value in leaves(asdict(expected.config)) if fields[name] != value]
        own = BY_FAMILY[SEEDED[kind].family.name].not_in_tensors
        assert {name[-1] for name in changed} <= NOT_IN_TENSORS | {*own}


def leading_axes(kind: str) -> list[str]:
    """Return the tensors whose published shape has a first axis of length 1 more."""
    reshapes = SEEDED[kind].layout.reshapes
    return [name for name, axes in reshapes.items() if "-> one " in axes]


@pytest.mark.parametrize("kind", [*filter(leading_axes, SEEDED)])
def test_a_leading_axis_of_another_length_is_refused(tmp_path: Path, kind: str) -> None:
    (published,) = SEEDED[kind].layout.published_names(leading_axes(kind)[0])
    folder = write_seeded_checkpoint(tmp_path, kind, width=64)

    def double(tensors: dict[str, Tensor]) -> None:
        (name,) = [name for name in tensors if name.endswith(published)]
        assert tensors[name].shape[0] == 1
        tensors[name] = torch.cat([tensors[name]] * 2)

    edit_tensors(folder, double)
    with pytest.raises(CheckpointError, match=rf"{published} is \[2, |num_position_embeddings=2 "):
        load_encoder(folder)


def test_a_subfolder_of_a_repo_has_weights_of_any_name(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    inside = write_seeded_checkpoint(tmp_path / "repo" / "vision", "qwen2_vl", width=64, shards=1)
    (inside / "model.safetensors").rename(inside / "odd name.safetensors")
    hub.push(REPO, tmp_path / "repo")
    for fetch in ("ranges", "shards"):
        encoder = load_encoder(
            REPO, subfolder="vision", cache_dir=cache / fetch, progress=False, fetch=fetch
        )
        expected = load_encoder(inside).state_dict()
        state = encoder.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
