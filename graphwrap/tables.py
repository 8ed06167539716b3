"""Measured times as a file: what they were measured on is kept beside them, and compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from encoders.contract import Accelerator, GraphableEncoder

from .budgets import Budget, Ladder
from .costs import CostTable
from .forward import Asked

MOST_MS = 1e12
"""More than thirty years: no time that was measured, and its eighth power still a number."""
REMEDY = "capture here and save_table again"
PRICES = tuple(field.name for field in dataclasses.fields(CostTable) if field.name != "empty_ms")
"""Every number of a table but the list by budgets."""


def fingerprint(
    encoder: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    outputs: Sequence[str],
    asked: Asked,
) -> dict[str, str]:
    """All that times depend on and that may differ between two processes."""
    weights = [*encoder.named_parameters(), *encoder.named_buffers()]
    shapes = "\n".join(f"{name} {tuple(weight.shape)}" for name, weight in weights)
    on_cuda = device.type == "cuda"
    return {
        "encoder": type(encoder).__name__,
        "weights": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "rows": "x".join(map(str, cast(GraphableEncoder, encoder).row_shape)),
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name(device) if on_cuda else device.type,
        "torch": torch.__version__,
        "compile": str(asked.compiled),
        "kernels": asked.kernels,
        "precision": asked.precision,
        "outputs": " ".join(sorted(outputs)),
    }


@dataclass(frozen=True)
class SavedTable:
    """A table of another process, read and checked."""

    path: str
    made_on: dict[str, object]
    costs: CostTable
    replay_ms: dict[Budget, float]
    """Milliseconds of a full replay, where they were measured."""
    kernels: dict[str, Any] | None = None
    """Choices of the accelerator, None where there was none."""

    def write(self) -> None:
        """Write the table as JSON."""
        times = sorted(self.costs.empty_ms.items())
        body = {
            "fingerprint": self.made_on,
            **{name: getattr(self.costs, name) for name in PRICES},
            "empty_ms": [
                {**budget._asdict(), "ms": ms, "replay_ms": self.replay_ms.get(budget)}
                for budget, ms in times
            ],
            "kernels": self.kernels,
        }
        Path(self.path).write_text(json.dumps(body, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SavedTable:
        """Read a table that :meth:`write` wrote.

        Raises:
            ValueError: no such file, or one that is no such table.
        """
        try:
            body = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as a table ({error}): give a file that save_table wrote"
            ) from error
        return _Reader(os.fspath(path), body).table()

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Raise unless the times were measured on this.

        Raises:
            ValueError: the first difference.
        """
        for key, value in fingerprint.items():
            if self.made_on.get(key) != value:
                raise ValueError(
                    f"{self.path} was measured with {key}={self.made_on.get(key)!r}, this is "
                    f"{value!r}: {REMEDY}, or load_table(None) to measure"
                )

    def choose(self, accelerator: Accelerator) -> None:
        """Have an accelerator take the kernels that were chosen where the times were measured.

        Raises:
            ValueError: the table names a kernel that cannot run here.
        """
        if self.kernels is None:
            return
        try:
            accelerator.load_choices(self.kernels)
        except ValueError as error:
            raise ValueError(f"kernels of {self.path}: {error}") from error

    def timed(self, ladder: Ladder) -> Ladder:
        """The budgets to capture: an inferred ladder ends where the table does.

        (Memory, or a failed capture, had lowered it there where the table was measured.)

        Raises:
            ValueError: a budget that the table has no time for.
        """
        most = max(budget.rows for budget in self.costs.empty_ms)
        budgets = tuple(b for b in ladder.budgets if b.rows <= most or not ladder.inferred)
        missing = [budget.name for budget in budgets if budget not in self.costs.empty_ms]
        if missing or not budgets:
            names = missing or [budget.name for budget in ladder.budgets]
            raise ValueError(
                f"{self.path} has no times for budgets {names}: use the ladder it was measured "
                f"for, or {REMEDY}"
            )
        return dataclasses.replace(ladder, budgets=budgets)

    def prices(self, budgets: Sequence[Budget]) -> CostTable:
        """The table of these budgets alone."""
        times = {budget: self.costs.empty_ms[budget] for budget in budgets}
        return dataclasses.replace(self.costs, empty_ms=times)


@dataclass(frozen=True)
class _Reader:
    """Takes a table apart, and says what is wrong with it."""

    path: str
    body: Any

    def table(self) -> SavedTable:
        made_on = self._entry("fingerprint", dict)
        times, replays = dict[Budget, float](), dict[Budget, float]()
        for row in self._entry("empty_ms", list):
            budget = self._budget(row)
            times[budget] = self._milliseconds(f"ms of {budget.name}", row.get("ms"))
            if row.get("replay_ms") is not None:
                what = f"replay_ms of {budget.name}"
                replays[budget] = self._milliseconds(what, row["replay_ms"])
        if not times:
            raise self._wrong("it has no budgets")
        prices = {name: self._milliseconds(name, self.body.get(name)) for name in PRICES}
        costs = CostTable(empty_ms=times, **prices)
        return SavedTable(self.path, made_on, costs, replays, self._kernels())

    def _kernels(self) -> dict[str, Any] | None:
        if "kernels" not in self.body:
            raise self._wrong("it has no kernels")
        kernels: dict[str, Any] | None = self.body["kernels"]
        if kernels is not None and type(kernels) is not dict:
            raise self._wrong(f"kernels is {kernels!r}, not the choices of an accelerator")
        return kernels

    def _entry(self, name: str, kind: type) -> Any:
        if not isinstance(self.body, dict) or not isinstance(self.body.get(name), kind):
            raise self._wrong(f"it has no {name}")
        return self.body[name]

    def _budget(self, row: Any) -> Budget:
        held: list[Any] = [row.get(name) for name in Budget._fields] if type(row) is dict else []
        if not held or any(type(value) is not int or value < 0 for value in held):
            raise self._wrong(f"{row!r} is no budget with {', '.join(Budget._fields)}")
        return Budget(*held)

    def _milliseconds(self, what: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value < MOST_MS:
            raise self._wrong(f"{what} is {value!r}, not a number of milliseconds")
        return float(value)

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is no table that save_table wrote ({what}): {REMEDY}")
