"""A headless Chromium, driven through a pipe by its DevTools protocol: the standard library is enough.

`apt-get install chromium` brings one to Debian (scripts/test.sh does so where it may); $CHROMIUM
names another.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # root, in a container, has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_TIMEOUT = 60.0  # s, for one answer


def find_chromium() -> str | None:
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *_NAMES))), None)


class Browser:
    """One tab of one browser.

    `events` are what the page has reported: errors, log entries, requests. first: a script that runs
    before the scripts of each page.
    """

    def __init__(self, executable: str, width: int = 1300, height: int = 1100, first: str = "") -> None:
        self.events: list[dict[str, Any]] = []
        self._unread, self._count, self._session = b"", 0, {}
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._start(executable, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}")
        tabs = self.call("Target.getTargets")["targetInfos"]
        (tab,) = (each["targetId"] for each in tabs if each["type"] == "page")
        self._session = {
            "sessionId": self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=first)

    def _start(self, executable: str, *options: str) -> None:
        """Chromium reads commands from descriptor 3 and answers on 4."""
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", executable, *_FLAGS, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)  # this ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers. Raises RuntimeError with its complaint, or if none comes."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], _TIMEOUT)
            piece = os.read(self._answers, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("the browser has ended" if ready else f"no answer within {_TIMEOUT:g} s")
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    # ---------------------------------------------------------------- the tab

    def open(self, path: Path) -> None:
        """Show a file. Returns when it is drawn."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is on the screen."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """mouseMoved, mousePressed, mouseReleased or mouseWheel, as from a real mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def press(self, key: str, **more: Any) -> None:
        """A key by its name: `+`, `ArrowRight`."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """The visible part as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
