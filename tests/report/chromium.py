"""A headless Chromium driven over the DevTools protocol through two pipes: no port, no driver, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "no Chromium on this machine: apt-get install chromium, or set PATH to one"


def find_chromium() -> str | None:
    """The browser's program, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab. `problems`: console errors and warnings, exceptions, and requests other than for the file itself."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def show(self, file: Path, width: int, dark: bool, drawn: str) -> None:
        """Load a file in a window of this width; wait until the JavaScript expression `drawn` is true."""
        self.set_width(width)
        self.set_dark(dark)
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._receive()
        self.wait(drawn)

    def set_width(self, width: int) -> None:
        """Of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def set_dark(self, dark: bool) -> None:
        """What the reader's system prefers."""
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true, looked at fifty times a second, for a minute at most."""
        self.evaluate(
            f"""new Promise((done, late) => {{
                const end = performance.now() + 60000;
                const look = () => {condition} ? done()
                    : performance.now() > end ? late("never " + {json.dumps(condition)}) : setTimeout(look, 20);
                look();
            }})"""
        )

    def screenshot(self, output: Path) -> None:
        """The whole page as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        output.write_bytes(base64.b64decode(picture))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            read = os.read(self._answers, 1 << 16)
            if not read:
                raise RuntimeError("Chromium has ended")
            self._unread += read
        text, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(text)
        self._loaded = self._loaded or message.get("method") == "Page.loadEventFired"
        self._note_problem(message.get("method"), message.get("params", {}))
        return message

    def _note_problem(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {parameters['entry']}")
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.problems.append(f"request: {url}")


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, which ends with the context. `profile`: an empty directory for it."""
    program = find_chromium()
    assert program is not None, INSTALL
    to_browser, from_test = os.pipe()
    to_test, from_browser = os.pipe()
    options = [
        "--headless=new",
        # Containers lack what its sandbox and shared memory need; the page is our own.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    # It reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    with (profile / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *options], pass_fds=(to_browser, from_browser), stdout=stderr, stderr=stderr
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(from_test, to_test)
            yield page
        finally:
            # It ends when nobody can send commands any more.
            os.close(from_test)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_test)
