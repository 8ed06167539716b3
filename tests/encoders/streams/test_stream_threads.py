"""Streams in memory that is bounded, and threads that always end."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.photographs import china
from tests.support.towers.streams import NumberEncoder, prefetch_threads, tower

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[3]


class Counted:
    """An endless iterable of numbers that knows how many were taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.more = threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.taken += 1
            self.more.set()
            yield number

    def settle(self) -> None:
        """Wait until none is taken for 0.05 s: only time shows that threads read no further."""
        while self.more.wait(0.05):
            self.more.clear()


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow), 16])
def test_no_more_than_four_batches_are_read_ahead(workers: int) -> None:
    items = Counted()
    stream = NumberEncoder().embed_many(
        items, batch_tokens=100, workers=workers, pool="mean", progress=False
    )
    items.settle()
    assert items.taken == 0  # nothing starts before the first result is asked for
    for yielded in range(1, 60):
        next(stream)
        if yielded in (1, 2, 10, 11, 37, 59):
            items.settle()
        assert items.taken <= yielded + 40
    while items.taken <= yielded + 20:  # it does run ahead
        items.settle()
    stream.close()


def test_reading_ahead_is_bounded_when_items_grow() -> None:
    items = Counted()
    encoder = NumberEncoder(lambda number: 1 if number < 300 else 100)
    stream = encoder.encode_many(items, batch_tokens=100, workers=3, progress=False)
    for yielded in range(1, 330):
        next(stream)
        if yielded in (299, 310, 329):
            items.settle()
            large = max(items.taken - max(yielded, 300), 0)
            assert large <= 4 + 3  # four batches, and one item in the hands of each worker
    stream.close()


def test_items_larger_than_all_batches_do_not_stop_the_stream() -> None:
    encoder = NumberEncoder(lambda number: 1000 if number % 3 else 1)
    results = encoder.encode_many(range(20), batch_tokens=10, workers=4, progress=False)
    assert len(list(results)) == 20


def test_a_run_of_bad_items_is_bounded_too() -> None:
    items = Counted()
    encoder = NumberEncoder()
    encoder.bad = set(range(100_000))
    stream = encoder.encode_many(
        items, batch_tokens=640, workers=2, on_error="keep", progress=False
    )
    for _ in range(5):
        next(stream)
    items.settle()
    assert items.taken <= 5 + 40
    stream.close()


def test_a_closed_stream_ends_its_threads() -> None:
    stream = NumberEncoder().encode_many(Counted(), workers=4, progress=False)
    next(stream)
    assert len(prefetch_threads()) == 4
    stream.close()
    assert not prefetch_threads()


def test_a_stream_that_is_dropped_ends_its_threads() -> None:
    stream = NumberEncoder().encode_many(Counted(), workers=4, progress=False)
    next(stream)
    del stream
    gc.collect()
    assert not prefetch_threads()


def test_a_break_in_the_loop_ends_the_threads() -> None:
    for vector in NumberEncoder().embed_many(Counted(), pool="mean", progress=False):
        if vector > 20:
            break
    del vector
    gc.collect()
    assert not prefetch_threads()


def test_an_error_of_the_consumer_ends_the_threads() -> None:
    def consume() -> None:
        for _ in NumberEncoder().encode_many(Counted(), progress=False):
            raise LookupError("the consumer's")

    with pytest.raises(LookupError):
        consume()
    gc.collect()
    assert not prefetch_threads()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_be_started_ends_the_others(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name == "prefetch-3":
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(type(error)):
        next(NumberEncoder().encode_many(Counted(), workers=6, progress=False))
    assert not prefetch_threads()


def test_streams_that_run_side_by_side_do_not_mix() -> None:
    encoder = NumberEncoder(lambda number: 1 + number % 5)
    streams = [
        encoder.embed_many(range(n, n + 40), batch_tokens=20, pool="mean", progress=False)
        for n in (0, 100)
    ]
    pairs = [(int(one), int(other)) for one, other in zip(*streams, strict=True)]
    assert pairs == [(n, 100 + n) for n in range(40)]


@pytest.mark.parametrize("opened", [False, True])
def test_an_image_given_many_times_is_read_by_one_thread_at_once(
    opened: bool,
) -> None:
    file = BytesIO()
    china().resize((900, 700)).save(file, "PNG")
    (wanted,) = tower("qwen2_5_vl").embed([file.getvalue()], pool="mean", max_pixels=3136)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4):
            again = BytesIO(file.getvalue())
            items = [Image.open(again) if opened else again] * 6
            results = tower("qwen2_5_vl").embed_many(
                items, workers=6, pool="mean", max_pixels=3136, progress=False
            )
            for result in results:
                assert torch.allclose(result, wanted, atol=1e-5)
    finally:
        sys.setswitchinterval(interval)


def test_closing_does_not_wait_for_a_source_that_is_stuck() -> None:
    stuck, went_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield from range(10)
        stuck.wait(30)
        went_on.set()

    stream = NumberEncoder().encode_many(items(), batch_tokens=10, workers=2, progress=False)
    next(stream)
    stream.close()
    assert not went_on.is_set()
    stuck.set()
    for thread in prefetch_threads():
        thread.join(10)
    assert not prefetch_threads()


INTERRUPTED = """
import itertools
from tests.support.towers.streams import NumberEncoder, prefetch_threads
encoder = NumberEncoder()
encoder.seconds = {seconds}
try:
    items = itertools.count()  # no name holds the stream: the interrupt may come outside of it
    for _ in encoder.encode_many(items, batch_tokens=20, workers=3, progress=False):
        if encoder is not None:
            print("running", flush=True)
        encoder = None
except KeyboardInterrupt:
    print("threads", len(prefetch_threads()), flush=True)
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_ctrl_c_ends_the_process_and_its_threads(seconds: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(seconds=seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.2)  # anywhere in the stream: the threads must end wherever they are
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert out == "threads 0\n"
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
