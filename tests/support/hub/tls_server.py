"""An https server on loopback, with a certificate and a resolver made for the test."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vitgraph.fetching import Fetcher

HOSTS = ("photos.test", "cdn.test")


def make_certificate(folder: Path) -> Path:
    """Make a self-signed certificate for :data:`HOSTS`; return the file with it and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificate, is not installed")
    key, found = folder / "key.pem", folder / "certificate.pem"
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={HOSTS[0]}", "-addext"),
            *(f"subjectAltName={names}", "-keyout", str(key), "-out", str(found)),
        ],
        check=True,
        capture_output=True,
    )
    found.write_bytes(found.read_bytes() + key.read_bytes())
    return found


class TlsServer:
    """An https server that answers GET requests by their path.

    Attributes:
        files: the bytes of each path.
        redirects: the target of each path that is redirected.
        requests: (host, path, headers) of every request.
        slowly: seconds between the bytes of each path that is sent byte by byte.
        finished: slow paths whose bytes were all sent.
        lying: paths whose answer ends before its length.
    """

    def __init__(self, certificate: Path) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.slowly: dict[str, float] = {}
        self.finished: list[str] = []
        self.lying: set[str] = set()
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who hangs up
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.context = ssl.create_default_context(cafile=str(certificate))

    def url(self, path: str, host: str = HOSTS[0]) -> str:
        """Return the URL of a path on this server."""
        return f"https://{host}:{self.port}{path}"

    def fetcher(self, **settings: Any) -> Fetcher:
        """Return a fetcher that resolves the certificate's hosts to this server and may read it."""
        known = {host.replace(".", "_"): ["127.0.0.1"] for host in HOSTS}
        here = {"resolve": resolver(**known), "context": self.context, "allowed_hosts": HOSTS}
        return Fetcher(**{**here, **settings})

    @contextmanager
    def running(self) -> Iterator[TlsServer]:
        """Serve requests in a thread until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._server.shutdown()
            self._server.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path
                server.requests.append((self.headers["Host"], path, dict(self.headers)))
                if path in server.redirects:
                    self.send_response(302)
                    self.send_header("Location", server.redirects[path])
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif path in server.files:
                    self.answer(path, server.files[path])
                else:
                    self.send_error(404)

            def answer(self, path: str, body: bytes) -> None:
                if path in server.slowly:
                    self.dribble(b"HTTP/1.1 200 OK\r\nX: " + body, server.slowly[path])
                    return
                self.send_response(200)
                if "?chunked" not in path:
                    more = 10 if path in server.lying else 0
                    self.send_header("Content-Length", str(len(body) + more))
                self.end_headers()
                self.wfile.write(body)

            def dribble(self, raw: bytes, seconds: float) -> None:
                for byte in raw:
                    if server._ended.is_set():
                        return
                    self.wfile.write(bytes([byte]))
                    time.sleep(seconds)
                server.finished.append(self.path)

            def log_message(self, format: str, *values: object) -> None:
                """Print nothing about a request."""

        return Handler


def resolver(**addresses: list[str]) -> Callable[[str, int], list[str]]:
    """Return a resolver that knows only some hosts, given by keywords with ``_`` for a dot."""

    def resolve(host: str, port: int) -> list[str]:
        try:
            return addresses[host.replace(".", "_")]
        except KeyError:
            raise OSError(f"{host} is not known") from None

    return resolve
