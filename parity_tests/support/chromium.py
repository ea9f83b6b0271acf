"""A headless Chromium, driven over a pipe by the DevTools protocol: nothing to install beside the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")
NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"


def find() -> str | None:
    """Return the path of a Chromium of this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless Chromium. Leave the context to end it."""

    def __init__(self, program: str, profile: Path) -> None:
        read, write = os.pipe()
        answers, answering = os.pipe()
        script = f'exec "$@" 3<&{read} 4>&{answering}'
        command = ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(command, pass_fds=(read, answering), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(answering)
        self._write, self._read = os.fdopen(write, "wb", buffering=0), os.fdopen(answers, "rb")
        self._count, self._session, self._buffer = 0, None, b""
        self.errors: list[str] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=1000)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, EOFError):
            self.call("Browser.close")
        self._process.wait(20)
        self._write.close()
        self._read.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result. Collect the page's errors that arrive before it."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read.fileno(), 1 << 20)
            if not chunk:
                raise EOFError("Chromium has ended")
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._collect(message)
        return message

    def _collect(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(given["exceptionDetails"].get("exception", {}).get("description", str(given)))
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and given["type"] == "error":
            self.errors.append(str([value.get("value", value.get("description")) for value in given["args"]]))
        self._events.append(message)

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._next()

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def theme(self, name: str) -> None:
        """Prefer "light" or "dark", as a user's system does."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; wait for it if it is a promise."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Write what the window shows to a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
