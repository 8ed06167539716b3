"""Keep the sockets of tests on this machine: no test depends on a network, or talks to one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

INTERNET = (socket.AF_INET, socket.AF_INET6)
TO_AN_ADDRESS = ("connect", "connect_ex", "sendto")
"""Methods of a socket whose last argument is the address of the other side."""


def keep_on_loopback(patch: pytest.MonkeyPatch) -> None:
    """Refuse connections to other machines, and questions for their addresses, in this process.

    Loopback and Unix sockets work as ever. Two kinds of code are not held: processes that a test
    starts (a forked one is), and libraries that use the sockets of C, such as gloo and NCCL.
    """
    for name in TO_AN_ADDRESS:
        patch.setattr(socket.socket, name, on_loopback(getattr(socket.socket, name)))
    lookup = socket.getaddrinfo

    @wraps(lookup)
    def getaddrinfo(host: str | bytes | None, *arguments: Any, **options: Any) -> Any:
        if not is_number(host):  # of which nobody is asked
            refuse_unless_loopback(host)
        return lookup(host, *arguments, **options)

    patch.setattr(socket, "getaddrinfo", getaddrinfo)


def is_number(host: str | bytes | None) -> bool:
    """Whether a host is given by its number in any spelling, such as 127.1 and 0x7f000001."""
    try:
        socket.inet_aton(str(host))
    except OSError:
        return ":" in str(host)  # IPv6: no name has a colon
    return True


def on_loopback(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a socket that first looks at the address of the other side."""

    @wraps(method)
    def call(sock: socket.socket, *arguments: Any) -> Any:
        if sock.family in INTERNET:
            refuse_unless_loopback(arguments[-1][0])
        return method(sock, *arguments)

    return call


def refuse_unless_loopback(host: str | bytes | None) -> None:
    """Check the name or the number of a host; none and an empty one mean this machine.

    Raises:
        RuntimeError: another machine. It is no OSError, which a client would take for a network
            that is down and would answer with a retry or with what its cache holds.
    """
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return
    try:
        local = ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name
        local = False
    if not local:
        raise RuntimeError(
            f"a test asks for {name}, and tests reach this machine alone: take the fixture `hub`, "
            "a Hub on loopback that the Hub's client talks to, or serve the file on 127.0.0.1"
        )
