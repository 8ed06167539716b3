"""The encoder for Dynamo under ai-dynamo's own driver: its threads, its batcher, its adapters."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoders import Encoder as Tower
from tests.oracles import BY_NAME, build_pair
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

pytest.importorskip("dynamo")
pytestmark = pytest.mark.engines
SIZES = [(96, 64), (64, 64), (130, 70), (64, 200), (200, 96), (256, 256)]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeded_checkpoint(tmp_path_factory.mktemp("repo"), "qwen3_vl", width=64)


@pytest.fixture(scope="module")
def tower(repo: Path) -> Tower:
    return load_encoder(repo, dtype=torch.float32, progress=False)


@pytest.fixture
def load(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start Dynamo's driver around our encoder."""
    from dynamo.vllm.multimodal_utils.custom_encoder import AsyncVisionEncoder

    from vitgraph.integrations.dynamo import Encoder

    started = []

    def start(model: Path = repo, **options: object) -> Any:
        chosen = {"device": "cpu", "dtype": "float32", "backend": "static", **options}
        for name, value in chosen.items():
            monkeypatch.setenv(f"VITGRAPH_DYNAMO_{name.upper()}", str(value))
        driver = AsyncVisionEncoder(Encoder())
        started.append(driver)
        driver.load(str(model))
        return driver

    yield start
    for driver in started:
        driver.shutdown()


def image(number: int) -> Image.Image:
    coarse = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(SIZES[number % len(SIZES)])


def url(number: int) -> str:
    file = io.BytesIO()
    image(number).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def wanted(tower: Tower, number: int) -> torch.Tensor:
    (output,) = tower.encode([image(number)])
    return torch.cat((output.pooler_output, *output.deepstack_features), 1)


def test_concurrent_requests_get_their_own_images_in_order(
    load: Callable[..., Any], tower: Tower
) -> None:
    driver = load(max_tokens=256)

    async def ask() -> Any:
        return await asyncio.gather(
            *(driver.encode([url(3 * n + k) for k in range(3)]) for n in range(8))
        )

    for request, found in enumerate(asyncio.run(ask())):
        for place, artifact in enumerate(found):
            rows = wanted(tower, 3 * request + place)
            torch.testing.assert_close(artifact.embeddings, rows, rtol=1e-4, atol=1e-4)
            assert artifact.embeddings.device.type == "cpu"
            t, h, w = artifact.grid_thw
            assert t * h * w // 4 == len(rows)


def test_a_bad_image_fails_its_own_request_alone(load: Callable[..., Any], tower: Tower) -> None:
    driver = load(max_tokens=256)
    bad = "data:image/png;base64,AAAA"

    async def ask() -> Any:
        requests = ([url(0)], [url(1), bad], [url(2)])
        return await asyncio.gather(*map(driver.encode, requests), return_exceptions=True)

    first, failed, last = asyncio.run(ask())
    assert isinstance(failed, ValueError)
    assert str(failed) == "the image cannot be decoded: send a JPEG, PNG or WebP file"
    for number, found in ((0, first), (2, last)):
        rows = wanted(tower, number)
        torch.testing.assert_close(found[0].embeddings, rows, rtol=1e-4, atol=1e-4)


def test_shutdown_ends_the_threads_and_releases_the_encoder(load: Callable[..., Any]) -> None:
    before = set(threading.enumerate())
    driver = load(max_tokens=128, threads=2)
    asyncio.run(driver.encode([url(0)]))
    made = [thread for thread in threading.enumerate() if thread.name.startswith("vision-encoder")]
    assert len(made) == 2  # the actor, and one of the pool
    driver.shutdown()
    for thread in set(made) - before:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        asyncio.run(driver.encode([url(0)]))


def test_a_tower_that_no_adapter_takes_fails_the_load(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="only for text-only decoders: set VITGRAPH_DYNAMO_IMAGE"):
        load(write_seeded_checkpoint(tmp_path, "qwen2_5_vl", width=64))


def test_adapters_of_dynamo_take_what_the_encoder_returns(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    from dynamo.vllm.multimodal_utils.custom_encoder import create_custom_encoder_adapter

    driver = load(max_tokens=256)
    found = asyncio.run(driver.encode([url(0), url(1)]))
    native = create_custom_encoder_adapter(driver._backend, decoder("Qwen3VL", True), None)
    prompt = native.prepare_prompt([1, 7, 7, 2], found)
    assert len(prompt["multi_modal_data"]["image"]["image_grid_thw"]) == 2
    repo = write_seeded_checkpoint(tmp_path, "qwen2_5_vl", width=64)
    driver = load(repo, max_tokens=256, image_token_id=7)
    found = asyncio.run(driver.encode([url(0), url(1)]))
    model, settings = decoder("Llama", False, found[0].shape[1]), SimpleNamespace()
    settings.enable_prompt_embeds = True
    linear = create_custom_encoder_adapter(driver._backend, model, settings)
    prompt = linear.prepare_prompt([1, 7, 7, 2], found)
    assert prompt["prompt_embeds"].shape == (2 + len(found[0]) + len(found[1]), found[0].shape[1])


def test_features_reach_a_decoder_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo.vllm.multimodal_utils.custom_encoder import ExternalEncoderHandoff
    from dynamo.vllm.multimodal_utils.custom_encoder.handoff_consumer import (
        ExternalEncoderHandoffConsumer,
    )

    from vitgraph.integrations.dynamo import Encoder

    repo = write_seeded_checkpoint(tmp_path, "qwen2_5_vl", width=64)
    options = {"IMAGE_TOKEN_ID": "7", "DEVICE": "cpu", "DTYPE": "float32", "BACKEND": "eager"}
    for name, value in options.items():
        monkeypatch.setenv(f"VITGRAPH_DYNAMO_{name}", value)
    handoff = ExternalEncoderHandoff(Encoder())
    try:
        handoff.load(str(repo))
        images = {"image_url": [{"Url": url(0)}, {"Url": url(1)}]}
        request = {"token_ids": [1, 7, 7, 2], "multi_modal_data": images}
        sent = asyncio.run(handoff.prepare_request(request, target_model="decoder"))
    finally:
        handoff.shutdown()
    assert "multi_modal_data" not in sent
    encoder = load_encoder(repo, dtype=torch.float32, progress=False)
    wanted = [output.pooler_output for output in encoder.encode([image(0), image(1)])]
    model, settings = decoder("Llama", False, wanted[0].shape[1]), SimpleNamespace()
    settings.enable_prompt_embeds = True
    consumer = ExternalEncoderHandoffConsumer(model, settings)
    prompt = consumer.prepare_prompt(sent["encoder_result"], sent["token_ids"])
    torch.testing.assert_close(
        prompt["prompt_embeds"][1:-1], torch.cat(wanted), rtol=1e-4, atol=1e-4
    )


def decoder(name: str, multimodal: bool, width: int = 0) -> Any:
    """As much of vLLM's ModelConfig as the adapters read."""
    vision = SimpleNamespace(spatial_merge_size=2)
    return SimpleNamespace(
        architectures=[f"{name}ForConditionalGeneration"],
        is_multimodal_model=multimodal,
        hf_config=SimpleNamespace(vision_config=vision),
        get_hidden_size=lambda: width,
        dtype=torch.float32,
    )


def test_the_benchmark_measures_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import dynamo

    for name, value in {"BACKEND": "static", "MAX_TOKENS": "256", "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"VITGRAPH_DYNAMO_{name}", value)
    monkeypatch.setattr(dynamo, "SIZES_MIX8", [(64 + 32 * number, 64) for number in range(8)])
    family = BY_NAME["qwen3_vl"]
    rows = dynamo.measure(*build_pair(family, family.tiny), requests=4, rounds=1)
    assert [(row["requests"], row["concurrency"]) for row in rows] == [
        (kind, clients) for kind in ("whole", "prepared") for clients in (1, 8, 32)
    ]
    for row in rows:
        for name in ("vitgraph", "transformers"):
            assert list(row[name]) == ["requests/s", "p50 ms", "p95 ms", "p99 ms"]
            assert 0 < row[name]["p50 ms"] <= row[name]["p99 ms"]
