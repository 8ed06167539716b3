"""What an accelerated encoder keeps between calls serves every call: of other modes and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from encoders import Qwen2VLEncoder
from encoders.accelerated.accelerator import FusedBlocks
from encoders.contract import GridLike, Metadata
from tests.oracles import BY_NAME, distances, draw_pixels, fields_of
from tests.support.accelerated.cases import (
    OURS,
    assert_close,
    fresh,
    needs_interpreter,
    needs_triton,
    run,
)

LIKE = "qwen2_5_vl"
ONE, OTHER = [[1, 4, 6]], [[1, 6, 4]]
"""Grids of as many rows: the metadata of one would serve the other, and give wrong numbers."""


def of_one_item(name: str) -> list[list[int]]:
    return [[2, 2, 2]] if BY_NAME[name].tiled else [[1, 4, 6]]


@pytest.mark.parametrize("name", OURS)
def test_training_after_inference_mode_on_the_same_grid_has_gradients(name: str) -> None:
    encoder, grids = fresh(name).requires_grad_(True), of_one_item(name)
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    gradients = []
    with torch.inference_mode():
        fast(pixels, grids)
    for one in (encoder, fast):
        encoder.zero_grad()
        with torch.enable_grad():
            sum(x.square().sum() for x in fields_of(one(pixels, grids)).values()).backward()
        gradients.append([p.grad.clone() for p in encoder.parameters() if p.grad is not None])
    assert gradients[0]
    for ours, truth in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(ours, truth)


def test_metadata_kept_in_inference_mode_may_be_changed_and_copied() -> None:
    fast = fresh(LIKE).accelerated()
    pixels = draw_pixels(fast, ONE)
    with torch.inference_mode():
        fast(pixels, ONE)
    kept = fast._resolve_metadata(pixels, ONE, None)
    assert not any(entry.is_inference() for entry in kept.values())


class Tables(Qwen2VLEncoder):
    """Multiplies patches by a table that is made of a weight, among the metadata."""

    def prepare_encoder_metadata(self, grid_thw: GridLike, **capacities: Any) -> Metadata:
        metadata = super().prepare_encoder_metadata(grid_thw, **capacities)
        return {**metadata, "table": next(self.parameters()).mean().exp()[None]}

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        return super().embed_patches(pixel_values, metadata) * metadata["table"]


class Pops(Tables):
    """Removes the table that it is given."""

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        return Qwen2VLEncoder.embed_patches(self, pixel_values, metadata) * metadata.pop("table")


class Writes(Tables):
    """Writes to the table that it is given."""

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        metadata["table"].mul_(2)
        return super().embed_patches(pixel_values, metadata)


@pytest.mark.parametrize("kind", [Tables, Pops, Writes])
def test_a_subclass_may_read_weights_and_change_its_metadata(kind: type[Tables]) -> None:
    encoder = fresh("qwen2_vl")
    encoder.__class__ = kind
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, ONE)
    for _ in range(3):
        assert_close(fast(pixels, ONE), encoder(pixels, ONE))
        next(encoder.parameters()).add_(0.25)


def test_a_hook_that_writes_to_metadata_changes_one_call() -> None:
    encoder, grids = fresh("qwen2_vl"), [*ONE, *OTHER]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)

    def join_segments(block: nn.Module, args: Any) -> None:
        args[1].cu_seqlens[1] = 0

    encoder.blocks[1].register_forward_pre_hook(join_segments)
    for _ in range(3):
        assert_close(fast(pixels, grids), encoder(pixels, grids))


def test_a_call_after_an_export_of_its_grid_is_right() -> None:
    encoder = fresh("qwen3_vl")
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, ONE)
    torch.export.export(fast, (pixels, ONE), strict=False)
    assert_close(fast(pixels, ONE), encoder(pixels, ONE))


def test_a_call_after_one_with_fake_pixels_is_right() -> None:
    encoder = fresh("qwen3_vl")
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, ONE)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, suppress(DataDependentOutputException):
        fast(mode.from_tensor(pixels), ONE)
    assert_close(fast(pixels, ONE), encoder(pixels, ONE))


# --- threads --------------------------------------------------------------------------------------


def in_a_thread(call: Callable[[], Any], timeout: float | None = None) -> Future[Any]:
    """Run a call in a thread of its own, and wait for it at most until ``timeout``."""
    future = ThreadPoolExecutor(1).submit(torch.no_grad()(call))  # a new thread has gradients on
    wait([future], timeout)
    return future


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, call: Callable[[], object]) -> None:
    """Run a call in another thread after access number ``at`` to the kept metadata."""
    kept: dict[int, Any] = {}
    counts = [0]

    def count() -> None:
        counts[0] += 1
        if counts[0] == at:
            call()

    def read(accelerator: FusedBlocks) -> Any:
        found = kept.get(id(accelerator))
        count()
        return found

    def write(accelerator: FusedBlocks, value: Any) -> None:
        kept[id(accelerator)] = value
        count()

    monkeypatch.setattr(FusedBlocks, "_last_metadata", property(read, write))


@pytest.mark.parametrize("before", [None, ONE, OTHER], ids=["first", "same grid", "other grid"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_threads_with_other_grids_do_not_swap_their_metadata(
    monkeypatch: pytest.MonkeyPatch, at: int, before: list[list[int]] | None
) -> None:
    """Another thread's whole call comes between any two accesses to what is kept."""
    encoder = fresh(LIKE)
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, ONE)
    truth = {str(grids): encoder(pixels, grids) for grids in (ONE, OTHER)}
    assert max(distances(truth[str(ONE)], truth[str(OTHER)]).values()) > 1e-2
    others: list[Future[Any]] = []
    interrupt(monkeypatch, at, lambda: others.append(in_a_thread(lambda: fast(pixels, OTHER))))
    for grids in (before, ONE, ONE):
        if grids is not None:
            assert_close(fast(pixels, grids), truth[str(grids)])
    for other in others:
        assert_close(other.result(), truth[str(OTHER)])


@needs_triton
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("during", ["_row_of", "_fill", "_addresses_of"])
def test_a_call_while_another_thread_derives_weights_is_right(
    monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    import encoders.accelerated.derived as derived

    encoder = fresh(LIKE)
    fast, truth = encoder.accelerated(), run(encoder, LIKE)
    home = derived.DerivedWeights if during == "_fill" else derived
    step, others, begun = getattr(home, during), list[Future[Any]](), threading.Event()

    def interrupted(*args: Any) -> Any:
        if not begun.is_set():  # the other call waits for this one, however long it takes
            begun.set()
            others.append(in_a_thread(lambda: run(fast, LIKE), timeout=0.5))
        return step(*args)

    monkeypatch.setattr(home, during, interrupted)
    for _ in range(2):
        assert_close(run(fast, LIKE), truth)
    assert_close(others[0].result(timeout=60), truth)
