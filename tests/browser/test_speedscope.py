"""The speedscope app, loaded from its package's files, opens exported profiles."""

import base64
import json
import time
from pathlib import Path

import pytest

from otel_kprofiler.formats import speedscope
from otel_kprofiler.model import KERNEL_SIDE, Frame, Line, Stack, WindowSample
from tests.windows import make_window

RELEASE = Path(__file__).parents[2] / "viewer/node_modules/speedscope/dist/release"


@pytest.mark.skipif(not RELEASE.exists(), reason="speedscope is not installed: make viewer")
def test_speedscope_opens_the_exported_profile(browser, tmp_path):
    frames = tuple(
        Frame(None, number, (Line(name),), 0, KERNEL_SIDE)
        for number, name in enumerate(("vfs_read", "do_syscall_64"))
    )
    sample = WindowSample(Stack.from_frames(frames), 1, "dd", 3, None, [10**18])
    window = make_window(10**18, 10**18 + 9, ({"process.pid": 7}, [sample]), period_ns=1000)
    text = speedscope([window], name="x")
    # Load the profile as the speedscope command does: with a script that calls into the page.
    script = tmp_path / "profile.js"
    encoded = base64.b64encode(text.encode()).decode()
    script.write_text(f"speedscope.loadFileFromBase64({json.dumps('x.json')}, '{encoded}')")
    browser.open(f"{(RELEASE / 'index.html').as_uri()}#localProfilePath={script}")
    for _ in range(50):
        shown = browser.evaluate("document.body.innerText")
        if "all CPUs" in shown:
            break
        time.sleep(0.1)
    assert "all CPUs (1/2)" in shown, shown
