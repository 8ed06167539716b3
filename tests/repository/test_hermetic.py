"""No test reaches another machine: ``tests/conftest.py`` refuses it, and says what to do."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest

OTHER = "192.0.2.1"
"""An address of TEST-NET-1, which no machine has (RFC 5737)."""


@pytest.mark.parametrize("method", ["connect", "connect_ex"])
def test_a_connection_to_another_machine_is_refused(method: str) -> None:
    message = rf"asks for {OTHER}, .* take the fixture `hub`"
    with socket.socket() as sock, pytest.raises(RuntimeError, match=message):
        getattr(sock, method)((OTHER, 443))


def test_a_datagram_to_another_machine_is_refused() -> None:
    kind = socket.SOCK_DGRAM
    with socket.socket(type=kind) as sock, pytest.raises(RuntimeError, match=OTHER):
        sock.sendto(b"hello", (OTHER, 9))


def test_the_name_of_another_machine_is_not_looked_up() -> None:
    with pytest.raises(RuntimeError, match=r"asks for huggingface\.co, and tests reach this"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open("https://huggingface.co")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_reached(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection((host, server.getsockname()[1])) as client:
            client.sendall(b"hello")
            accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(5) == b"hello"


def test_unix_sockets_are_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path of a socket has at most 107 bytes
    with (
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as client,
    ):
        server.bind("here")
        server.listen()
        client.connect("here")
