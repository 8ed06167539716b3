"""``vitgraph.embed_texts``: the text half alone, and scores as transformers gives them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoModel

import vitgraph
from tests.oracles import distance
from tests.support.hub.checkpoints import edit_config, edit_tensors
from tests.support.hub.client import REPO
from tests.support.hub.server import TOKEN, HubServer
from tests.support.hub.two_towers import KINDS, token_ids, write_two_towers
from tests.support.photographs import china, flower
from vitgraph.cli import main
from weights import CheckpointError, load_encoder

PHOTOS = [china().crop((0, 0, 90, 90)), flower().resize((64, 64))]
TEXTS = ["a red car", "Blue sky, SEA dog", "", "cat " * 40]
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Writes the whole model of a kind once; no test changes it."""
    parent = tmp_path_factory.mktemp("models")

    def write(kind: str) -> Path:
        folder = parent / kind
        return folder if folder.exists() else write_two_towers(folder, kind)

    return write


def pixels_of(encoder: Any) -> dict[str, Any]:
    """The photographs as transformers' model takes them."""
    inputs = encoder.preprocess(PHOTOS)
    if inputs.pixel_values.ndim == 4:
        return {"pixel_values": inputs.pixel_values}
    rows = inputs.pixel_values.view(len(PHOTOS), -1, inputs.pixel_values.shape[1])
    mask = torch.ones(rows.shape[:2], dtype=torch.int64)
    return {
        "pixel_values": rows,
        "pixel_attention_mask": mask,
        "spatial_shapes": inputs.grid_thw[:, 1:],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(model: Models, kind: str) -> None:
    folder = model(kind)
    encoder, whole = load_encoder(folder, progress=False), AutoModel.from_pretrained(folder).eval()
    pixels, tokens = pixels_of(encoder), token_ids(folder, kind, TEXTS)
    with torch.no_grad():
        logits = whole(**pixels, **tokens).logits_per_image
        cosines = (logits - getattr(whole, "logit_bias", 0)) / whole.logit_scale.exp()
        images, texts = whole.get_image_features(**pixels), whole.get_text_features(**tokens)
    heads, vectors = encoder.embed(PHOTOS, pool="head"), vitgraph.embed_texts(folder, TEXTS)
    assert distance(heads, getattr(images, "pooler_output", images)) <= 1e-5
    assert distance(vectors, getattr(texts, "pooler_output", texts)) <= 1e-5
    ours = F.normalize(heads) @ F.normalize(vectors).T
    assert (ours - cosines).abs().max() <= 1e-5
    length_1 = vitgraph.embed_texts(repo=folder, texts=TEXTS, normalize=True, batch_size=1)
    torch.testing.assert_close(length_1, F.normalize(vectors))
    assert vitgraph.embed_texts(folder, []).shape == (0, vectors.shape[1])


@pytest.mark.parametrize("kind", ["clip", "siglip2"])
def test_the_text_half_comes_alone_from_a_repo(
    model: Models, kind: str, hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.push(REPO, model(kind), private=True)
    source: dict[str, Any] = {"cache_dir": cache, "progress": False}
    found = vitgraph.embed_texts(REPO, TEXTS, token=TOKEN, **source)
    torch.testing.assert_close(found, vitgraph.embed_texts(model(kind), TEXTS))
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())
    (kept,) = cache.rglob("*-text/tower/model.safetensors")
    with safe_open(kept, "pt") as file:
        assert all(name.startswith("text_") for name in file.keys())  # noqa: SIM118
    hub.requests.clear()
    offline = {**source, "local_files_only": True}
    assert torch.equal(vitgraph.embed_texts(REPO, TEXTS, **offline), found)
    assert torch.equal(vitgraph.embed_texts(REPO, TEXTS, revision=commit, **source), found)
    assert hub.requests == []
    load_encoder(REPO, token=TOKEN, **source)
    assert main(["cache", "list", "--cache-dir", str(cache), "--json"]) == 0
    parts = {row["part"] for row in json.loads(capsys.readouterr().out)}
    assert parts == {"text half", "vision tower"}


def test_a_damaged_text_half_is_fetched_again(model: Models, hub: HubServer, cache: Path) -> None:
    hub.push(REPO, model("clip"))
    first = vitgraph.embed_texts(REPO, TEXTS, cache_dir=cache, progress=False)
    (kept,) = cache.rglob("*-text/tower/model.safetensors")
    with kept.open("r+b") as file:
        file.seek(-64, 2)
        file.write(bytes(64))
    assert torch.equal(vitgraph.embed_texts(REPO, TEXTS, cache_dir=cache, progress=False), first)


def test_half_precision_shards_and_old_buffers_are_read(model: Models, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("clip"), tmp_path / "clip"))
    wanted = vitgraph.embed_texts(folder, TEXTS)

    def edit(tensors: dict[str, Any]) -> None:
        tensors.update({name: value.bfloat16() for name, value in tensors.items()})
        tensors["text_model.embeddings.position_ids"] = torch.arange(16)[None]

    edit_tensors(folder, edit)
    found = vitgraph.embed_texts(folder, TEXTS)
    assert found.dtype == torch.float32
    assert 0 < distance(found, wanted) < 0.05


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("text_projection.weight"), "does not fit its config.*text_projection"),
        (lambda t: t.update({"text_model.odd": torch.zeros(2)}), "does not fit its config.*odd"),
        (lambda t: [t.pop(name) for name in [*t] if name.startswith("text_")], "no text half"),
        (lambda t: t["text_projection.weight"].fill_(torch.nan), "not finite"),
    ],
)
def test_a_text_half_that_does_not_fit_is_refused(
    model: Models, tmp_path: Path, edit: Callable[[Any], object], message: str
) -> None:
    folder = Path(shutil.copytree(model("clip"), tmp_path / "clip"))
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=rf"(?s){message}"):
        vitgraph.embed_texts(folder, TEXTS)


def test_another_model_says_which_repos_take_words(model: Models, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("clip"), tmp_path / "clip"))
    edit_config(folder, lambda config: config.update(model_type="dinov2"))
    with pytest.raises(
        CheckpointError, match=r"no text half \(model_type 'dinov2'\), .*openai/clip"
    ):
        vitgraph.embed_texts(folder, TEXTS)


def test_without_transformers_the_extra_is_named(
    model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="need the extra `text`: pip install 'transformers>="):
        vitgraph.embed_texts(model("clip"), TEXTS)


def test_mistakes_in_the_arguments_are_named(model: Models, tmp_path: Path) -> None:
    for texts in ("a red car", [b"bytes"]):
        with pytest.raises(TypeError, match=r"must be a list of strings, such as \['a red car'\]"):
            vitgraph.embed_texts(model("clip"), texts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size=0: must be an integer of at least 1"):
        vitgraph.embed_texts(model("clip"), TEXTS, batch_size=0)
    folder = Path(shutil.copytree(model("clip"), tmp_path / "clip"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer beside the weights"):
        vitgraph.embed_texts(folder, TEXTS)
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="cannot read its tokenizer"):
        vitgraph.embed_texts(folder, TEXTS)
