"""The encoder for Dynamo against the contract of its driver, without ai-dynamo."""

from __future__ import annotations

import base64
import io
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from encoders import Encoder
from tests.oracles import tiny
from tests.support.fakes.dynamo import import_integration
from tests.support.hub.tls_server import TlsServer, make_certificate
from tests.support.photographs import china, flower
from tests.support.towers import step3_paths

SIZES = [(96, 64), (64, 64), (130, 70), (64, 200)]
Make = Callable[..., Any]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return import_integration(monkeypatch)


@pytest.fixture
def built(module: Any, monkeypatch: pytest.MonkeyPatch, repo: Path) -> Make:
    """Make and build an encoder with options, on a checkpoint or around a tower that is given."""

    def make(tower: Encoder | None = None, **options: object) -> Any:
        chosen = {"device": "cpu", "dtype": "float32", "backend": "eager", **options}
        for name, value in chosen.items():
            monkeypatch.setenv(f"VITGRAPH_DYNAMO_{name.upper()}", str(value))
        encoder = module.Encoder()
        if tower is not None:
            monkeypatch.setattr(encoder, "load_tower", lambda checkpoint: tower)
        encoder.build(str(repo))
        return encoder

    return make


def url(image: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def photographs() -> list[Image.Image]:
    return [china().resize(size) for size in SIZES]


def test_a_batch_gives_the_features_of_encode_in_order(built: Make, encoder: Encoder) -> None:
    backend = built(backend="static", max_tokens=128)
    made = [backend.preprocess(url(image)) for image in photographs()]
    found = backend.forward_batch([one.item for one in made], None)
    for image, one, artifact in zip(photographs(), made, found, strict=True):
        (wanted,) = encoder.encode([image])
        rows = torch.cat((wanted.pooler_output, *wanted.deepstack_features), 1)
        torch.testing.assert_close(artifact.embeddings, rows, rtol=1e-5, atol=1e-5)
        assert artifact.grid_thw == tuple(encoder.preprocess([image]).grid_thw[0].tolist())
        assert one.cost == len(rows)
    assert backend.buckets[-1] == 128
    assert backend.max_batch_cost == 128


def test_threads_may_prepare_images_at_once(built: Make) -> None:
    backend = built(threads=3)
    assert backend.preprocess_concurrency == 3
    urls = [url(image) for image in photographs()] * 4
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(backend.preprocess, urls))
    for one, again in zip(made, map(backend.preprocess, urls), strict=True):
        assert one.item.paths["image"].pixels.equal(again.item.paths["image"].pixels)
        assert one.cost == again.cost


@pytest.mark.parametrize(
    "name",
    [
        *("intern_vit_300m", "qwen2_5_vl", "step3_vl", "gemma3", "gemma4", "pixtral", "idefics3"),
        *("moonvit", "paddleocr_vl", "llama4", "minimax_m3", "ernie4_5_vl"),
    ],
)
def test_text_only_decoders_get_one_tensor_per_image(built: Make, name: str) -> None:
    tower = step3_paths.shared(name) if name == "step3_vl" else tiny(name)
    backend = built(tower, image_token_id=7)
    assert backend.image_token_id == 7
    made = [backend.preprocess(url(image)) for image in photographs()[:2]]
    found = backend.forward_batch([one.item for one in made])
    for image, tokens in zip(photographs(), found, strict=False):
        (wanted,) = tower.encode([image])
        torch.testing.assert_close(tokens, wanted.pooler_output, rtol=1e-5, atol=1e-5)


def test_towers_that_no_adapter_takes_are_refused(built: Make) -> None:
    with pytest.raises(ValueError, match="only for text-only decoders: set VITGRAPH_DYNAMO_IMAGE"):
        built(tiny("qwen2_5_vl"))
    with pytest.raises(ValueError, match="no place for DeepStack"):
        built(tiny("qwen3_vl"), image_token_id=7)


def test_environment_sets_the_options_and_unknown_ones_are_refused(module: Any) -> None:
    given = {"VITGRAPH_DYNAMO_MAX_PIXELS": "65536", "VITGRAPH_DYNAMO_DTYPE": "bfloat16"}
    options = module.read_options({**given, "HOME": "/"})
    assert options == module.Options(max_pixels=65536, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"VITGRAPH_DYNAMO_MAXPIXELS: is not known; known are .*"):
        module.read_options({"VITGRAPH_DYNAMO_MAXPIXELS": "1"})
    for wrong in ("0", "-1", "1e6", ""):
        with pytest.raises(ValueError, match="must be a positive whole number"):
            module.read_options({"VITGRAPH_DYNAMO_THREADS": wrong})


def test_pixels_are_limited_by_the_options(built: Make) -> None:
    backend = built(min_pixels=4096, max_pixels=16384)
    assert backend.preprocess(url(flower())).cost <= 16


@pytest.mark.parametrize(
    "bad",
    [
        "data:image/png;base64,AAAA",
        "data:image/png;base64,A",
        "data:image/png,AAAA",
        "file:///etc/hostname",
        "/etc/hostname",
        "http://photos.test/a.png",
        "https://127.0.0.1/a.png",
        url(Image.new("RGB", (4, 1000))),
        url(Image.new("RGB", (2048, 2048))),
    ],
)
def test_a_bad_image_is_refused_in_words_for_clients(
    built: Make, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    backend = built(max_tokens=64)
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=r"^the image ") as error:
        backend.preprocess(bad)
    for internal in ("/etc", "127.0.0.1", "0x", "BytesIO", "not public", "vitgraph"):
        assert internal not in str(error.value)
    assert ": send " in str(error.value) or "does not take" in str(error.value)
    assert error.value.__cause__ is None
    assert "tokens" in str(error.value) or "an image is rejected: " in caplog.text


def test_a_truncated_file_is_refused_before_any_batch(built: Make) -> None:
    head, _, text = url(china().resize((96, 64)), "JPEG").partition(",")
    with pytest.raises(ValueError, match="cannot be decoded: send a JPEG"):
        built().preprocess(f"{head},{text[: len(text) // 8 * 4]}")


def test_hosts_that_the_operator_allows_are_fetched(
    built: Make, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = TlsServer(make_certificate(tmp_path))
    file = io.BytesIO()
    china().resize((96, 64)).save(file, "PNG")
    server.files["/a.png"] = file.getvalue()
    monkeypatch.setattr(module, "Fetcher", server.fetcher)
    with server.running():
        allowed = built(allowed_hosts="cdn.test, photos.test")
        made = allowed.preprocess(server.url("/a.png"))
        assert made.item.paths["image"].pixels.equal(
            allowed.preprocess(url(china().resize((96, 64)))).item.paths["image"].pixels
        )
        with pytest.raises(ValueError, match="an https URL of a host that is allowed"):
            built(allowed_hosts="other.test").preprocess(server.url("/a.png"))


def test_a_closed_encoder_holds_nothing_and_encodes_nothing(built: Make) -> None:
    backend = built()
    made = backend.preprocess(url(photographs()[0]))
    backend.close()
    assert backend._graphed is None
    with pytest.raises(RuntimeError, match="not built, or is closed"):
        backend.forward_batch([made.item])


def test_without_ai_dynamo_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    monkeypatch.delitem(sys.modules, "vitgraph.integrations.dynamo", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'ai-dynamo\[vllm\]>=1.6,<1.7'"):
        import vitgraph.integrations.dynamo  # noqa: F401
