"""GPU: other streams, other threads and other captures beside a GraphedEncoder."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import NEEDS_CUDA, fail_at, new_tower, on_gpu, replaying, tower
from tests.support.graphs.outputs import assert_same_bits, copy_of, worst_distance

pytestmark = NEEDS_CUDA

IMAGES = [[1, 16, 16], [1, 34, 46]]
CLOSE = 2e-2
"""bfloat16, padded against not, as in the other GPU tests of graphs."""


@pytest.fixture
def graphed() -> Iterator[GraphedEncoder]:
    graphed = replaying(tower("qwen2_vl"), [64, 512])
    yield graphed
    graphed.release()


def busy() -> None:
    """Keep the current stream busy for some 50 ms."""
    torch.cuda._sleep(100_000_000)


# --- streams --------------------------------------------------------------------------------------


def test_buffers_dropped_while_a_stream_is_using_them_go_to_nobody_else() -> None:
    encoder = tower("qwen2_vl")
    graphed = replaying(encoder, [64, 512])
    pixels = on_gpu(encoder, IMAGES)
    expected = copy_of(graphed(pixels, IMAGES))
    assert graphed._captured is not None
    (arena,) = graphed._captured.memory.arenas
    sizes = [buffer.shape for buffer in arena.buffers]
    kinds = [buffer.dtype for buffer in arena.buffers]
    del arena
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        result = graphed(pixels, IMAGES)
    del graphed
    gc.collect()
    made = [torch.ones(s, dtype=d, device="cuda") for s, d in zip(sizes, kinds, strict=True)]
    torch.cuda.synchronize()
    assert_same_bits(result, expected)
    assert all(bool((tensor == 1).all()) for tensor in made)


def test_views_read_on_one_stream_survive_a_call_on_another() -> None:
    """With ``clone=False``: the next call waits for what was queued with the last one's results."""
    encoder = tower("qwen2_vl")
    graphed = replaying(encoder, [64, 512], clone=False)
    first, second = on_gpu(encoder, IMAGES, seed=1), on_gpu(encoder, IMAGES, seed=2)
    expected = [copy_of(graphed(pixels, IMAGES)) for pixels in (first, second)]
    torch.cuda.synchronize()
    views = graphed(first, IMAGES)
    busy()
    read = copy_of(views)
    with torch.cuda.stream(torch.cuda.Stream()):
        later = copy_of(graphed(second, IMAGES))
    torch.cuda.synchronize()
    assert_same_bits(read, expected[0])
    assert_same_bits(later, expected[1])
    graphed.release()


# --- captures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["replay", "eager", "capture"])
def test_a_call_while_the_caller_captures_is_refused_and_harms_neither(
    graphed: GraphedEncoder, call: str
) -> None:
    encoder, pixels = graphed.encoder, on_gpu(graphed.encoder, IMAGES)
    expected = copy_of(graphed(pixels, IMAGES))
    other = GraphedEncoder(encoder, [64], backend="eager" if call == "eager" else "cudagraph")
    calls: dict[str, Callable[[], object]] = {
        "replay": lambda: graphed(pixels, IMAGES),
        "eager": lambda: other(pixels, IMAGES),
        "capture": other.capture,
    }
    scratch, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch += 1
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
            calls[call]()
    graph.replay()
    assert float(scratch.sum()) == 8
    assert_same_bits(graphed(pixels, IMAGES), expected)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same_bits(graphed(pixels, IMAGES), expected)
    torch.cuda.synchronize()


def synchronise() -> None:
    torch.cuda.synchronize()


def test_a_capture_that_cuda_invalidates_takes_no_other_budget_with_it() -> None:
    """Budgets after it are captured into another pool, and random numbers are drawn as before."""
    encoder = new_tower("qwen2_vl")
    fail_at(encoder, 4 * 256, "capture", synchronise, times=2)  # it is tried again after a run
    with pytest.warns(UserWarning, match="budget 256 .* is dropped") as caught:
        graphed = replaying(encoder, [64, 256, 512], max_frames_per_batch=8)
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    assert {budget.tokens for budget in graphed.stats().budgets} == {64, 512}
    assert torch.rand(4, device="cuda").isfinite().all()
    for grids in ([[1, 16, 16]], IMAGES):
        pixels = on_gpu(encoder, grids)
        first = copy_of(graphed(pixels, grids))
        graphed._poison()
        assert_same_bits(graphed(pixels, grids), first)
        assert worst_distance(first, tower("qwen2_vl")(pixels, grids)) <= CLOSE
    again = replaying(encoder, [64, 512])
    assert {budget.tokens for budget in again.stats().budgets} == {64, 512}
    again.release()
    graphed.release()


def test_two_objects_may_be_captured_in_two_threads_at_once() -> None:
    """One waits for the other: measuring waits for the device, which no capture survives."""
    encoders = [new_tower("qwen2_vl"), new_tower("qwen3_vl")]
    made: list[GraphedEncoder] = []
    threads = [
        threading.Thread(target=lambda one=one: made.append(replaying(one, [64, 512])))
        for one in encoders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    for graphed in made:
        assert graphed.stats().dropped == []
        pixels = on_gpu(graphed.encoder, IMAGES)
        assert worst_distance(graphed(pixels, IMAGES), graphed.encoder(pixels, IMAGES)) <= CLOSE
        graphed.release()


def test_capture_leaves_nothing_cached_beside_arena_and_pool() -> None:
    """Warm-ups and timings need as much again: it lay idle, and in no statistics."""
    gc.collect()  # what earlier tests left would be freed in between
    graphed = replaying(tower("qwen3_vl"), [64, 1024])
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held
    graphed.release()


# --- layers that are more than their weight -------------------------------------------------------


class Doubled(torch.nn.Module):
    """A layer with something beside it, as LoRA adds."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def out_features(self) -> int:
        return self.layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "intern_vit"])
def test_adapters_on_linear_layers_take_effect_eagerly_and_in_a_replay(name: str) -> None:
    encoder, merged = new_tower(name), new_tower(name)
    for path, module in list(merged.named_modules()):
        if isinstance(module, torch.nn.Linear) and "qkv" not in path:  # scores as peaked as before
            module.weight.mul_(2)
            if module.bias is not None:
                module.bias.mul_(2)
            parent = encoder.get_submodule(path.rpartition(".")[0])
            layer = encoder.get_submodule(path)
            assert isinstance(layer, torch.nn.Linear)
            parent._modules[path.rpartition(".")[2]] = Doubled(layer)
    grids = [[2, 32, 32]] if name == "intern_vit" else IMAGES
    pixels = on_gpu(merged, grids)
    expected: EncoderOutput = merged(pixels, grids)
    assert worst_distance(encoder(pixels, grids), expected) <= CLOSE
    graphed = replaying(encoder, [512])
    assert worst_distance(graphed(pixels, grids), expected) <= CLOSE
    graphed.release()
