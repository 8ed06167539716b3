"""Streams with ``collect``: results of whole batches are made into arrays on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput, Limits
from encoders.streams import (
    Arrays,
    Collected,
    EncodedItem,
    ItemError,
    ResultSettings,
    StreamOptions,
    stream_items,
)
from encoders.streams.device import DeviceQueue
from tests.support.towers.streams import NumberEncoder


class Halves:
    """Collects half of each token of items, but not of batches with a number that is refused."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused, self.batches = refused, list[list[object]]()

    def __call__(self, items: Sequence[EncodedItem]) -> Collected:
        keys = [item.key for item in items]
        if self.refused in keys:
            raise ValueError(f"refused {self.refused}")
        self.batches.append(keys)
        tokens = [tokens_of(item) for item in items]

        def results(host: Mapping[str, Tensor]) -> list[Arrays | Exception]:
            parts = host["halves"].split(list(map(len, tokens)))
            return [{"halves": part.numpy()} for part in parts]

        return Collected({"halves": torch.cat(tokens) / 2}, results)


def tokens_of(item: EncodedItem) -> Tensor:
    """Return the tokens of an item."""
    assert isinstance(item.value, EncoderOutput)
    return item.value.pooler_output


def collected(collect: Any, numbers: Sequence[int], **options: Any) -> list[Any]:
    """Return the results of a stream of numbers, in batches of three numbers."""
    encoder = NumberEncoder()
    chosen = StreamOptions(batch_tokens=30, progress=False, collect=collect, **options)
    items: list[Any] = [(number, number) for number in numbers]
    results = stream_items(encoder.item_encoder(), items, Limits(), ResultSettings(), chosen)
    return [result.value for result in results]


def test_each_item_gets_its_part_of_one_copy_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Mapping[str, Tensor]] = []
    plain = DeviceQueue.fetch

    def fetch(self: DeviceQueue, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies.append(tensors)
        return plain(self, tensors)

    monkeypatch.setattr(DeviceQueue, "fetch", fetch)
    collect = Halves()
    values = collected(collect, range(7))
    assert [value["halves"][:, 0].tolist() for value in values] == [[n / 2] * 10 for n in range(7)]
    assert collect.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(copies) == 3


def test_a_batch_that_cannot_be_collected_is_tried_item_by_item() -> None:
    collect = Halves(refused=1)
    values = collected(collect, range(3), on_error="keep")
    assert isinstance(values[1], ItemError)
    assert "refused 1" in str(values[1].error)
    assert [values[n]["halves"][0, 0] for n in (0, 2)] == [0, 1]
    with pytest.raises(ValueError, match="refused 1"):
        collected(collect, range(3))
