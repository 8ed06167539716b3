"""An encoder that shares out the items of each call among the ranks of a process group.

Shapes: P patches (rows of ``pixel_values``), N tokens, D width of a pooled vector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from encoders.contract import (
    EncoderOutput,
    GraphableEncoder,
    Grid,
    GridLike,
    MultiPathEncoder,
)
from encoders.inputs.grids import read_grid
from encoders.streams import EncodesItems, ItemResults
from encoders.streams.calls import join_outputs
from graphwrap import GraphedEncoder
from graphwrap.guards import read_outputs

from .shares import Shares, cost_of, share_out
from .status import StatusExchange


class _Part(NamedTuple):
    """What this rank has computed: rows of its own items, by field."""

    shares: Shares
    fields: list[tuple[str, Tensor]]

    @property
    def about(self) -> str:
        """What has to be equal on all ranks before rows are exchanged."""
        shapes = [(name, one.dtype, tuple(one.shape[1:])) for name, one in self.fields]
        return repr((self.shares.grids, shapes))


class DataParallelEncoder:
    """Encodes the items of each call on all ranks of a group, and returns all results on each.

    Items are assigned by what they cost (:func:`vitgraph.parallel.shares.cost_of`), and every rank
    encodes its share in one call of its own encoder: results have the bits that one process
    computes for the same shares. As with any collective, all ranks make the same calls in the same
    order; making an object is one of them. No gradients are recorded. An object encodes one call at
    a time, whichever thread makes it.

    Args:
        encoder: on this rank's device: an encoder, or a :class:`GraphedEncoder` of one. All ranks
            hold equal weights.
        group: None takes the default group.
        scatter: True if every rank passes the same items. False if each rank passes items of its
            own and wants their results alone: nothing but errors is exchanged.
        outputs: fields of :class:`EncoderOutput` to return. The others are None, and no bytes are
            exchanged for them.

    Attributes:
        encoder, scatter, outputs: as given.
        group: as given.
        rank, size: of this process in the group, and of the group.

    Raises:
        ValueError: no process group, a group that this process is not in or that cannot reach the
            encoder's device, a field that is unknown or that the graphs leave out, or a tower with
            several inputs per item.
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
        self.encoder, self.group, self.scatter = encoder, group, scatter
        self.outputs = read_outputs(outputs)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: pass one that it is in")
        module: nn.Module = encoder if isinstance(encoder, nn.Module) else encoder.encoder
        if isinstance(module, MultiPathEncoder):
            raise ValueError(
                f"{type(module).__name__} has several inputs per item, and only one can be shared "
                "out: give each rank images of its own and call encode"
            )
        if isinstance(encoder, GraphedEncoder):
            for name in self.outputs:
                if name not in encoder.outputs:
                    raise ValueError(f"outputs: the graphs leave out {name}; name it there, too")
        self._contract = cast(GraphableEncoder, module)
        self._lock = threading.Lock()
        self._device = next(module.parameters()).device
        config = dist.get_backend_config(group).split(",")
        backends = dict(entry.split(":", 1) for entry in config)
        self._channel = self._find_channel(backends)
        self._status = StatusExchange(group, backends)

    def _find_channel(self, backends: Mapping[str, str]) -> torch.device:
        """The device through which rows travel: the encoder's, or the CPU if gloo carries them."""
        direct = backends.get(self._device.type)
        if direct is not None and direct != "gloo":
            return self._device
        if "cpu" in backends:
            return torch.device("cpu")
        raise ValueError(
            f"the encoder is on {self._device}, and the group reaches {', '.join(backends)} alone: "
            "move the encoder there, or call init_process_group('gloo')"
        )

    def __call__(self, pixel_values: Tensor, grid_thw: GridLike) -> EncoderOutput:
        """Encode a batch of items.

        Args:
            pixel_values: the rows of all items, [P, *row_shape], as the encoder takes them; each
                rank reads the rows of its share alone.
            grid_thw: [items, 3], as the encoder takes it.

        Returns:
            :class:`EncoderOutput` on the encoder's device, items in the caller's order; fields not
            in ``outputs`` are None.

        Raises:
            ValueError: input that is refused on any rank, or calls that differ between ranks.
            RuntimeError: another rank failed, and the message says how; or a rank has ended, or
                came later than the timeout of the group.
        """

        def work() -> _Part:
            shares = self._share(grid_thw)
            return self._part(shares, self._encode(shares.select(pixel_values), shares.my_grids))

        with self._lock, torch.no_grad():
            return self._whole(self._gather(self._together(work)))

    def encode(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        pool: str = "none",
        normalize: bool = False,
        max_tokens_per_call: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> list[EncoderOutput] | list[Tensor]:
        """Encode images and videos: one result per item, images first, then videos.

        With ``scatter=True`` every rank decodes all items, because shares follow from their sizes.
        With a pool, vectors are exchanged and no tokens.

        Args:
            images: as ``preprocess`` takes them.
            videos: as ``preprocess`` takes them.
            pool: "none", "mean", "max" or "cls", as ``encode`` of an encoder takes it.
            normalize: divide each vector by its L2 norm; needs a pool.
            max_tokens_per_call: most output tokens that a rank encodes in one call.
            min_pixels: as ``preprocess`` takes it.
            max_pixels: as ``preprocess`` takes it.
            max_tiles: as ``preprocess`` takes it.
            fps: as ``preprocess`` takes it.
            num_frames: as ``preprocess`` takes it.

        Returns:
            One :class:`EncoderOutput` per item or, with a pool, one tensor [D] per item; each has
            memory of its own.

        Raises:
            ValueError: what ``preprocess`` refuses on any rank, and as a call raises it.
            RuntimeError: as a call raises it.
        """
        wanted = ItemResults(pool, normalize, max_tokens_per_call)

        def work() -> _Part:
            encoding = cast(EncodesItems, self.encoder).encoding()
            encoding.check(wanted)
            inputs = encoding.encoder.preprocess(
                images,
                videos,
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                max_tiles=max_tiles,
                fps=fps,
                num_frames=num_frames,
            )
            shares = self._share(inputs.grid_thw)
            rows = shares.select(inputs.pixel_values)
            if not shares.mine:
                return self._nothing(shares, self._encode(rows, []), pool)
            chosen = inputs.grid_thw[torch.tensor(shares.mine)]
            mine = inputs._replace(pixel_values=rows, grid_thw=chosen)
            results = encoding.run(mine, wanted)
            if pool == "none":
                part = self._part(shares, join_outputs(results))
            else:
                part = _Part(shares, [("vectors", torch.stack(results))])
            return part

        with self._lock, torch.no_grad():
            part = self._together(work)
            gathered = self._gather(part)
            if pool != "none":
                return [vector.clone() for vector in gathered[0]]
            items = self._contract.split(self._whole(gathered), part.shares.grids)
            return [item.clone() for item in items]

    def _share(self, grid_thw: GridLike) -> Shares:
        """Read the grid of a call, and assign its items."""
        grids = read_grid(grid_thw)
        specs = self._contract.item_specs(grids)
        if not self.scatter:
            every = list(range(len(grids)))
            return Shares(grids, specs, [every] * self.size, every)
        of_ranks = share_out([cost_of(spec) for spec in specs], self.size)
        return Shares(grids, specs, of_ranks, of_ranks[self.rank])

    def _encode(self, pixel_values: Tensor, grids: list[Grid]) -> EncoderOutput:
        call = cast(Callable[[Tensor, list[Grid]], EncoderOutput], self.encoder)
        return call(pixel_values, grids)

    def _part(self, shares: Shares, output: EncoderOutput) -> _Part:
        """The fields of an output that are wanted, DeepStack features last."""
        fields: list[tuple[str, Tensor]] = []
        for name in ("last_hidden_state", "pooler_output", "deepstack_features"):
            if name in self.outputs:
                value = output._asdict()[name]
                layers = value if isinstance(value, tuple) else (value,)
                fields += [(name, layer) for layer in layers]
        return _Part(shares, fields)

    def _nothing(self, shares: Shares, empty: EncoderOutput, pool: str) -> _Part:
        """The part of a rank without items, which has the widths and dtypes of the others."""
        if pool == "none":
            return self._part(shares, empty)
        rows = empty.last_hidden_state if pool == "cls" else empty.pooler_output
        assert rows is not None  # `check` has seen to it
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return _Part(shares, [("vectors", rows.new_zeros((0, rows.shape[-1]), dtype=dtype))])

    def _together(self, work: Callable[[], _Part]) -> _Part:
        return self._status.run(work, lambda part: part.about if self.scatter else "")

    def _gather(self, part: _Part) -> list[Tensor]:
        """The rows of all items in every field, from the parts of all ranks.

        Raises:
            RuntimeError: a rank has ended meanwhile (gloo; NCCL ends the process at its timeout).
        """
        if not self.scatter:
            return [rows for _, rows in part.fields]
        indices: dict[tuple[int, ...], Tensor] = {}
        whole = []
        for name, rows in part.fields:
            counts = part.shares.counts(name)
            if (key := tuple(counts)) not in indices:
                indices[key] = part.shares.places(counts).to(rows.device, non_blocking=True)
            whole.append(self._gather_rows(rows, part.shares.most(counts), indices[key]))
        return whole

    def _gather_rows(self, rows: Tensor, most: int, places: Tensor) -> Tensor:
        """The rows of all ranks at ``places``; a rank has up to ``most``, the rest is padding."""
        if not most:
            return rows
        mine = rows.new_empty((most, *rows.shape[1:]), device=self._channel)
        mine[: len(rows)] = rows
        every = mine.new_empty((self.size * most, *rows.shape[1:]))
        # As bytes: a backend need not know the dtype.
        sent, received = (one.flatten().view(torch.uint8) for one in (mine, every))
        dist.all_gather_into_tensor(received, sent, group=self.group)
        return every.to(rows.device).index_select(0, places)

    def _whole(self, gathered: list[Tensor]) -> EncoderOutput:
        """The output with the fields that are wanted, from tensors in the order of ``_part``."""
        left = list(gathered)
        hidden = left.pop(0) if "last_hidden_state" in self.outputs else None
        pooled = left.pop(0) if "pooler_output" in self.outputs else None
        deepstack = tuple(left) if "deepstack_features" in self.outputs else None
        return EncoderOutput(hidden, pooled, deepstack)
