"""The progress of a stream: a bar on a terminal and in a notebook, and single lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

_FEWEST_PER_LINE = 100
_PER_LINE = 1000
"""The number of items per line of a log if the total number of items is not known."""


class Progress:
    """Counts finished items, and shows the count on standard error.

    Args:
        total: number of items, None if it is not known.
        visible: whether anything is shown.
        per_line: items between two lines of a log; None takes a hundredth of all items, at least
            100, or 1,000 if ``total`` is None.
    """

    def __init__(self, total: int | None, visible: bool, per_line: int | None = None) -> None:
        self.count, self.total, self.visible = 0, total, visible
        guess = _PER_LINE if total is None else max(-(-total // 100), _FEWEST_PER_LINE)
        self.per_line = per_line or guess
        self.note = ""
        """A text that is printed after the count, such as the tokens per second."""
        self._printed_count = 0
        self._start_time = 0.0
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> Progress:
        self._start_time = time.perf_counter()
        self._bar = _new_bar(self.total) if self.visible else None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None and self.count:
            self.total = self.count  # ``total`` may have been an estimate
        if self._bar is None:
            self._print_line(ends=True)
        else:
            self._bar.total = self.total
            self._bar.close()

    def update(self) -> None:
        """Count one more item as done."""
        self.count += 1
        if self._bar is None:
            if self.count % self.per_line == 0 or self.count == self.total:
                self._print_line()
            return
        self._bar.set_postfix_str(self.note, refresh=False)
        self._bar.update()
        if self.count == self.total:  # show it now: the consumer may stop after the last result
            self._bar.refresh()

    def _print_line(self, ends: bool = False) -> None:
        """Print a line with the count, unless a line with this count has been printed.

        ``ends`` is whether no further item will be done, so that the line has no time left.
        """
        if not self.visible or self._printed_count == self.count:
            return
        from tqdm import tqdm

        self._printed_count = self.count
        seconds = max(time.perf_counter() - self._start_time, 1e-9)
        rate = self.count / seconds
        count = f"{self.count:,}"
        if self.total is not None:
            count += f" of {self.total:,}"
        count += " items" if (self.total or self.count) != 1 else " item"
        if self.total:
            count += f" ({100 * self.count // self.total}%)"  # 100% only if all items are done
        note = f", {self.note}" if self.note else ""
        if self.total is not None and self.count < self.total and not ends:
            seconds_left = (self.total - self.count) * seconds / self.count
            note = f", {tqdm.format_interval(seconds_left)} left{note}"
        tqdm.write(f"encode: {count}, {rate:,.1f} items/s{note}", file=sys.stderr)


def _new_bar(total: int | None) -> tqdm[NoReturn] | None:
    """Return a progress bar on a terminal or in a notebook, where a bar can move; else None."""
    if not _in_notebook() and not (sys.stderr is not None and sys.stderr.isatty()):
        return None
    from tqdm.auto import tqdm  # imported here, as importing it takes time

    return tqdm(total=total, desc="encode", unit="item")


def _in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, whose standard error is no terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config
