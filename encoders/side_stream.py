"""A second stream of a graph capture, for modules whose results no block reads.

A DeepStack merger reads the hidden state after an inner block, and nothing before the end of the
forward reads its result. In a captured graph it can run while the blocks go on: for one small image
its products mostly wait for their weights (80 MB per merger of Qwen3-VL-8B) and leave the GPU idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

MOST_ROWS = 1024
"""With more rows, blocks fill the GPU: at 4,096 there was nothing to gain. The second stream needs
memory of its own, which was 400 MB at 32,768 rows of Qwen3-VL-8B."""


def call(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return ``module(hidden)``."""
    result: Tensor = module(hidden)
    return result


@contextlib.contextmanager
def side_stream() -> Iterator[Callable[[nn.Module, Tensor], Tensor]]:
    """Yield ``run(module, hidden)``, which returns ``module(hidden)`` for hidden rows [T, D].

    While the current stream is being captured, modules run on a second stream, one after the other,
    and their results may be read once the context has ended. At any other time, and for more than
    ``MOST_ROWS`` rows, they are called in place.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield call
        return
    main = torch.cuda.current_stream()
    side = _stream(main.device)
    read: list[Tensor] = []  # the main stream must not reuse their memory before it has waited

    def run(module: nn.Module, hidden: Tensor) -> Tensor:
        if len(hidden) > MOST_ROWS:
            return call(module, hidden)
        join()
        side.wait_stream(main)
        read.append(hidden)
        with torch.cuda.stream(side):
            return call(module, hidden)

    def join() -> None:
        if read:
            main.wait_stream(side)
            read.clear()

    try:
        yield run
    except BaseException:  # a capture cannot end before its streams have joined
        with contextlib.suppress(RuntimeError):  # unless it is broken, which the error says
            join()
        raise
    join()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
