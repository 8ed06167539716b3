"""A store of features in the form that vLLM's ``ECExampleConnector`` reads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from encoders import Encoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, edited, tiny
from tests.support.accelerated.cases import needs_interpreter, needs_triton
from tests.support.photographs import china, flower
from vitgraph.integrations.vllm import FeatureStore, content_key, multi_modal_data

IMAGE = china().resize((96, 64))
LIMITS = {"min_pixels": 4096, "max_pixels": 16384}


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_a_file_holds_what_vllms_own_tower_would_return(tmp_path: Path, name: str) -> None:
    encoder = tiny(name)
    store = FeatureStore(tmp_path / "new" / "store", encoder, **LIMITS)
    (output,) = encoder.encode([IMAGE], **LIMITS)
    assert store.put("street", output)
    assert names(store.folder) == ["store.json", "street/encoder_cache.safetensors"]
    found = load_file(store.folder / "street" / "encoder_cache.safetensors")
    assert list(found) == ["ec_cache"]
    wanted = multi_modal_data(encoder, [IMAGE], **LIMITS)["image"]["image_embeds"]
    torch.testing.assert_close(found["ec_cache"], wanted, rtol=0, atol=0)
    assert store.get("street").equal(wanted)
    assert "street" in store
    with pytest.raises(KeyError):
        store.get("flower")


@pytest.mark.parametrize(
    "name", ["glm4v", "glm_ocr", "gemma3", "gemma4", "pixtral", "idefics3", "paddleocr_vl"]
)
def test_newer_towers_are_stored_with_all_tokens_of_an_image(tmp_path: Path, name: str) -> None:
    encoder = tiny(name)
    store = FeatureStore(tmp_path, encoder)
    first, second = encoder.encode([IMAGE, flower().resize((128, 120))])
    assert store.put("a", first)
    assert store.put("b", second)
    assert store.get("b").equal(second.pooler_output)
    assert store.settings.width == encoder.out_features


def test_an_item_with_tiles_is_stored_as_one_tensor(tmp_path: Path) -> None:
    row = BY_NAME["lfm2_vl"]
    encoder = row.encoder_class(row.config_class.from_hf(edited(row.config, **row.tiny))).eval()
    store = FeatureStore(tmp_path, encoder)
    with torch.no_grad():
        (output,) = encoder.encode([flower().resize((900, 700))])
    assert store.put("a", output)
    assert store.get("a").equal(output.pooler_output)
    assert len(output.pooler_output) > 4 * 256


def test_a_store_of_gemma_4_keeps_its_limit(tmp_path: Path) -> None:
    encoder = tiny("gemma4")
    FeatureStore(tmp_path, encoder, max_soft_tokens=70)
    with pytest.raises(ValueError, match="max_soft_tokens 70, now it is 140"):
        FeatureStore(tmp_path, encoder, max_soft_tokens=140)


def test_a_store_from_before_gemma_4_is_opened(tmp_path: Path) -> None:
    encoder = tiny("qwen3_vl")
    FeatureStore(tmp_path, encoder)
    about = json.loads((tmp_path / "store.json").read_text())
    del about["max_soft_tokens"]
    (tmp_path / "store.json").write_text(json.dumps(about))
    assert FeatureStore(tmp_path, encoder).settings.max_soft_tokens is None


def test_bfloat16_and_graphed_features_keep_their_bits(tmp_path: Path) -> None:
    encoder = tiny("qwen3_vl", torch.bfloat16)
    store = FeatureStore(tmp_path, GraphedEncoder(encoder, backend="eager"))
    (output,) = encoder.encode([IMAGE])
    store.put(content_key(b"the bytes of a file"), output)
    rows = torch.cat((output.pooler_output, *output.deepstack_features), 1)
    assert store.get(content_key(b"the bytes of a file")).equal(rows)


def test_a_key_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    encoder = tiny("qwen3_vl")
    store = FeatureStore(tmp_path, encoder)
    first, second = encoder.encode([IMAGE, flower().resize((64, 64))])
    assert store.put("a", first)
    before = store.get("a")
    assert not store.put("a", second)
    assert store.get("a").equal(before)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    encoder = tiny("qwen3_vl")
    store = FeatureStore(tmp_path, encoder)
    (output,) = encoder.encode([IMAGE])

    def refuse(*_: object) -> None:
        raise OSError("no space left on the disk")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with monkeypatch.context() as patch:
        patch.setattr("vitgraph.embedding.feature_store.flush", refuse)
        with pytest.raises(OSError, match="no space"):
            store.put("a", output)
    assert names(tmp_path) == ["store.json"]
    assert store.put("a", output)
    assert names(tmp_path) == ["a/encoder_cache.safetensors", "store.json"]


@pytest.mark.parametrize(
    "key", ["", ".hidden", "a/b", "../a", "a b", "ä", "a\n", "x" * 201, "store.json", "00000.csv"]
)
def test_keys_that_cannot_name_a_folder_are_refused(tmp_path: Path, key: str) -> None:
    encoder = tiny("qwen3_vl")
    store = FeatureStore(tmp_path, encoder)
    (output,) = encoder.encode([IMAGE])
    with pytest.raises(ValueError, match="must match"):
        store.put(key, output)
    assert names(tmp_path) == ["store.json"]


def test_keys_of_content_and_of_callers_are_taken(tmp_path: Path) -> None:
    encoder = tiny("qwen3_vl")
    store = FeatureStore(tmp_path, encoder)
    (output,) = encoder.encode([IMAGE])
    for key in (content_key(b""), "-a", "_", "0.jpg", "x" * 200):
        assert store.put(key, output)
        assert key in store


def test_another_checkpoint_dtype_or_limit_is_refused(tmp_path: Path) -> None:
    encoder = tiny("qwen3_vl")
    FeatureStore(tmp_path, encoder, **LIMITS)
    FeatureStore(tmp_path, encoder, **LIMITS)
    with pytest.raises(ValueError, match="holds features of max_pixels 16384, now it is 8192"):
        FeatureStore(tmp_path, encoder, min_pixels=4096, max_pixels=8192)
    with pytest.raises(ValueError, match="holds features of dtype float32, now it is bfloat16"):
        FeatureStore(tmp_path, tiny("qwen3_vl", torch.bfloat16), **LIMITS)
    with pytest.raises(ValueError, match="holds features of commit weights "):
        FeatureStore(tmp_path, tiny("qwen3_vl", calm=0.5), **LIMITS)


def rebuilt(encoder: Any, config: Any = None, preprocessor: Any = None) -> Encoder:
    """Return an encoder over the same weights with another config or preprocessor."""
    other = copy.deepcopy(encoder)
    other.config = config or encoder.config
    other.preprocessor = preprocessor or encoder.preprocessor
    return other


class Sharpened:
    """A preprocessor set by hand, which has settings of its own."""

    def __init__(self, amount: float) -> None:
        self.amount = amount
        self.table = {"weights": torch.arange(3), "names": {"b", "a"}, "step": max}


OTHERS: dict[str, Callable[[Any], Encoder]] = {
    "another mean": lambda encoder: rebuilt(
        encoder, preprocessor=with_file(encoder, {"image_mean": [0.1, 0.2, 0.3]})
    ),
    "another size": lambda encoder: rebuilt(
        encoder,
        preprocessor=with_file(encoder, {"size": {"shortest_edge": 4096, "longest_edge": 8192}}),
    ),
    "another rope_theta": lambda encoder: rebuilt(
        encoder, replace(encoder.config, rope_theta=2 * encoder.config.rope_theta)
    ),
    "a preprocessor set by hand": lambda encoder: rebuilt(encoder, preprocessor=Sharpened(0.5)),
}


def with_file(encoder: Encoder, content: dict[str, object]) -> Any:
    return encoder.preprocessor.with_files({"preprocessor_config": content})


@pytest.mark.parametrize("how", OTHERS)
def test_another_encoder_of_the_same_weights_is_refused(tmp_path: Path, how: str) -> None:
    encoder = tiny("qwen3_vl")
    FeatureStore(tmp_path, encoder)
    other = OTHERS[how](encoder)
    with pytest.raises(ValueError, match=r"holds features of preparation \w+, now it is \w+"):
        FeatureStore(tmp_path, other)
    FeatureStore(tmp_path / "own", other)
    assert FeatureStore(tmp_path / "own", copy.deepcopy(other))


def test_a_preprocessor_set_by_hand_has_its_own_store(tmp_path: Path) -> None:
    encoder = tiny("qwen3_vl")
    FeatureStore(tmp_path, rebuilt(encoder, preprocessor=Sharpened(0.5)))
    FeatureStore(tmp_path, rebuilt(encoder, preprocessor=Sharpened(0.5)))
    with pytest.raises(ValueError, match="holds features of preparation"):
        FeatureStore(tmp_path, rebuilt(encoder, preprocessor=Sharpened(0.25)))


def test_a_store_of_an_earlier_version_takes_no_encoder(tmp_path: Path) -> None:
    """It does not say which preprocessor made its features; they can be read."""
    FeatureStore(tmp_path, tiny("qwen3_vl"))
    about = json.loads((tmp_path / "store.json").read_text())
    for name in ("preparation", "precision", "kernels"):
        del about[name]
    (tmp_path / "store.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="holds features of preparation None"):
        FeatureStore(tmp_path, tiny("qwen3_vl"))
    assert FeatureStore(tmp_path).settings.preparation is None


@needs_triton
@needs_interpreter
def test_features_of_other_kernels_or_precision_are_refused(
    tmp_path: Path, fused_in_interpreter: None
) -> None:
    encoder = tiny("qwen3_vl", torch.bfloat16)
    fast = encoder.accelerated()
    FeatureStore(tmp_path / "plain", encoder)
    FeatureStore(tmp_path / "plain", GraphedEncoder(encoder, backend="eager", kernels="reference"))
    with pytest.raises(ValueError, match="holds features of kernels reference, now it is accel"):
        FeatureStore(tmp_path / "plain", fast)
    FeatureStore(tmp_path / "fast", fast)
    FeatureStore(tmp_path / "fast", GraphedEncoder(encoder, backend="eager"))
    fp8 = GraphedEncoder(encoder, backend="eager", precision="fp8")
    with pytest.raises(ValueError, match="holds features of precision bf16, now it is fp8"):
        FeatureStore(tmp_path / "fast", fp8)


def test_put_refuses_an_output_of_another_dtype_or_width(tmp_path: Path) -> None:
    FeatureStore(tmp_path, tiny("qwen3_vl"))
    store = FeatureStore(tmp_path)
    for other in (tiny("qwen3_vl", torch.bfloat16), tiny("qwen2_5_vl")):
        (output,) = other.encode([IMAGE])
        with pytest.raises(ValueError, match="this store holds float32 of width 144"):
            store.put("a", output)
    short = GraphedEncoder(tiny("qwen3_vl"), backend="eager", outputs=["pooler_output"])
    (partial,) = short.encode([IMAGE])
    with pytest.raises(ValueError, match="leaves out what language models read"):
        store.put("a", partial)


def test_the_commit_of_a_repo_takes_the_place_of_a_digest(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    assert encoder.published is not None
    published = replace(encoder.published, repo_id="owner/name", commit="0" * 40)
    monkeypatch.setattr(encoder, "published", published)
    FeatureStore(tmp_path, encoder)
    about = json.loads((tmp_path / "store.json").read_text())
    assert (about["checkpoint"], about["commit"]) == ("owner/name", "0" * 40)
    monkeypatch.setattr(encoder, "published", replace(published, commit="1" * 40))
    with pytest.raises(ValueError, match="holds features of commit 0000"):
        FeatureStore(tmp_path, encoder)


def test_stores_on_remote_addresses_and_without_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/store: vLLM reads .* local or mounted"):
        FeatureStore("s3://bucket/store", tiny("qwen3_vl"))
    with pytest.raises(ValueError, match=r"has no store.json; pass the encoder"):
        FeatureStore(tmp_path)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(ValueError, match=r"store.json: is damaged"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_vl_hybrid", "were not compared"),
        ("siglip2", "the tower of no language model"),
        ("moonvit", "clips of Kimi-K2.5"),
    ],
)
def test_towers_whose_features_vllm_does_not_take_are_refused(
    tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"takes no \w+, since .*{reason}"):
        FeatureStore(tmp_path, tiny(name))
    with pytest.raises(ValueError, match="the Qwen families and InternVL, not for "):
        multi_modal_data(tiny(name), [IMAGE])
    assert names(tmp_path) == []
