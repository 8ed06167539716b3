"""Streams of items on a GPU: the results of ``encode``, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from encoders import Encoder, ItemError
from encoders.accelerated.attention.choices import graph_milliseconds
from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import NEEDS_CUDA
from tests.support.photographs import panning_clip, photographs
from tests.support.towers.streams import TOWERS, prefetch_threads, tower

pytestmark = NEEDS_CUDA

ITEMS: list[Any] = [*photographs()[:5], panning_clip(5), *photographs()[:4]]


def on_gpu(name: str, dtype: torch.dtype) -> Encoder:
    return tower(name, dtype).to("cuda")


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_stream_on_the_gpu_gives_what_encode_gives(name: str, graphs: bool) -> None:
    encoder = on_gpu(name, torch.float32)
    alone = [
        encoder.encode([item])[0] if item is not ITEMS[5] else encoder.encode(videos=[item])[0]
        for item in ITEMS
    ]
    made = GraphedEncoder(encoder, budgets=[256, 1024, 4096]).capture() if graphs else encoder
    for tokens in (300, 5000):
        results = made.encode_many(ITEMS * 3, batch_tokens=tokens, progress=False)
        for one, other in zip(results, alone * 3, strict=True):
            difference = one.pooler_output - other.pooler_output
            assert float(difference.norm() / other.pooler_output.norm()) <= 1e-4
    assert not prefetch_threads()
    encoder.cpu()


def test_results_stay_as_they_are_while_later_batches_run() -> None:
    encoder = on_gpu("qwen3_vl", torch.bfloat16)
    stream = encoder.embed_many(ITEMS * 10, batch_tokens=600, pool="mean", progress=False)
    kept, copies = [], []
    for vector in stream:
        torch.cuda._sleep(200_000)  # the consumer's own work, on its own stream
        kept.append(vector)
        copies.append(vector.clone().cpu())
    torch.cuda.synchronize()
    for vector, copy in zip(kept, copies, strict=True):
        assert torch.equal(vector.cpu(), copy)
    encoder.cpu()


def test_memory_does_not_grow_with_the_stream() -> None:
    encoder = on_gpu("qwen3_vl", torch.bfloat16)
    peaks = []
    for count in (40, 200):  # 100 items do not yet bring the two largest batches together
        torch.cuda.reset_peak_memory_stats()
        for _ in encoder.embed_many(ITEMS * count, pool="mean", batch_tokens=1000, progress=False):
            pass
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.1 * peaks[0]
    encoder.cpu()


def test_results_of_graphs_without_clone_belong_to_the_caller() -> None:
    encoder = on_gpu("qwen3_vl", torch.float32)
    alone = [result.pooler_output for result in encoder.encode(photographs()[:4])]
    views = GraphedEncoder(encoder, budgets=[256, 1024, 4096], clone=False)  # captured on the way
    for _ in range(2):
        results = list(views.encode_many(photographs()[:4], batch_tokens=1, progress=False))
        for result, wanted in zip(results, alone, strict=True):
            assert result.pooler_output is not None
            assert float((result.pooler_output - wanted).norm() / wanted.norm()) <= 1e-4
    encoder.cpu()


def test_memory_does_not_grow_with_the_number_of_streams() -> None:
    encoder = on_gpu("qwen3_vl", torch.bfloat16)
    reserved = []
    for _ in range(40):
        list(encoder.embed_many(ITEMS, pool="mean", batch_tokens=1000, progress=False))
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= 1.1 * reserved[4]
    encoder.cpu()


@pytest.mark.parametrize("on_default", [True, False])
@pytest.mark.parametrize("is_clip", [False, True])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_items_on_the_gpu_are_read_after_they_are_written(
    is_clip: bool, on_default: bool, is_lazy: bool
) -> None:
    encoder = on_gpu("qwen3_vl", torch.float32)
    pixels = torch.from_numpy(np.array(photographs()[0].convert("RGB"))).permute(2, 0, 1).cuda()
    pixels = pixels.expand(4, -1, -1, -1).contiguous() if is_clip else pixels
    (wanted,) = encoder.embed_many([pixels.cpu()], progress=False)

    def items() -> Iterator[torch.Tensor]:
        late = torch.zeros_like(pixels)
        torch.cuda._sleep(10**8)
        late.copy_(pixels)
        yield late

    torch.cuda.synchronize()
    caller = torch.cuda.default_stream() if on_default else torch.cuda.Stream()
    with torch.cuda.stream(caller):
        given = items() if is_lazy else list(items())
        (found,) = encoder.embed_many(given, progress=False)
    torch.cuda.synchronize()
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-4
    encoder.cpu()


def test_graphs_that_the_consumer_captures_take_no_kernel_of_the_stream() -> None:
    encoder = on_gpu("qwen3_vl", torch.float32)
    images, rows = photographs()[:4], torch.ones(64, device="cuda")
    wanted, found = encoder.embed(images), []
    for vector in encoder.embed_many(images * 50, batch_tokens=300, progress=False):
        graph_milliseconds(lambda: rows.mul_(1.0))  # each on the next of torch's CUDA streams
        found.append(vector)
    for number, vector in enumerate(found):
        right = wanted[number % len(wanted)]
        assert float((vector - right).norm() / right.norm()) <= 1e-4
    encoder.cpu()


def test_an_image_too_large_for_the_gpu_is_the_only_one_lost() -> None:
    encoder = on_gpu("qwen3_vl", torch.bfloat16)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()  # what other tests left would be taken before the limit counts
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 200 * 2**20) / total)
    try:
        large = torch.zeros(3, 4000, 4000, dtype=torch.uint8)
        stream = encoder.embed_many(
            [ITEMS[1], large, ITEMS[1]], on_error="keep", pool="mean", progress=False
        )
        first, error, last = stream
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        encoder.cpu()
    assert isinstance(error, ItemError)
    assert isinstance(error.error, torch.OutOfMemoryError)
    assert "max_tokens_per_call" in str(error.error)
    assert isinstance(first, torch.Tensor)
    assert isinstance(last, torch.Tensor)
    assert torch.allclose(first, last, atol=1e-2)
