"""What ``encode_many`` shows while it runs: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from types import SimpleNamespace

import pytest
import tqdm.auto  # noqa: F401  # before a test lets it look for a notebook

from encoders.streams.progress import Progress
from tests.support.towers.streams import NumberEncoder


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_the_bar_of_a_terminal_counts_items_and_names_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # tqdm 4.66 cuts the line to it
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    encoder = NumberEncoder()
    encoder.seconds = 0.02
    list(encoder.encode_many(range(12), batch_tokens=10, workers=1))
    assert "12/12" in screen.getvalue()
    assert "item/s" in screen.getvalue()
    assert "tokens/s, waiting for decoding" in screen.getvalue()


@pytest.mark.parametrize("sized", [True, False])
def test_the_bar_ends_at_100_percent_also_of_an_unknown_number(
    sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    items = range(30) if sized else iter(range(30))
    list(NumberEncoder().embed_many(items, pool="mean"))
    assert "100%" in screen.getvalue().splitlines()[-1]


def test_a_notebook_has_a_bar_although_it_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    ipython = SimpleNamespace(get_ipython=lambda: kernel)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    list(NumberEncoder().embed_many(range(30), pool="mean"))
    assert "30/30" in capsys.readouterr().err


def test_the_bar_is_full_when_the_last_result_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    results = NumberEncoder().embed_many(range(30), pool="mean")
    for _ in range(30):  # and never asks whether there is another
        next(results)
    assert "100%" in screen.getvalue()


def test_a_log_gets_a_line_per_so_many_items(capsys: pytest.CaptureFixture[str]) -> None:
    list(NumberEncoder().embed_many(range(250), pool="mean"))
    said = lines_of(capsys)
    assert [line.split(",")[0] for line in said] == [
        "encode: 100 of 250 items (40%)",
        "encode: 200 of 250 items (80%)",
        "encode: 250 of 250 items (100%)",
    ]
    assert "tokens/s, waiting for" in said[-1]


def test_a_log_of_an_unknown_number_ends_with_the_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    list(NumberEncoder().embed_many(iter(range(7)), pool="mean"))
    (line,) = lines_of(capsys)
    assert line.startswith("encode: 7 of 7 items (100%), ")


def test_a_log_says_where_an_error_ended_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = NumberEncoder()
    encoder.bad = {5}
    with pytest.raises(ValueError, match="item 5"):
        list(encoder.embed_many(range(9), batch_tokens=10, pool="mean"))
    (line,) = lines_of(capsys)
    assert line.startswith("encode: 5 of 9 items (55%), ")
    assert "left" not in line


@pytest.mark.parametrize("sized", [True, False])
def test_a_log_says_how_far_a_stream_was_read(
    sized: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    results = NumberEncoder().embed_many(range(9) if sized else iter(range(9)), pool="mean")
    assert isinstance(results, Generator)
    for _ in range(4):
        next(results)
    results.close()
    (line,) = lines_of(capsys)
    assert line.startswith("encode: 4 of 9 items (44%), " if sized else "encode: 4 items, ")


def test_neither_a_bar_nor_a_log_is_full_if_the_last_item_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = NumberEncoder()
    encoder.bad = {249}
    with pytest.raises(ValueError, match="item 249"):
        list(encoder.embed_many(range(250), pool="mean"))
    assert lines_of(capsys)[-1].startswith("encode: 249 of 250 items (99%), ")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with pytest.raises(ValueError, match="item 249"):
        list(encoder.embed_many(range(250), pool="mean"))
    assert "249/250" in screen.getvalue()
    assert "250/250" not in screen.getvalue()


def test_a_bar_says_how_far_a_stream_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    results = NumberEncoder().embed_many(range(9), pool="mean")
    assert isinstance(results, Generator)
    for _ in range(4):
        next(results)
    results.close()
    assert "4/9" in screen.getvalue().splitlines()[-1]


def test_items_whose_errors_are_kept_count_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = NumberEncoder()
    encoder.bad = {8}
    list(encoder.embed_many(range(9), pool="mean", on_error="keep"))
    assert lines_of(capsys)[-1].startswith("encode: 9 of 9 items (100%), ")


def test_lines_per_item_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, visible=True, per_line=2) as progress:
        for _ in range(4):
            progress.update()
    assert [line[:16] for line in lines_of(capsys)] == ["encode: 2 of 4 i", "encode: 4 of 4 i"]


def test_nothing_is_shown_where_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    list(NumberEncoder().embed_many(range(300), pool="mean", progress=False))
    stream = NumberEncoder().embed_many(range(300), pool="mean")
    del stream  # never begun
    assert lines_of(capsys) == []
