"""The calls by which ``encode`` and ``embed`` of a :class:`DataParallelEncoder` run items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from encoders.contract import PartialOutput
from encoders.streams import ItemEncoder, MakeInputs, ResultSettings


@dataclass(frozen=True)
class SharedItemEncoder(ItemEncoder[PartialOutput]):
    """An :class:`ItemEncoder` whose calls all ranks of a group make together."""

    encode_shared: Callable[[MakeInputs, int | None], list[PartialOutput]] = field(kw_only=True)
    embed_shared: Callable[[MakeInputs, ResultSettings], Tensor] = field(kw_only=True)
    agree_shared: Callable[[str], object] = field(kw_only=True)
    """Raises an error if the ranks do not all pass the same string."""

    def agree(self, batch: Callable[[], str]) -> None:
        self.agree_shared(batch())

    def encode(self, make_inputs: MakeInputs, limit: int | None = None) -> list[PartialOutput]:
        return self.encode_shared(make_inputs, limit)

    def embed(self, make_inputs: MakeInputs, results: ResultSettings) -> Tensor:
        return self.embed_shared(make_inputs, results)
