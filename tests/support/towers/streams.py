"""Encoders for the tests of streams: small towers, and a toy whose images are numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from encoders import Encoder
from encoders.contract import EncoderItemSpec, EncoderOutput, Grid, GridLike, VisionInputs
from encoders.grids import read_grid
from encoders.streams.calls import ItemEncoder
from encoders.streams.items import EncodesItems
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

TOWERS = ["intern_vit_300m", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@cache
def tower(name: str, dtype: torch.dtype = torch.float32) -> Encoder:
    """Build a small tower with seeded weights and the preprocessing of its family."""
    with TemporaryDirectory() as folder:
        write_seeded_checkpoint(folder, name, width=64)
        return load_encoder(folder, dtype=dtype, progress=False)


class NumberEncoder(EncodesItems[EncoderOutput]):
    """A toy encoder whose images are numbers: n makes ``tokens(n)`` tokens of value n.

    Attributes:
        calls: the sum of tokens of each call.
        prepared: the numbers in the order in which threads have prepared them.
        bad: numbers that cannot be preprocessed.
        poison: numbers that no call can encode.
        error: what a call with a poisoned number raises.
        overflow: numbers whose tokens are not of their value, but of the one given here.
    """

    def __init__(self, tokens: Callable[[int], int] = lambda number: 10) -> None:
        self.tokens = tokens
        self.calls: list[int] = []
        self.prepared: list[int] = []
        self.bad: set[int] = set()
        self.poison: set[int] = set()
        self.error: Exception = ValueError("poisoned")
        self.overflow: dict[int, float] = {}
        self.seconds = 0.0
        self.lock = threading.Lock()

    def item_encoder(self) -> ItemEncoder[EncoderOutput]:
        paths: Any = {"image": self}
        return ItemEncoder(self, paths, paths, torch.device("cpu"))

    def preprocess(self, images: Any = (), videos: Any = (), **limits: Any) -> VisionInputs:
        if not images:
            return VisionInputs(torch.zeros(0, 1), torch.zeros(0, 3, dtype=torch.int64))
        (number,) = images
        time.sleep(self.seconds * (1 + number % 3))  # later items may be ready first
        if number in self.bad:
            raise ValueError(f"image 0: {number} is a bad number")
        with self.lock:
            self.prepared.append(number)
        count = self.tokens(number)
        return VisionInputs(torch.full((count, 1), float(number)), torch.tensor([[1, 1, count]]))

    def grid_for(self, tokens: int) -> Grid:
        return 1, 1, tokens

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(t * h * w, t * h * w, t, h * w) for t, h, w in read_grid(grid_thw)]

    def __call__(self, pixel_values: Tensor, grid_thw: GridLike) -> EncoderOutput:
        if self.poison & set(pixel_values.flatten().int().tolist()):
            raise self.error
        self.calls.append(len(pixel_values))
        tokens = pixel_values.clone()
        for number, value in self.overflow.items():
            tokens[pixel_values == number] = value
        return EncoderOutput(tokens, tokens, ())

    def join(
        self, outputs: Mapping[str, EncoderOutput], inputs: VisionInputs
    ) -> list[EncoderOutput]:
        return self.split(outputs["image"], inputs.grid_thw)

    def split(self, output: EncoderOutput, grid_thw: GridLike) -> list[EncoderOutput]:
        sizes = [spec.output_tokens for spec in self.item_specs(grid_thw)]
        parts = output.pooler_output.split(sizes)
        return [EncoderOutput(part, part, ()) for part in parts]


def prefetch_threads() -> list[threading.Thread]:
    """Return the worker threads of streams that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
