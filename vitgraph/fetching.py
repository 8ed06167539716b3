"""Reads files from the web: one fetcher with strict rules, and ``load_image``, which uses it.

A URL may come from a table or a request that somebody else has written, so it must not reach
servers that only this machine can reach. All addresses of a host name are checked to be public, and
the connection goes to a checked address: a name server that would answer differently a second time
(DNS rebinding) is not asked a second time. The same rules are applied to every redirect.
"""

from __future__ import annotations

import io
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered
from contextlib import closing
from functools import cached_property
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard
from urllib.parse import quote, urljoin, urlsplit

from . import __version__

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from PIL import Image

MOST_REDIRECTS = 5
"""The most redirects of one URL; each new address is checked like the URL itself."""
MOST_SECONDS = 60.0
"""The most seconds for one URL, from looking up its host to the last byte, redirects included."""
MOST_BYTES = 64 * 2**20
"""The largest file in bytes that is read from a URL."""
_CONNECT_SECONDS = 10.0
"""The most seconds to connect to one address of a host, before the next address is tried."""
_HEADERS = {
    "User-Agent": f"vitgraph/{__version__}",
    "Accept": "image/*, */*;q=0.8",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
_REDIRECTS = (301, 302, 303, 307, 308)
_HOLD_IPV4 = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
"""The IPv6 networks whose last 32 bits are an IPv4 address: mapped addresses and NAT64."""
_IPV6_IN_USE, _6TO4 = IPv6Network("2000::/3"), IPv6Network("2002::/16")
"""The IPv6 addresses that are assigned for the public internet; and the 6to4 addresses among them,
which are rejected because each holds an IPv4 address."""
_SPECIAL = IPv4Network("192.0.0.0/24")
"""An address range that is reserved, although older versions of Python call it global."""

Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""A function that returns the IP addresses of a host name and port."""


def addresses_of(host: str, port: int) -> list[str]:
    """Return the IP addresses that the system's resolver finds for a host and port.

    Raises:
        OSError, UnicodeError: it finds none.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in infos]


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet, not to this machine or its
    network."""
    ip = ip_address(address)
    if any(ip in network for network in _HOLD_IPV4):
        ip = IPv4Address(int(ip) & 0xFFFFFFFF)
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast and ip not in _SPECIAL
    return ip.is_global and ip in _IPV6_IN_USE and ip not in _6TO4


class Fetcher:
    """Reads files from https URLs; threads may share one.

    No proxy of the environment is used, and no credentials are sent: no user names, cookies or
    tokens, and a URL that holds a user name is rejected. A file takes at most five redirects and,
    unless ``seconds`` or ``most_bytes`` say otherwise, 60 seconds and 64 MiB.

    Args:
        allowed_hosts: host names whose addresses need not be public, for example hosts in an
            operator's own network. All other rules hold for them, too.
        resolve: returns the IP addresses of a host and port; by default the system's resolver.
        context: TLS settings; None means Python's defaults, which check certificates and hosts.
        seconds: most seconds per URL.
        most_bytes: largest file in bytes.
    """

    def __init__(
        self,
        *,
        allowed_hosts: Collection[str] = (),
        resolve: Resolve = addresses_of,
        context: ssl.SSLContext | None = None,
        seconds: float = MOST_SECONDS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self.seconds, self.most_bytes = seconds, most_bytes
        self._resolve, self._given_context = resolve, context

    def read(self, url: str) -> bytes:
        """Return the bytes of the file that a URL names.

        Args:
            url: a URL that begins with https://.

        Raises:
            ValueError: the URL or a redirect breaks a rule, or the file cannot be read; the message
                names the URL, without its query, which may be a secret.
        """
        deadline = time.monotonic() + self.seconds
        hop, name = url, displayed_url(url)
        for _ in range(MOST_REDIRECTS + 1):
            try:
                answer = self._get(hop, deadline)
            except (TimeoutError, Unanswered):
                raise ValueError(
                    f"{name}: took longer than {self.seconds:g} s; download it yourself and pass "
                    "the path of the file"
                ) from None
            except (OSError, HTTPException) as error:
                raise ValueError(
                    f"{name}: cannot be fetched ({error or type(error).__name__}); try again, or "
                    "download it yourself and pass the path of the file"
                ) from error
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if isinstance(answer, bytes):
                return answer
            hop = urljoin(hop, answer)
            name = f"{displayed_url(url)}: leads to {displayed_url(hop)}"
        raise ValueError(
            f"{displayed_url(url)}: is redirected more than {MOST_REDIRECTS} times; pass the URL "
            "of the file itself"
        )

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._given_context or ssl.create_default_context()

    def _get(self, url: str, deadline: float) -> bytes | str:
        """Send one request, and return the bytes of the file, or the URL to which the host
        redirects.
        """
        parts = _read_url(url)
        addresses = self._checked_addresses(parts, deadline)
        connection = HTTPSConnection(parts.host, parts.port)
        with closing(self._connect(parts, addresses, deadline)) as plain:
            plain.settimeout(_seconds_left(deadline))
            with self._context.wrap_socket(plain, server_hostname=parts.host) as sock:
                # With a socket, HTTPSConnection neither resolves the name again nor asks a proxy.
                connection.sock = sock
                sock.settimeout(_seconds_left(deadline))
                connection.request("GET", parts.path, headers=_HEADERS)
                answer = _BoundedResponse(sock, deadline)
                answer.begin()
                return self._read_answer(answer)

    def _checked_addresses(self, url: _Url, deadline: float) -> list[str]:
        """Return the IP addresses of a URL's host."""
        addresses = _resolve_within(deadline, lambda: self._resolve(url.host, url.port))
        if not addresses:
            raise OSError(f"{url.host} has no address")
        if url.host in self.allowed_hosts:
            return list(addresses)
        for address in addresses:
            if not is_public(address):
                raise ValueError(
                    f"{url.host} has the address {address}, which is not public: only files of "
                    "the public internet are fetched; download it yourself and pass the path of "
                    "the file"
                )
        return list(addresses)

    def _connect(self, url: _Url, addresses: Sequence[str], deadline: float) -> socket.socket:
        """Return a socket that is connected to the first IP address that answers."""
        for number, address in enumerate(addresses, 1):
            seconds = min(_seconds_left(deadline), _CONNECT_SECONDS)
            try:
                return socket.create_connection((address, url.port), seconds)
            except OSError as error:
                if number == len(addresses):
                    raise ConnectionError(f"no connection to {address}: {error}") from error
        raise AssertionError("there is at least one address")

    def _read_answer(self, answer: HTTPResponse) -> bytes | str:
        location = answer.headers.get("Location")
        if answer.status in _REDIRECTS and location:
            return location
        if answer.status != 200:
            raise ValueError(
                f"the server answers {answer.status} {answer.reason}; check the URL, or download "
                "the file yourself and pass its path"
            )
        body = b"" if (answer.length or 0) > self.most_bytes else answer.read(self.most_bytes + 1)
        if len(body) > self.most_bytes or (answer.length or 0) > self.most_bytes:
            raise ValueError(
                f"is larger than {self.most_bytes:,} bytes; download it yourself and pass the path "
                "of the file"
            )
        if answer.length:
            raise OSError(f"the connection broke off {answer.length:,} bytes before the end")
        return body


class _Url(NamedTuple):
    """The parts of an https URL; ``path`` is quoted and includes the query."""

    host: str
    port: int
    path: str


def _read_url(url: str) -> _Url:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"is no URL ({error})") from error
    if parts.scheme != "https" or not host:
        raise ValueError(
            "is not an https URL: only files of https://host/path are fetched; download it "
            "yourself and pass the path of the file"
        )
    if "@" in parts.netloc:
        raise ValueError(
            "holds a user name, and no credentials are sent: leave out what is before @"
        )
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=~?[]')}" if parts.query else ""
    return _Url(host, 443 if port is None else port, path + query)


class _BoundedResponse(HTTPResponse):
    """The answer to a GET request; reading it after the deadline raises a TimeoutError."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock, method="GET")
        self.fp.close()  # it would wait for every single byte as long as the socket's timeout
        self.fp = io.BufferedReader(_BoundedReader(sock, deadline))


class _BoundedReader(io.RawIOBase):
    """A file over a socket, with one deadline, by ``time.monotonic``, for all reads.

    The timeout of a socket starts anew with every byte, so a slow server could delay it for ever.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        """Return True, which ``io.BufferedReader`` asks for."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Receive bytes into ``buffer`` by the deadline, and return how many came, 0 at the end."""
        self._sock.settimeout(_seconds_left(self._deadline))
        return self._sock.recv_into(buffer)


def _seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline by the clock ``time.monotonic``.

    Raises:
        TimeoutError: the deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _resolve_within(deadline: float, resolve: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Call ``resolve`` in a thread, because a resolver takes no timeout, and return its
    addresses.
    """
    answer: Future[Sequence[str]] = Future()

    def work() -> None:
        try:
            answer.set_result(resolve())
        except (OSError, ValueError) as error:
            # A host name that cannot exist raises a UnicodeError.
            answer.set_exception(OSError(str(error)))

    Thread(target=work, name="resolver", daemon=True).start()
    return answer.result(_seconds_left(deadline))


def is_url(source: object) -> TypeGuard[str]:
    """Return whether a value is text that begins with http:// or https://."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def displayed_url(url: str) -> str:
    """Return a URL for messages: without user name and query, and at most 200 characters."""
    return re.sub(r"//[^/]*@", "//", re.split(r"[?#]", url, maxsplit=1)[0])[:200]


def load_image(url_or_path: str | os.PathLike[str]) -> Image.Image:
    """Read an image from a URL or a file, turned upright by its EXIF orientation.

    Args:
        url_or_path: an https URL, or the path of an image file. A URL is read by :class:`Fetcher`:
            only from public addresses, and at most 64 MiB in 60 seconds.

    Returns:
        The decoded image, in the colour mode of the file, to pass to ``encoder.encode([image])``.

    Raises:
        ValueError: the file cannot be downloaded, does not exist, or is not an image.
    """
    from encoders.inputs import open_image, prefix_errors

    if not is_url(url_or_path):
        return open_image(url_or_path)
    data = Fetcher().read(url_or_path)
    with prefix_errors(displayed_url(url_or_path)):
        return open_image(data)
