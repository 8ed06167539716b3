"""A small Hugging Face Hub on the loopback interface, which the Hub's real client talks to.

It serves what the client asks for when it loads a model: files by revision (``resolve``, HEAD and
GET, with byte ranges), the list of a repo's files, and the errors of missing, private and gated
repos. As on the Hub, weights are redirected to another host, which serves them by their hash. It
can be slow (latency per request, bytes per second and connection) and fail as servers do.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote

from .files import chunks, digest_of, row_of

TOKEN = "hf_loopbacktoken"


@dataclass(frozen=True)
class Fault:
    """A faulty answer to one request: a status, headers, missing bytes or delays."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Break the connection after so many bytes of the body."""
    stall: float = 0.0
    """Seconds before anything is answered."""
    silent: bool = False
    """Break the connection before anything is answered."""
    etag: str | None = None
    """Answer with this ETag."""
    range: str | None = None
    """``ignored``, ``shifted``, ``short``, ``long``, ``other size``, ``unnamed``, ``encoded``."""


@dataclass(frozen=True)
class Request:
    """A request that the test's hub received, and how it was answered."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int
    token: bool = False


@dataclass
class Repo:
    """The revisions of one repo on the test's hub; a commit never changes."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Path] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def folder(self, revision: str) -> tuple[str, Path] | None:
        commit = self.branches.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


class HubServer:
    """A Hub for tests: ``with HubServer() as hub`` serves at ``hub.endpoint``, for HF_ENDPOINT."""

    def __init__(
        self, *, ranges: bool = True, latency: float = 0.0, bytes_per_second: float | None = None
    ) -> None:
        self.ranges = ranges
        self.redirects = True
        """Whether weights are on another host, as on the Hub; mirrors may serve them directly."""
        self.signs_ranges = False
        """Whether the storage host's address serves only the range that the Hub was asked for."""
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.faults: list[tuple[str | None, re.Pattern[str], list[Fault]]] = []
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.written = 0
        """Bytes of bodies that were really taken: who hangs up takes less than was meant."""
        self.blobs: dict[str, Path] = {}
        self.lock = Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}"

    def __enter__(self) -> HubServer:
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def push(
        self,
        repo_id: str,
        folder: Path,
        *,
        branch: str = "main",
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Make the files of ``folder`` a new commit of ``branch``; returns the commit."""
        repo = self.repos.setdefault(repo_id, Repo(private, gated))
        commit = hashlib.sha1(f"{repo_id} {folder} {len(repo.commits)}".encode()).hexdigest()
        repo.commits[commit] = folder
        repo.branches[branch] = commit
        for path in folder.rglob("*.safetensors"):
            self.blobs[digest_of(path)] = path
        return commit

    def fail(self, pattern: str, *faults: Fault, method: str | None = None) -> None:
        """Answer the next requests whose path matches ``pattern`` with ``faults``, in order."""
        self.faults.append((method, re.compile(pattern), list(faults)))

    def next_fault(self, method: str, path: str) -> Fault:
        """Return the fault with which to answer a request; one without effect by default."""
        with self.lock:
            for only, pattern, faults in self.faults:
                if faults and only in (None, method) and pattern.search(path):
                    return faults.pop(0)
        return Fault()

    def bytes_sent(self) -> int:
        """The number of bytes in the bodies of all answers."""
        return sum(request.sent for request in self.requests)

    def log(self, method: str | None = None) -> list[str]:
        """Return the paths that were requested, in order, without targets of redirects."""
        found = [r.path for r in self.requests if method in (None, r.method)]
        return [path for path in found if not path.startswith("/blob/")]

    def files_sent(self) -> set[str]:
        """The names of the files that were sent as a whole, and not by byte ranges."""
        whole = [
            r.path for r in self.requests if (r.method, r.range, r.status) == ("GET", None, 200)
        ]
        names = {path.rpartition("/")[2] for path in whole}
        return {self.blobs[name].name if name in self.blobs else name for name in names}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

    def __init__(self, hub: HubServer, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing to stderr, because the hub keeps its own log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        time.sleep(self.hub.latency)
        self.fault = self.hub.next_fault(self.command, path)
        time.sleep(self.fault.stall)
        if self.fault.silent:
            self.close_connection = True
        elif self.fault.status is not None:
            self._error(self.fault.status, None, "out of order", dict(self.fault.headers))
        elif match := re.fullmatch(r"/blob/([0-9a-f]+)", path):
            signed = self.path.partition("?range=")[2]
            if signed and unquote(signed) != self.headers.get("Range"):
                self._error(403, None, "Auth failed: invalid range")
                return
            self._send_file(self.hub.blobs[match[1]], {"ETag": f'"stored-{match[1][:8]}"'})
        elif match := re.fullmatch(r"/api/(?:models|datasets)/(.+?)/tree/([^/]+)(/.+)?", path):
            self._tree(match[1], match[2], (match[3] or "").strip("/"))
        elif match := re.fullmatch(r"/api/(?:models|datasets)/(.+?)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/(?:datasets/)?(.+?)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        else:
            self._error(404, None, "no such page")

    def _find(self, repo_id: str, revision: str, *, content: bool) -> tuple[str, Path] | None:
        """Return the commit and folder of a revision, or None after an error was sent."""
        repo = self.hub.repos.get(repo_id)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            self._error(404 if known else 401, "RepoNotFound", "Repository not found")
            return None
        if repo.gated and content and not known:
            self._error(403, "GatedRepo", f"Access to model {repo_id} is restricted")
            return None
        found = repo.folder(revision)
        if found is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _info(self, repo_id: str, revision: str) -> None:
        found = self._find(repo_id, revision, content=False)
        if found is not None:
            commit, folder = found
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            siblings = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
            info = {"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _tree(self, repo_id: str, revision: str, below: str) -> None:
        found = self._find(repo_id, revision, content=False)
        if found is None:
            return
        if not (found[1] / below).is_dir():
            self._error(404, "EntryNotFound", "Entry not found")
        else:
            whole = parse_qs(self.path.partition("?")[2]).get("recursive", ["True"]) != ["False"]
            paths = sorted((found[1] / below).glob("**/*" if whole else "*"))
            rows = [row_of(path, path.relative_to(found[1]).as_posix()) for path in paths]
            self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo_id: str, revision: str, name: str) -> None:
        found = self._find(repo_id, revision, content=True)
        if found is None:
            return
        commit, folder = found
        path = folder / name
        headers = {"X-Repo-Commit": commit}
        if not path.is_file():
            self._error(404, "EntryNotFound", "Entry not found", headers)
        elif path.suffix == ".safetensors" and self.hub.redirects:
            digest = digest_of(path)
            headers |= {"X-Linked-Size": str(path.stat().st_size), "X-Linked-Etag": f'"{digest}"'}
            location = f"{self.hub.storage}/blob/{digest}"
            if self.hub.signs_ranges and "Range" in self.headers:
                location += f"?range={self.headers['Range']}"
            self._send(302, b"", headers | {"Location": location})
        else:
            self._send_file(path, headers | {"ETag": f'"{digest_of(path)[:40]}"'})

    def _send_file(self, path: Path, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        wrong = self.fault.range
        if wanted is None or not self.hub.ranges or wrong == "ignored":
            self._send(200, path, headers, 0, size)
            return
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, size)
        if start >= size:
            self._error(416, None, "range not satisfiable", {"Content-Range": f"bytes */{size}"})
            return
        start += wrong == "shifted"
        end += {"short": -1, "long": 1}.get(wrong or "", 0)
        if wrong == "encoded":
            headers["Content-Encoding"] = "gzip"
        if wrong != "unnamed":
            told = size + (wrong == "other size")
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{told}"
        self._send(206, path, headers, start, end)

    def _error(
        self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None
    ) -> None:
        extra = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), (headers or {}) | extra)

    def _send(
        self,
        status: int,
        body: bytes | Path,
        headers: dict[str, str],
        start: int = 0,
        end: int | None = None,
    ) -> None:
        end = len(body) if isinstance(body, bytes) else end or 0
        self.send_response(status)
        if self.fault.etag is not None:
            headers = headers | {"ETag": f'"{self.fault.etag}"'}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        cut = self.fault.cut_after
        sent = 0 if self.command == "HEAD" else end - start if cut is None else cut
        with self.hub.lock:
            self.hub.requests.append(
                Request(
                    self.command,
                    self.path,
                    self.headers.get("Range"),
                    status,
                    sent,
                    "Authorization" in self.headers,
                )
            )
        with suppress(ConnectionError):  # whoever asked may be gone
            for chunk in self._paced(body, start, start + sent):
                self.wfile.write(chunk)
                self.hub.written += len(chunk)
        self.close_connection = self.close_connection or cut is not None

    def _paced(self, body: bytes | Path, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes of a body no faster than the hub's limit per connection."""
        began, sent, rate = time.perf_counter(), 0, self.hub.bytes_per_second
        for chunk in chunks(body, start, end):
            yield chunk
            sent += len(chunk)
            if rate is not None:
                time.sleep(max(0.0, began + sent / rate - time.perf_counter()))
