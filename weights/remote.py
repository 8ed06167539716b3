"""One remote file, read by byte range over the Hub client's own HTTP session, token and endpoint.

The Hub redirects weights to a storage host. The redirect is followed once a file and remembered
(and asked for again when it expires), so that a range costs one request. Connections that break
are taken up again at the byte; a server that cannot do ranges is told apart from one that fails.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's library
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not marked public
    get_session,
    hf_raise_for_status,
)

from .errors import CheckpointError
from .request_headers import request_headers
from .workers import Stopped

ATTEMPTS = 6
"""Tries without a megabyte of progress before a file is given up."""
FIRST_WAIT = 0.5
"""Seconds before the second try; each further one waits twice as long, give or take a quarter."""
LONGEST_WAIT = 30.0
LONGEST_ASKED_WAIT = 300.0
"""The window of the Hub's rate limits."""
CHUNK = 1 << 20
BUSY = {408, 429, 500, 502, 503, 504}
"""What a server answers that may well answer rightly a little later."""
_EXPIRED = {400, 401, 403, 404, 410}
"""What a storage host answers when a signed address is too old."""
_PORTS = {"http": 80, "https": 443}


class RangesUnsupported(Exception):
    """The server ignores byte ranges, or answers other bytes than it was asked for."""


class GivenUpError(CheckpointError):
    """The server was too busy, or the connection broke, too often."""


class TryAgain(Exception):
    """A request failed in a way that another try may mend, after ``wait`` seconds if it says so."""

    def __init__(self, reason: str, wait: float | None = None, *, early: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.early = early
        """A range was promised and its body ended before that."""


class RemoteFile:
    """A file of a repo at one commit."""

    def __init__(self, url: str, token: bool | str | None, label: str) -> None:
        self.url = url
        self.token = token
        self.label = label
        self.etag: str | None = None
        """The Hub's name for the content, known after the first read."""
        self.commit: str | None = None
        """The commit that the Hub says it is of, known after the first read."""
        self.size: int | None = None
        """Bytes of the whole file, known after the first range."""
        self._direct: str | None = None

    def read(self, start: int, end: int, stop: Event | None = None) -> bytes:
        """The bytes from ``start`` up to ``end``, fewer if the file ends before.

        Raises:
            RangesUnsupported: the server does not do byte ranges.
            GivenUpError: the connection broke too often.
        """
        return b"".join(self.stream(start, end, stop))

    def stream(self, start: int, end: int, stop: Event | None = None) -> Iterator[bytes]:
        """As :meth:`read`, in chunks of about a megabyte; raises :class:`Stopped` on ``stop``."""
        position, settled, failures, early = start, start, 0, 0
        while position < min(end, end if self.size is None else self.size):
            try:
                for chunk in self._request(position, end, stop):
                    position += len(chunk)
                    yield chunk
            except (HTTPError, TryAgain) as error:
                settling = position - settled >= CHUNK
                failures, early = (1, 0) if settling else (failures + 1, early)
                early += isinstance(error, TryAgain) and error.early
                settled = position
                if early == ATTEMPTS:
                    raise RangesUnsupported(f"{self.label}: ranges always end early") from error
                wait_to_try_again(self.label, failures, error, stop)

    def beginning(self, end: int) -> bytes:
        """The first bytes of the whole file, asked for without a range; the rest is not read.

        Raises:
            RangesUnsupported: the answer is encoded, so that its bytes are not the file's.
        """
        parts, total = [], 0
        with self._open({}, None) as response:
            if response.status_code != 200 or "content-encoding" in response.headers:
                raise RangesUnsupported(f"{self.label}: the server answers other bytes")
            for chunk in response.iter_raw():
                parts.append(chunk)
                total += len(chunk)
                if total >= end:
                    break
        return b"".join(parts)[:end]

    def whole(
        self,
        limit: int,
        *,
        attempts: int = ATTEMPTS,
        longest: float = LONGEST_ASKED_WAIT,
    ) -> bytes:
        """The whole of a small file.

        Args:
            limit: the most bytes that it may have.
            attempts: tries before it is given up.
            longest: given up at once if the server asks for a longer wait, seconds.

        Raises:
            CheckpointError: more than ``limit`` bytes.
            GivenUpError: the connection broke too often.
        """
        failures = 0
        while True:
            try:
                with self._open({}, None) as response:
                    if response.status_code != 200:
                        raise TryAgain(f"the server answers {response.status_code}")
                    return self._collect(response, limit)
            except (HTTPError, TryAgain) as error:
                failures += 1
                asked = error.wait if isinstance(error, TryAgain) else None
                if failures >= attempts or (asked is not None and asked > longest):
                    raise given_up(self.label, failures, error) from error
                wait_to_try_again(self.label, failures, error, None)

    def _collect(self, response: Any, limit: int) -> bytes:
        said = response.headers.get("content-length", "")
        if said.isdecimal() and int(said[:19]) > limit:
            raise CheckpointError(f"{self.label}: {said[:19]} bytes, at most {limit} are read")
        parts, total = [], 0
        for chunk in response.iter_bytes(CHUNK):
            total += len(chunk)
            if total > limit:
                raise CheckpointError(f"{self.label}: more than the {limit} bytes that are read")
            parts.append(chunk)
        return b"".join(parts)

    def _request(self, start: int, end: int, stop: Event | None) -> Iterator[bytes]:
        with self._open({"Range": f"bytes={start}-{end - 1}"}, stop) as response:
            left = self._promised(response, start, end)
            for chunk in _coarse(response):
                if len(chunk) > left:
                    raise RangesUnsupported(f"{self.label}: more bytes than were asked for")
                left -= len(chunk)
                yield chunk
        if left:
            raise TryAgain("the answer ended early", early=True)

    def _promised(self, response: Any, start: int, end: int) -> int:
        """How many bytes the answer says it brings; they must be those asked for."""
        said = response.headers.get("content-range", "")
        if response.status_code == 416:
            return self._past_the_end(said, start)
        if response.status_code != 206 or "content-encoding" in response.headers:
            raise RangesUnsupported(f"{self.label}: the server ignores byte ranges")
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

    def _past_the_end(self, said: str, start: int) -> int:
        """No bytes, if the server says that the file ends before ``start``."""
        match = re.fullmatch(r"bytes \*/(\d{1,18})", said)
        if match is None or int(match[1]) > start or self.size not in (None, int(match[1])):
            raise RangesUnsupported(f"{self.label}: the server refuses a range of the file")
        self.size = int(match[1])
        return 0

    @contextmanager
    def _open(self, extra: dict[str, str], stop: Event | None) -> Iterator[Any]:
        if stop is not None and stop.is_set():
            raise Stopped
        direct = self._direct
        address = direct or self.url
        headers = request_headers(self.token) | extra
        if direct and _origin(direct) != _origin(self.url):
            headers.pop("authorization", None)  # as on a redirect: the token is the Hub's alone
        timeout = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", address, headers=headers, follow_redirects=True, timeout=timeout
        ) as response:
            if direct and response.status_code in _EXPIRED:
                self._direct = None
                raise TryAgain("a signed address expired", 0)
            if response.status_code in BUSY:
                reason = f"the server answers {response.status_code}"
                raise TryAgain(reason, retry_after(response))
            if response.status_code != 416 or not extra:
                hf_raise_for_status(response)
            if direct is None:
                self._remember(response)
            yield response

    def _remember(self, response: Any) -> None:
        answers = [answer.headers for answer in (*response.history, response)]
        linked = [headers["x-linked-etag"] for headers in answers if "x-linked-etag" in headers]
        commits = [headers["x-repo-commit"] for headers in answers if "x-repo-commit" in headers]
        self.etag = linked[0] if linked else response.headers.get("etag")
        self.commit = commits[0] if commits else None
        self._direct = str(response.url) if response.history else None


def wait_to_try_again(label: str, failures: int, error: Exception, stop: Event | None) -> None:
    """Sleep before the next try, or raise what stands in the way of one.

    Raises:
        HfHubHTTPError: ``error``, if that is what the server has to say.
        GivenUpError: there were tries enough.
        Stopped: ``stop`` is set, at once when that happens.
    """
    if isinstance(error, HfHubHTTPError):
        raise error
    if failures >= ATTEMPTS:
        raise given_up(label, failures, error) from error
    asked = error.wait if isinstance(error, TryAgain) else None
    wait = FIRST_WAIT * 2 ** (failures - 1) * random.uniform(0.75, 1.25)
    _sleep(min(wait, LONGEST_WAIT) if asked is None else min(asked, LONGEST_ASKED_WAIT), stop)


def given_up(label: str, failures: int, error: Exception) -> GivenUpError:
    """The error once there were tries enough."""
    kind = "" if isinstance(error, TryAgain) else f"{type(error).__name__}: "
    return GivenUpError(
        f"{label}: given up after {failures} tries ({kind}{error}); what has arrived is kept: "
        "load again to go on"
    )


def _sleep(seconds: float, stop: Event | None) -> None:
    if (stop or Event()).wait(seconds):
        raise Stopped


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
    except HTTPError as error:
        if held:
            yield b"".join(held)
        if type(error).__name__ != "RemoteProtocolError":  # a stall or a reset, and not an end
            raise
        raise TryAgain(f"the answer ended early: {error}", early=True) from error
    if held:
        yield b"".join(held)


def retry_after(response: Any) -> float | None:
    """Seconds that a server asks to wait, as usual or as the Hub does: ``ratelimit: ...;t=55``."""
    limit = re.search(r";\s*t=(\d{1,5})\b", response.headers.get("ratelimit", ""))
    if response.status_code == 429 and limit:
        return float(limit[1]) + 1
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: all three decide whom a token is sent to."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
