"""One remote file, read by byte range over the Hub client's own HTTP session, token and endpoint.

The Hub redirects weights to a storage host. The redirect is followed once a file and remembered
(and asked for again when it expires), so that a range costs one request. Connections that break
are taken up again at the byte; a server that cannot do ranges is told apart from one that fails.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's library
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not marked public
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from .errors import CheckpointError

ATTEMPTS = 6
"""Tries without a megabyte of progress before a file is given up."""
FIRST_WAIT = 0.5
"""Seconds before the second try; each further one waits twice as long, give or take a quarter."""
LONGEST_WAIT = 30.0
LONGEST_ASKED_WAIT = 300.0
"""The window of the Hub's rate limits."""
CHUNK = 1 << 20
_BUSY = {408, 429, 500, 502, 503, 504}
_EXPIRED = {400, 401, 403, 404, 410}
"""What a storage host answers when a signed address is too old."""


class RangesUnsupported(Exception):
    """The server ignores byte ranges, or answers other bytes than it was asked for."""


class _TryAgain(Exception):
    def __init__(self, wait: float | None = None) -> None:
        super().__init__()
        self.wait = wait


class RemoteFile:
    """A file of a repo at one commit."""

    def __init__(self, url: str, token: bool | str | None, label: str) -> None:
        self.url = url
        self.token = token
        self.label = label
        self.etag: str | None = None
        """The Hub's name for the content, known after the first read."""
        self.size: int | None = None
        """Bytes of the whole file, known after the first range."""
        self._direct: str | None = None

    def read(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to ``end``, fewer if the file ends before.

        Raises:
            RangesUnsupported: the server does not do byte ranges.
            CheckpointError: the connection broke too often.
        """
        return b"".join(self.stream(start, end))

    def stream(self, start: int, end: int) -> Iterator[bytes]:
        """As :meth:`read`, in chunks of at most a megabyte."""
        position, settled, failures = start, start, 0
        while position < min(end, self.size or end):
            try:
                for chunk in self._request(position, end):
                    position += len(chunk)
                    yield chunk
            except (HTTPError, _TryAgain) as error:
                failures = 1 if position - settled >= CHUNK else failures + 1
                settled = position
                self._wait(failures, error)

    def whole(self, limit: int) -> bytes:
        """The whole of a small file.

        Raises:
            CheckpointError: more than ``limit`` bytes, or the connection broke too often.
        """
        failures = 0
        while True:
            try:
                with self._open({}) as response:
                    return self._collect(response, limit)
            except (HTTPError, _TryAgain) as error:
                failures += 1
                self._wait(failures, error)

    def _collect(self, response: Any, limit: int) -> bytes:
        parts, total = [], 0
        for chunk in response.iter_bytes(CHUNK):
            total += len(chunk)
            if total > limit:
                raise CheckpointError(f"{self.label}: more than the {limit} bytes that are read")
            parts.append(chunk)
        return b"".join(parts)

    def _request(self, start: int, end: int) -> Iterator[bytes]:
        with self._open({"Range": f"bytes={start}-{end - 1}"}) as response:
            left = self._promised(response, start, end)
            for chunk in _coarse(response):
                if len(chunk) > left:
                    raise RangesUnsupported(f"{self.label}: more bytes than were asked for")
                left -= len(chunk)
                yield chunk
        if left:
            raise _TryAgain

    def _promised(self, response: Any, start: int, end: int) -> int:
        """How many bytes the answer says it brings; they must be those asked for."""
        if response.status_code != 206 or "content-encoding" in response.headers:
            raise RangesUnsupported(f"{self.label}: the server ignores byte ranges")
        said = response.headers.get("content-range", "")
        match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", said)
        if match is None:
            raise RangesUnsupported(f"{self.label}: the server answers the range {said[:60]!r}")
        first, last, size = map(int, match.groups())
        self.size = size if self.size is None else self.size
        length = response.headers.get("content-length")
        wanted = min(end, size) - start
        if (first, last + 1, size) != (start, min(end, size), self.size) or (
            length is not None and length != str(wanted)
        ):
            raise RangesUnsupported(
                f"{self.label}: asked for bytes {start} to {end - 1}, the server answers "
                f"{said!r} with {length} bytes"
            )
        return wanted

    @contextmanager
    def _open(self, extra: dict[str, str]) -> Iterator[Any]:
        direct = self._direct
        address = direct or self.url
        headers = build_hf_headers(token=self.token, library_name="vitgraph")
        headers |= {"Accept-Encoding": "identity", **extra}
        if direct and _host(direct) != _host(self.url):
            headers.pop("authorization", None)  # as on a redirect: the token is the Hub's alone
        timeout = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", address, headers=headers, follow_redirects=True, timeout=timeout
        ) as response:
            if direct and response.status_code in _EXPIRED:
                self._direct = None
                raise _TryAgain(0)
            if response.status_code in _BUSY:
                raise _TryAgain(_retry_after(response))
            hf_raise_for_status(response)
            if direct is None:
                self._remember(response)
            yield response

    def _remember(self, response: Any) -> None:
        answers = [answer.headers for answer in (*response.history, response)]
        linked = [headers["x-linked-etag"] for headers in answers if "x-linked-etag" in headers]
        self.etag = linked[0] if linked else response.headers.get("etag")
        self._direct = str(response.url) if response.history else None

    def _wait(self, failures: int, error: Exception) -> None:
        """Sleep before the next try, or raise what stands in the way of one."""
        if isinstance(error, HfHubHTTPError):
            raise error
        if failures >= ATTEMPTS:
            reason = f"{type(error).__name__}: {error}" if str(error) else "cut off or too busy"
            raise CheckpointError(
                f"{self.label}: given up after {failures} tries ({reason}); what has arrived is "
                "kept: load again to go on"
            ) from error
        asked = error.wait if isinstance(error, _TryAgain) else None
        wait = FIRST_WAIT * 2 ** (failures - 1) * random.uniform(0.75, 1.25)
        time.sleep(min(wait, LONGEST_WAIT) if asked is None else min(asked, LONGEST_ASKED_WAIT))


def _coarse(response: Any) -> Iterator[bytes]:
    """The body in chunks of about a megabyte; the last, when the connection breaks, is shorter.

    The client's own chunks of a chosen size would lose what had arrived of that one.
    """
    held, size = [], 0
    try:
        for chunk in response.iter_raw():
            held.append(chunk)
            size += len(chunk)
            if size >= CHUNK:
                yield b"".join(held)
                held, size = [], 0
    except HTTPError:
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)


def _retry_after(response: Any) -> float | None:
    """Seconds that a server asks to wait, as usual or as the Hub does: ``ratelimit: ...;t=55``."""
    limit = re.search(r";\s*t=(\d{1,5})\b", response.headers.get("ratelimit", ""))
    if response.status_code == 429 and limit:
        return float(limit[1]) + 1
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else None


def _host(url: str) -> str:
    return urlsplit(url).netloc
