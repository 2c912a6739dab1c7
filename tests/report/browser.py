"""A headless browser on a pipe: as much of the DevTools protocol as the tests need, without a socket or a library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
    "--no-default-browser-check", "--remote-debugging-pipe",
)  # fmt: skip
#: The browser reads commands from file 3 and answers on file 4; this puts our pipes there.
_START = (
    "import os, sys; a, b = map(int, sys.argv[1:3]); os.dup2(a, 3); os.dup2(b, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 60.0


class BrowserError(RuntimeError):
    """The browser did not answer, or answered with an error."""


def find_browser() -> str | None:
    """The browser to run: $CHROMIUM, or the first one that is installed."""
    names = [os.environ.get("CHROMIUM") or "", *_NAMES]
    return next((found for found in map(shutil.which, filter(None, names)) if found), None)


class Browser:
    """One browser with one tab.

    Attributes:
        events: What the tab has told since the last page was opened.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._count, self._rest = 0, b""
        theirs_in, self._out = _high_pipe()
        self._in, theirs_out = _high_pipe()
        command = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), program, *_FLAGS]
        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
            )
        os.close(theirs_in)
        os.close(theirs_out)

    def attach(self) -> None:
        """Opens the tab and listens to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Asks for something and waits for the answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == self._count, method)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def open(self, path: Path) -> None:
        """Shows a file and waits until it is loaded and laid out."""
        self.load(path)
        self.settle()

    def load(self, path: Path) -> None:
        """Shows a file and waits until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._until(lambda found: found.get("method") == "Page.loadEventFired", "loading the page")

    def settle(self) -> None:
        """Waits until what was changed is on the screen."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 900, *, mobile: bool = False) -> None:
        """The size of the window, in the page's pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.settle()

    def scheme(self, name: str, media: str = "") -> None:
        """Light or dark, as the system would say; media "print" shows the page as on paper."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """What the tab has told by these names."""
        return [event["params"] for event in self.events if event["method"] in methods]

    def close(self) -> None:
        """Ends the browser and all of its processes."""
        for file in (self._out, self._in):
            with suppress(OSError):
                os.close(file)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=PATIENCE)

    def _until(self, wanted: Any, doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            found = self._message(deadline, doing)
            if "method" in found:
                self.events.append(found)
            if wanted(found):
                return found

    def _message(self, deadline: float, doing: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise BrowserError(f"the browser {'ended' if ready else 'did not answer'} while {doing}")
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)


@contextmanager
def browsing(program: str, folder: Path, tries: int = 3) -> Iterator[Browser]:
    """A browser that is ready; on a busy machine the first start may fail."""
    for number in range(tries):
        own = folder / f"browser{number}"
        own.mkdir()
        browser = Browser(program, own)
        try:
            browser.attach()
        except (BrowserError, OSError):
            browser.close()
            if number == tries - 1:
                raise
            continue
        try:
            yield browser
        finally:
            browser.close()
        return


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are no file that the browser's two could take the place of."""
    pair = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pair)
    for end in pair:
        os.close(end)
    return moved[0], moved[1]
