"""Looks at a page in headless Chromium, through chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import LIMIT_S

DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    DRIVER is None, reason="needs Chromium and its driver (apt-get install chromium-driver)"
)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@dataclass
class Look:
    """What a browser finds in a page at one width.

    Fields:
        overflow: pixels that the page is wider than the window.
        small: smallest size of a drawn text in pixels.
        errors: messages of the console.
        requests: addresses that the page asked for.
        text: the page's text.
    """

    overflow: int
    small: float
    errors: list[str]
    requests: list[str]
    text: str


MEASURE = """
const texts = [...document.querySelectorAll('svg text')];
const sizes = texts.map(t => 11 * t.ownerSVGElement.getBoundingClientRect().width
    / t.ownerSVGElement.viewBox.baseVal.width);
return [document.documentElement.scrollWidth - document.documentElement.clientWidth,
        sizes.length ? Math.min(...sizes) : 99, document.body.innerText];
"""


class Browser:
    """One session of chromedriver."""

    def __init__(self, address: str) -> None:
        self._address = address
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": list(OPTIONS)},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        opened = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{opened['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)["value"]

    def _cdp(self, command: str, **params: Any) -> Any:
        body = {"cmd": command, "params": params}
        return self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def look(self, page: Path, width: int, dark: bool = False, picture: Path | None = None) -> Look:
        """Opens a page at a width of `width` pixels; writes a PNG of all of it to `picture`."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._cdp("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", features=[scheme])
        self._log("browser"), self._log("performance")  # of pages before
        self._ask("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})
        script = {"script": MEASURE, "args": []}
        overflow, small, text = self._ask("POST", f"{self._session}/execute/sync", script)
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        requests = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        errors = [entry["message"] for entry in self._log("browser")]
        if picture is not None:
            shot = self._cdp("Page.captureScreenshot", captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        return Look(overflow, small, errors, requests, text)

    def close(self) -> None:
        self._ask("DELETE", self._session)


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium; ended afterwards."""
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                urllib.request.urlopen(f"{address}/status", timeout=5).close()
                break
            except OSError:
                if driver.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.1)
        opened = Browser(address)
        yield opened
        opened.close()
    finally:
        driver.terminate()
        driver.wait(30)
