"""Drives headless Chromium by its DevTools protocol over a pipe, without any other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium")
"""The browser of Debian's package ``chromium``; None where it is missing."""
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Page:
    """One open page of a browser.

    Attributes:
        requests: the URLs that the page has asked for, data: URIs left out.
        faults: what the page has logged as errors.
    """

    def __init__(self, sent: BinaryIO, received: BinaryIO) -> None:
        self._sent, self._received, self._number = sent, received, 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.faults: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._sent.write(json.dumps(message).encode() + b"\0")
        self._sent.flush()
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._received.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = details["request"]["url"]
            self.requests += [url] if not url.startswith("data:") else []
        elif method == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(details["exceptionDetails"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.faults.append(details["entry"]["text"])

    def open(self, file: Path, width: int, height: int, dark: bool = False) -> None:
        """Open a local file in a window of a size, in the light or the dark scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)
        self.call("Page.navigate", url=file.absolute().as_uri())

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited."""
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true, at most ten seconds."""
        code = f"""new Promise((done) => {{ const end = Date.now() + 1e4; const look = () =>
            {{ let met = false; try {{ met = Boolean({condition}); }} catch {{}}
               if (met || Date.now() > end) done(met); else setTimeout(look, 20); }}; look(); }})"""
        assert self.evaluate(code), condition

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window, in CSS pixels."""
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """Start Chromium with a new profile folder, and yield an empty page."""
    assert CHROMIUM is not None
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    redirect = f'exec "$@" 3<&{read_there} 4>&{write_there}'
    command = [CHROMIUM, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    browser = subprocess.Popen(
        ["bash", "-c", redirect, "bash", *command],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_there)
    os.close(write_there)
    with os.fdopen(write_here, "wb") as sent, os.fdopen(read_here, "rb") as received:
        try:
            page = Page(sent, received)
            yield page
            page._session = None
            page.call("Browser.close")
            browser.wait(20)
        finally:
            browser.kill()
            browser.wait(20)
