"""A headless Chromium that tests drive over its debugging pipe (two descriptors, no network)."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from otel_kprofiler.formats import html
from tests.browser.flame_graph import PROFILE

SWITCHES = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
]  # fmt: skip


class Browser:
    """A page in a browser."""

    def __init__(self, binary, profile):
        low_commands, self._write = os.pipe()
        self._read, low_answers = os.pipe()
        # Chromium reads commands from descriptor 3 and writes responses to descriptor 4.
        commands = fcntl.fcntl(low_commands, fcntl.F_DUPFD, 10)
        answers = fcntl.fcntl(low_answers, fcntl.F_DUPFD, 10)
        command = f'exec "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", binary, *SWITCHES, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (low_commands, low_answers, commands, answers):
            os.close(descriptor)
        self._buffer = b""
        self._number = 0
        self._pages = Path(profile)
        self._session = None
        self.requests = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")
        self.call("Network.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, url, *, width=1200, height=700, scheme="light"):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.requests.clear()
        self.call("Page.navigate", url=url)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def show(self, windows, fragment="", *, title="", **view):
        self.show_page(html(windows, title=title), fragment, **view)

    def show_page(self, page, fragment="", **view):
        path = self._pages / f"{self._number}.html"
        path.write_text(page)
        self.open(path.as_uri() + fragment, **view)

    def evaluate(self, expression):
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, *keys, shift=False):
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            held = {"modifiers": 8 if shift else 0}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **held, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **held)

    def go_back(self):
        history = self.call("Page.getNavigationHistory")
        entry = history["entries"][history["currentIndex"] - 1]
        self.call("Page.navigateToHistoryEntry", entryId=entry["id"])
        self.evaluate("new Promise(done => setTimeout(done, 50))")

    def center(self, selector):
        return self.evaluate(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )

    def mouse(self, kind, x, y, button="left"):
        held = 0 if kind == "mouseReleased" else 1
        button = "none" if kind == "mouseMoved" else button
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=1,
                  button=button, buttons=held)  # fmt: skip

    def click(self, selector):
        self.click_at(*self.center(selector))

    def click_at(self, x, y, button="left"):
        self.mouse("mousePressed", x, y, button)
        self.mouse("mouseReleased", x, y, button)

    def drag(self, start, end):
        self.mouse("mousePressed", *start)
        self.mouse("mouseMoved", (start[0] + end[0]) / 2, end[1])
        self.mouse("mouseMoved", *end)
        self.mouse("mouseReleased", *end)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self):
        self._session = None
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("chromium is not installed")
    browser = Browser(binary, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser):
    browser.show([PROFILE], title="A & B")
    return browser
