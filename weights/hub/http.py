"""One remote file, read by byte ranges with the Hub's client: huggingface_hub's session and token.

The Hub redirects weights to a storage host. The redirect is followed once per file and remembered,
so that a range costs one request. Where the storage host refuses a remembered address, because it
has expired or was signed for one range alone, every later range of the file asks the Hub. Busy
servers are asked again by the client's ``http_stream_backoff``. If a connection breaks, this module
requests the bytes that are still missing. The ETag of every answer must equal the first answer's.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from threading import Event, Lock
from typing import Protocol
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import get_token_to_send, hf_raise_for_status, http_stream_backoff

from ..errors import CheckpointError
from ..files.tensor_file import Header, check_size, header_length, parse_header
from ..threads import Stopped, log_if_slow

AGENT = f"vitgraph; hf_hub/{huggingface_hub.__version__}; python/{platform.python_version()}"
"""The user agent of all requests. It is not made by the client's ``build_hf_headers``, which may
send a request of its own first: a load is to send exactly one request for a branch."""
ATTEMPTS = 6
"""The number of tries without a megabyte of progress after which a file is given up."""
FIRST_WAIT = 0.5
"""The seconds before the second try; each further try waits twice as long."""
CHUNK = 1 << 20
"""The bytes that are read at once; a try that gets so many resets the count of tries."""
BUSY = (408, 429, 500, 502, 503, 504)
"""The HTTP statuses of a server that is likely to answer the same request a little later."""
_EXPIRED = (400, 401, 403, 404, 410)
"""The HTTP statuses with which storage hosts refuse expired addresses."""


class Answer(Protocol):
    """The members that this module reads of a response in the Hub client's HTTP library."""

    @property
    def status_code(self) -> int: ...

    @property
    def url(self) -> object: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def history(self) -> Sequence[Answer]: ...

    def iter_raw(self) -> Iterator[bytes]: ...

    def iter_bytes(self, chunk_size: int) -> Iterator[bytes]: ...


_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class RangesUnsupported(Exception):
    """Raised when a server ignores byte ranges, or sends other bytes than were requested."""


class Unreachable(Exception):
    """Raised when a connection broke too often, or could not be made."""


class _Expired(HTTPError):
    """Raised when a storage host refuses an address from the Hub, so that a new one is needed."""


class RemoteFile:
    """A file of a repo at one revision on the Hub.

    Args:
        url: address of the file on the Hub.
        token: access token, as the Hub's client takes it.
        label: name of the file in messages.
    """

    def __init__(self, url: str, token: bool | str | None, label: str) -> None:
        self.url, self.token, self.label = url, token, label
        self.commit: str | None = None  # the commit of the file, from the Hub's first answer
        self.size: int | None = None  # bytes of the whole file, known after the first range
        # Whether byte ranges may be asked for; false once the server ignored one.
        self.ranges = True
        # ETags of the Hub and of the storage host, by the name of the header.
        self.etags: dict[str, str] = {}
        self._comparing = Lock()
        self._direct: str | None = None  # address at the storage host, from the first redirect
        self._address_refused = False  # whether the storage host has refused a remembered address

    def header(self, guess: int) -> Header:
        """Read and check the header of a safetensors file.

        One request suffices if the header ends within the first ``guess`` bytes of the file.
        """
        raw = b"".join(self.stream(0, guess))
        end = 8 + header_length(raw, self.label)
        if end > len(raw) == guess:
            start = len(raw) if self.ranges else 0
            raw = raw[:start] + b"".join(self.stream(start, end))
        if end > len(raw):
            raise CheckpointError(f"{self.label}: ends inside its header: truncated on the Hub")
        header = parse_header(raw[8:end], self.label)
        if self.size is not None:
            check_size(header, self.size, self.label)
        return header

    def stream(self, start: int, end: int, stop: Event | None = None) -> Iterator[bytes]:
        """Yield the bytes from offset ``start`` up to ``end``, or up to the end of a shorter file.

        Raises:
            RangesUnsupported: the server sends other bytes.
            Unreachable: the connection broke too often.
            Stopped: ``stop`` was set by another thread.
        """
        position, failures = start, 0
        while position < (end if self.size is None else min(end, self.size)):
            attempt_start = position
            try:
                for chunk in self._range(position, end, stop):
                    position += len(chunk)
                    yield chunk
            except _Expired:
                continue
            except HTTPError as error:
                failures = 1 if position - attempt_start >= CHUNK else failures + 1
                _wait(failures, ATTEMPTS, error, stop)

    def read_all(self, limit: int, *, patient: bool = True, first: bool = False) -> bytes:
        """Return all bytes of a file.

        Args:
            limit: most bytes to read.
            patient: ask busy servers again, and try connections that break six times, not twice.
            first: whether this is the first request to the Hub. Then a connection that cannot be
                made is tried only twice, even if ``patient``: the machine may be offline.

        Raises:
            CheckpointError: the file has more bytes than ``limit``, or changed while it was read.
            HfHubHTTPError: the server refused.
            Unreachable: the last try failed.
        """
        for failures in count(1):
            content = bytearray()
            try:
                with self._open(None, None, patient=patient) as response:
                    length = response.headers.get("content-length", "")
                    announced = int(length[:19]) if length.isdecimal() else 0
                    for chunk in chain([b""], response.iter_bytes(CHUNK)):
                        content += chunk
                        if (size := max(announced, len(content))) > limit:
                            raise CheckpointError(
                                f"{self.label}: {size} bytes, at most {limit} are read"
                            )
                    break
            except HTTPError as error:
                # httpx raises a ConnectError if there is no network, no such host or no server.
                hasty = not patient or (first and type(error).__name__ == "ConnectError")
                _wait(failures, 2 if hasty else ATTEMPTS, error, None)
        return bytes(content)

    def _range(self, start: int, end: int, stop: Event | None) -> Iterator[bytes]:
        with self._open(f"bytes={start}-{end - 1}", stop) as response:
            remaining = self._promised(response, start, end)
            for chunk in response.iter_raw():
                # A server that ignores ranges sends the whole file; no more of it is read than was
                # asked for.
                if not self.ranges:
                    chunk = chunk[:remaining]
                if len(chunk) > remaining:
                    raise RangesUnsupported(f"{self.label}: more bytes than were asked for")
                remaining -= len(chunk)
                yield chunk
                if not remaining and not self.ranges:
                    return
        if remaining and self.ranges:
            raise HTTPError("the answer ended early")
        if remaining:
            self.size = end - remaining

    def _promised(self, response: Answer, start: int, end: int) -> int:
        """Return the number of bytes that an answer announces for the range ``start`` to ``end``.

        The number is smaller than the range if the file ends within it. If ``start`` is 0, a server
        may ignore the range and send the whole file; any other bytes raise RangesUnsupported.
        """
        headers = response.headers
        content_range, length = headers.get("content-range", ""), headers.get("content-length", "")
        if response.status_code == 416 and content_range in (f"bytes */{self.size}", "bytes */0"):
            self.size = int(content_range[8:])
            return 0
        compressed = "content-encoding" in headers
        if response.status_code == 200 and start == 0 and not compressed:
            self.ranges = False
            self.size = int(length) if length.isdecimal() and len(length) < 19 else None
            return end
        if response.status_code != 206 or compressed:
            raise RangesUnsupported(f"{self.label}: the server ignores byte ranges")
        if match := _RANGE.fullmatch(content_range):
            first, last, size = map(int, match.groups())
            length_wanted = min(end, size) - start
            is_right_range = (first, last + 1) == (start, start + length_wanted)
            is_right_range = is_right_range and self.size in (None, size)
            if is_right_range and length in ("", str(length_wanted)):
                self.size = size
                return length_wanted
        raise RangesUnsupported(
            f"{self.label}: asked for bytes {start} to {end - 1}, the server answers "
            f"{content_range[:60]!r} with {length[:19]} bytes"
        )

    @contextmanager
    def _open(
        self, byte_range: str | None, stop: Event | None, *, patient: bool = True
    ) -> Iterator[Answer]:
        """Send one request, and yield the answer."""
        if stop is not None and stop.is_set():
            raise Stopped
        direct = self._direct
        headers = {"user-agent": AGENT, "accept-encoding": "identity"}
        token = get_token_to_send(self.token)
        if token and (direct is None or _origin(direct) == _origin(self.url)):
            headers["authorization"] = f"Bearer {token}"  # only the Hub may get the user's token
        if byte_range is not None:
            headers["range"] = byte_range
        with (
            log_if_slow(f"{self.label}: waiting for an answer") as stop_notice,
            http_stream_backoff(
                "GET",
                direct or self.url,
                headers=headers,
                follow_redirects=True,
                timeout=huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT,
                max_retries=ATTEMPTS - 1,
                base_wait_time=FIRST_WAIT,
                # Otherwise the client would catch errors in the caller's block and send again.
                retry_on_exceptions=(),
                retry_on_status_codes=BUSY if patient else (),
            ) as response,
        ):
            stop_notice()
            if direct and response.status_code in _EXPIRED:
                self._direct, self._address_refused = None, True
                raise _Expired("the signed address expired")
            if response.status_code != 416 or byte_range is None:
                hf_raise_for_status(response)
            self._compare(response)
            if direct is None and not self._address_refused:
                self._direct = str(response.url) if response.history else None
            yield response

    def _compare(self, response: Answer) -> None:
        """Remember the first answer's ETags; raise a CheckpointError if a later one's differ."""
        headers: dict[str, str] = {}
        for answer in (response, *reversed(response.history)):
            headers |= answer.headers  # the Hub's headers win over a storage host's
        self.commit = self.commit or headers.get("x-repo-commit")
        linked, stored = headers.get("x-linked-etag", ""), response.headers.get("etag", "")
        raw_tags = {"x-linked-etag": linked, "etag": stored}
        # Quotes and the prefix W/ of a weak ETag do not depend on the content.
        bare_tags = {
            kind: tag.strip().removeprefix("W/").strip('"') for kind, tag in raw_tags.items()
        }
        tags = {kind: tag for kind, tag in bare_tags.items() if tag}
        with self._comparing:
            for kind in [kind for kind in tags if kind in self.etags][:1]:
                if self.etags[kind] != tags[kind]:
                    raise CheckpointError(
                        f"{self.label}: changed on the Hub while it was being downloaded (its ETag "
                        f"was {self.etags[kind][:80]!r}, now it is {tags[kind][:80]!r}): load again"
                    )
            self.etags |= tags


def _wait(failures: int, attempts: int, error: Exception, stop: Event | None) -> None:
    """Sleep before the next try of a request, or raise an error if there is no next try."""
    if isinstance(error, HfHubHTTPError):
        raise error
    if failures >= attempts:
        raise Unreachable(f"{failures} tries, {type(error).__name__}: {error}") from error
    if (stop or Event()).wait(FIRST_WAIT * 2 ** (failures - 1)):
        raise Stopped


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL; only a URL that shares the Hub's gets the token."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
