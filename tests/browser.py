"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol): no driver, no package."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

# It reads commands from descriptor 3 and writes to 4, whatever was there before.
_EXEC = """
import os, sys
ours, theirs = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(ours, 100), os.dup2(theirs, 101)
os.dup2(100, 3), os.dup2(101, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """Its path, if this machine has one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page of a browser. Example: `with Browser(tmp_path) as page: page.open(url); page.evaluate("1 + 1")`

    Attributes:
      complaints: uncaught exceptions, console errors and refused loads so far.
    """

    def __init__(self, folder: pathlib.Path, seconds: float = 60.0):
        self._folder, self._seconds = folder, seconds
        self._number = 0
        self._buffer = b""
        self.complaints: list[str] = []

    def __enter__(self) -> Browser:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        chromium = find_chromium()
        assert chromium is not None, "this test needs Chromium: apt-get install chromium"
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(to_browser), str(from_browser), chromium, *flags],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._in, False)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, to the page."""
        return self._call(method, self._session, **params)

    def open(self, url: str) -> None:
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, found

    def evaluate(self, code: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, code: str) -> Any:
        """Until the expression is true; its value. What it speaks of may not be there yet."""
        deadline = time.monotonic() + self._seconds
        safe = f"(() => {{ try {{ return {code}; }} catch (error) {{ return null; }} }})()"
        while not (value := self.evaluate(safe)):
            assert time.monotonic() < deadline, f"{code} is still {value!r}; {self.complaints}"
            time.sleep(0.05)
        return value

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            found = self._read()
            if found is None:
                time.sleep(0.005)
            elif found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            else:
                self._note(found)
        raise AssertionError(f"Chromium did not answer {method}; {self._process.poll()=}")

    def _read(self) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            try:
                part = os.read(self._in, 1 << 16)
            except BlockingIOError:
                return None
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(event["params"]["entry"]["text"])
