"""An encoder that divides the items (images and videos) of each call among the ranks of a group.

Shapes: P patches (rows of ``pixel_values``), N tokens, D width of a pooled vector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from encoders.contract import (
    OUTPUT_FIELDS,
    EncoderItemSpec,
    Grid,
    GridLike,
    PartialOutput,
    VisionInputs,
)
from encoders.grids import read_grid
from encoders.streams import (
    EncodesItems,
    ItemEncoder,
    ItemPath,
    MakeInputs,
    ResultSettings,
    join_outputs,
    select_items,
)
from graphwrap import GraphedEncoder, joins_paths, read_outputs, require_choice, with_paths

from .rank_result import (
    RankResult,
    complete,
    fields_of,
    output_of,
    result_of_fields,
    split_rows,
)
from .rows import RowExchange, find_channel
from .shared_items import SharedItemEncoder
from .shares import Shares, assign_items, cost_of, costs_of_items, select_share
from .status import StatusExchange

Encode: TypeAlias = Callable[[VisionInputs], list[PartialOutput]]


class Attempt(Protocol):
    """Runs this rank's part of a call, and compares a string with those of the other ranks."""

    def __call__(self, work: Callable[[], RankResult], agreed: str = "") -> RankResult: ...


class DataParallelEncoder(EncodesItems[PartialOutput]):
    """Encodes the items of each call on all ranks of a group, and returns all results on each.

    Items are assigned by estimated time (:func:`vitgraph.parallel.shares.cost_of`), and every rank
    encodes its share in one call of its own encoder: results are bitwise equal to what one process
    computes for the same shares. If the encoder has several input paths ("image", "tiles"), one
    rank runs all paths of an item. ``encode`` and ``embed`` share the items of a call,
    ``encode_many`` and ``embed_many`` those of each batch. As with any collective, all ranks must
    make the same calls in the same order, and take all results of a stream; making the object is
    one of these calls. No gradients are recorded. Calls from several threads run one after another.

    Args:
        encoder: an encoder on this rank's device, or a :class:`GraphedEncoder` of one. All ranks
            hold equal weights.
        group: the process group; None is the default one.
        scatter: True if every rank passes the same items. False if each rank passes items of its
            own and wants only their results: then ranks exchange nothing but errors, and in streams
            not even those.
        outputs: fields of :class:`PartialOutput` to return. Other fields are None, and no bytes
            are exchanged for them.

    Attributes:
        encoder, scatter, outputs, group: the arguments with these names.
        rank, size: number of this process in the group, and number of its processes.

    Raises:
        ValueError: no process group, a group that this process is not in or that cannot reach the
            encoder's device, a field that is unknown or that the graphs leave out, or a
            ``scatter`` that is not a bool.
        RuntimeError: another rank has ended, or makes its object later than the timeout allows.
    """

    def __init__(
        self,
        encoder: nn.Module | GraphedEncoder,
        group: dist.ProcessGroup | None = None,
        scatter: bool = True,
        outputs: Sequence[str] = ("pooler_output", "deepstack_features"),
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "there is no process group: start the program with torchrun, and call "
                "torch.distributed.init_process_group() before"
            )
        require_choice("scatter", scatter, (True, False))
        self.encoder, self.group, self.scatter = encoder, group, scatter
        self.outputs = read_outputs(outputs)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: pass one that it is in")
        module: nn.Module = encoder if isinstance(encoder, nn.Module) else encoder.encoder
        if isinstance(encoder, GraphedEncoder):
            for name in self.outputs:
                if name not in encoder.outputs:
                    raise ValueError(f"outputs: the graphs leave out {name}; name it there, too")
        elif extras := [name for name in self.outputs if name not in OUTPUT_FIELDS]:
            raise ValueError(
                f"outputs: {extras[0]} is no field; pass encoder.with_extras({extras}), whose "
                "extras all ranks get"
            )
        self._paths: Mapping[str, ItemPath] = with_paths(module).paths
        # With one input path, an item's sizes say how many rows each output field has. With several
        # paths only joining their outputs tells it, which takes 0.1 ms of host time per item.
        self._several = joins_paths(self._paths, module)
        self._lock = threading.Lock()
        self._device = next(module.parameters()).device
        config = dist.get_backend_config(group).split(",")
        backends = dict(entry.split(":", 1) for entry in config)
        channel = find_channel(self._device, backends)
        self._status = StatusExchange(group, backends)
        self._rows = RowExchange(group, channel, self._status)

    @overload
    def __call__(self, pixel_values: VisionInputs) -> list[PartialOutput]: ...
    @overload
    def __call__(self, pixel_values: Tensor, grid_thw: GridLike) -> PartialOutput: ...
    def __call__(
        self, pixel_values: Tensor | VisionInputs, grid_thw: GridLike | None = None
    ) -> PartialOutput | list[PartialOutput]:
        """Encode a batch of items.

        Args:
            pixel_values: the rows of all items, [P, *row_shape], as the encoder takes them; a rank
                reads only the rows of its share. Or the whole result of ``encoder.preprocess``,
                which an encoder with several input paths needs.
            grid_thw: [items, 3], as the encoder takes it; not with the result of ``preprocess``.

        Returns:
            :class:`PartialOutput` on the encoder's device, items in the caller's order; fields not
            in ``outputs`` are None. For a result of ``preprocess``, a list with one output per
            item, whose tensors are views of the gathered ones.

        Raises:
            ValueError: the encoder of any rank rejects its input, or grids, fields or dtypes of
                the call differ between ranks; pixels are not compared.
            RuntimeError: another rank failed, and the message says how; or a rank has ended, or
                made the call later than the timeout of the group allows.
        """
        inputs = pixel_values

        def work() -> RankResult:
            rows, grids = self._read_form(inputs, grid_thw)
            if self._several and isinstance(inputs, VisionInputs):
                return self._result_of_items(inputs, self.encoder)
            shares = self._assign_grids(grids)
            return self._result(shares, self.encoder(shares.select(rows), shares.own_grids))

        with self._lock, torch.no_grad():
            result = self._complete(self._attempt(work))
            gathered = self._gather(result)
            if isinstance(inputs, VisionInputs):
                return split_rows(gathered, result, self.outputs)
            names = [name for name, _ in result.fields]
            return output_of(zip(names, gathered, strict=True), self.outputs)

    def item_encoder(self) -> SharedItemEncoder:
        """Return the object by which ``encode`` and ``embed`` run items on all ranks.

        With ``scatter=True`` every rank decodes all items, because their sizes decide which rank
        encodes which; ``embed`` exchanges vectors instead of tokens. An error of one rank, such as
        a file that it cannot read, is raised on all.

        Raises:
            ValueError: the encoder has no ``encode``.
        """
        return self._item_encoder(self._attempt, self._agree)

    def _stream_encoder(self) -> SharedItemEncoder:
        """Return the object that encodes the batches of a stream.

        With ``scatter=False`` the ranks may have different numbers of batches, so they exchange
        nothing, not even errors.
        """
        return self.item_encoder() if self.scatter else self._item_encoder(_alone, len)

    def _item_encoder(self, attempt: Attempt, agree: Callable[[str], object]) -> SharedItemEncoder:
        """Return the object that runs items by ``attempt`` and compares batches by ``agree``."""
        if not isinstance(self.encoder, EncodesItems):
            raise ValueError(
                f"{type(self.encoder).__name__} has no encode: prepare the pixels yourself and "
                "call this object with them and their grid_thw"
            )
        own: ItemEncoder[PartialOutput] = self.encoder.item_encoder()

        def encode(make_inputs: MakeInputs, limit: int | None) -> list[PartialOutput]:
            with self._lock, torch.no_grad():
                result = self._complete(attempt(partial(self._outputs, own, make_inputs, limit)))
                items = split_rows(self._gather(result), result, self.outputs)
                return [item.clone() for item in items]

        def embed(make_inputs: MakeInputs, results: ResultSettings) -> Tensor:
            with self._lock, torch.no_grad():
                work = partial(self._vectors, own, make_inputs, results)
                (vectors,) = self._gather(attempt(work, repr(results[:2])))
                return vectors

        return SharedItemEncoder(
            own.encoder,
            own.paths,
            own.calls,
            own.device,
            own.fields,
            head=own.head,
            class_token=own.class_token,
            encode_shared=encode,
            embed_shared=embed,
            agree_shared=agree,
        )

    def _read_form(
        self, inputs: Tensor | VisionInputs, grid_thw: GridLike | None
    ) -> tuple[Tensor, GridLike]:
        """Return pixels and grids, passed as two arguments or as one result of ``preprocess``.

        Raises:
            ValueError: neither was passed, or pixels for an encoder with several input paths.
        """
        if not isinstance(inputs, VisionInputs):
            if self._several or grid_thw is None or not isinstance(inputs, Tensor):
                raise ValueError(
                    f"pixel_values is a {type(inputs).__name__} "
                    f"{'without' if grid_thw is None else 'with'} grid_thw, and this encoder has "
                    f"the paths {', '.join(self._paths)}: pass the whole result of "
                    "encoder.preprocess(...), with only one path also pixel_values and grid_thw"
                )
            return inputs, grid_thw
        if grid_thw is not None:
            raise ValueError("grid_thw beside the result of preprocess, which has it: leave it out")
        inputs.check(self._paths)
        return inputs.pixel_values, inputs.grid_thw

    def _assign_grids(self, grid_thw: GridLike) -> Shares:
        """Assign items to ranks by their grids; the encoder has one input path, such as "image"."""
        grids = read_grid(grid_thw)
        specs = self._paths["image"].item_specs(grids)
        return self._assign(grids, specs, [cost_of(spec) for spec in specs])

    def _assign(
        self, grids: list[Grid], specs: list[EncoderItemSpec], costs: Sequence[float]
    ) -> Shares:
        if not self.scatter:
            items = list(range(len(grids)))
            return Shares(grids, specs, [items] * self.size, items)
        by_rank = assign_items(costs, self.size)
        return Shares(grids, specs, by_rank, by_rank[self.rank])

    def _outputs(
        self, own: ItemEncoder[PartialOutput], make_inputs: MakeInputs, limit: int | None
    ) -> RankResult:
        """Preprocess all items, assign them to ranks, and encode this rank's to whole outputs."""
        inputs = make_inputs()
        if self._several:
            return self._result_of_items(inputs, lambda mine: own.encode(lambda: mine, limit))
        shares = self._assign_grids(inputs.grid_thw)
        mine = select_share(inputs, shares)
        outputs = own.encode(lambda: mine, limit)
        joined = join_outputs(outputs) if outputs else self.encoder(mine.pixel_values, [])
        return self._result(shares, joined)

    def _vectors(
        self, own: ItemEncoder[PartialOutput], make_inputs: MakeInputs, results: ResultSettings
    ) -> RankResult:
        """Preprocess all items, assign them to ranks, and encode this rank's to vectors."""
        own.check(results)
        inputs = make_inputs()
        if self._several:
            shares = self._assign_views(inputs)
            mine = select_items(inputs, self._paths, shares.own_items)
        else:
            shares = self._assign_grids(inputs.grid_thw)
            mine = select_share(inputs, shares)
        vectors = own.embed(lambda: mine, results)
        result = result_of_fields(shares, [("vectors", vectors)], self._device)
        return result._replace(description=repr((*_layout_of(inputs), result.types)))

    def _assign_views(self, inputs: VisionInputs) -> Shares:
        """Assign items to ranks by all of their input paths, such as "image" and "tiles"."""
        inputs.check(self._paths)
        return self._assign(inputs.grid_thw.tolist(), [], costs_of_items(inputs, self._paths))

    def _result_of_items(self, inputs: VisionInputs, encode: Encode) -> RankResult:
        """Assign items to ranks, and encode this rank's, if the encoder has several input paths.

        ``encode`` is called with this rank's inputs, and returns an output per item.
        """
        shares = self._assign_views(inputs)
        mine = select_items(inputs, self._paths, shares.own_items)
        outputs = encode(mine) if shares.own_items else []
        fields: list[tuple[str, Tensor]] = []
        counts: list[list[int]] = []
        if outputs:
            fields = fields_of(join_outputs(outputs), self.outputs)
            item_fields = [fields_of(output, self.outputs) for output in outputs]
            counts = [[len(rows) for _, rows in field] for field in zip(*item_fields, strict=True)]
        description = repr((*_layout_of(inputs), self.outputs))
        return RankResult(shares, fields, counts, description, self._device)

    def _result(self, shares: Shares, output: PartialOutput) -> RankResult:
        return result_of_fields(shares, fields_of(output, self.outputs), self._device)

    def _attempt(self, work: Callable[[], RankResult], agreed: str = "") -> RankResult:
        """Return this rank's result of ``work`` if none failed and ``agreed`` is equal on all."""
        return self._status.attempt(
            work, lambda result: agreed + result.description if self.scatter else ""
        )

    def _agree(self, batch: str) -> None:
        """Raise a ValueError if ``batch`` is not the same string on all ranks."""
        self._status.attempt(lambda: batch, str)

    def _complete(self, result: RankResult) -> RankResult:
        """Return the result with the row counts of all items, which several paths must exchange."""
        return complete(result, self._status) if self._several and self.scatter else result

    def _gather(self, result: RankResult) -> list[Tensor]:
        """Return the output rows of all items, one tensor per field; ``result`` has this rank's.

        Raises:
            RuntimeError: a rank has ended (with gloo; with NCCL the process ends at the timeout).
        """
        if not self.scatter:
            return [rows for _, rows in result.fields]
        return self._rows.gather(result)


def _alone(work: Callable[[], RankResult], agreed: str = "") -> RankResult:
    """Return this rank's result of ``work`` without an exchange."""
    return work()


def _layout_of(inputs: VisionInputs) -> tuple[object, ...]:
    """Return the grids of each path, the tiles and the sizes of images: equal on all ranks."""
    grids = {name: path.grid_thw.tolist() for name, path in inputs.paths.items()}
    return grids, inputs.tiles, inputs.image_sizes
