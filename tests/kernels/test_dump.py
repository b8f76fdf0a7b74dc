"""Tests thread dumps on this kernel."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import KERNEL_SIDE, PYTHON_SIDE, USER_SIDE, WaitCause, WaitState
from otel_kprofiler.pipeline import ThreadDumper, open_resources, open_symbols
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.symbols import UserSymbolSettings, open_user_names

pytestmark = [pytest.mark.kernel, pytest.mark.one_boot]

PROGRAM = """
import os, threading, time
def leaf():
    time.sleep(1000)
def rest():
    leaf()
threading.Thread(target=rest, daemon=True).start()
print("ready", flush=True)
os.read(os.pipe()[0], 1)
"""


def test_sleeping_threads_are_shown_with_all_their_frames():
    """Sleeping threads are shown with all their frames."""
    access, clock = Access(), Clock()
    settings = UserSymbolSettings(detail="names", max_bytes=1 << 28, cpu_share=1.0, may_block=True)
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            dumper = ThreadDumper(
                SamplerConfig(stacks="both", target_pids=(process.pid,)),
                access=access, clock=clock, symbolizer=open_symbols(access),
                resources=open_resources(access, clock, {}), user_names=open_user_names(settings),
            )  # fmt: skip
            with contextlib.closing(dumper):
                (dumped,) = dumper.dump()
                remarks = dumper.remarks()
            returns = Path(f"/proc/{process.pid}/stack").read_text().splitlines()
        finally:
            process.kill()
    assert not remarks
    main, sleeper = sorted(dumped.threads, key=lambda thread: thread.tid != process.pid)
    assert (main.state, main.cause) == (WaitState.INTERRUPTIBLE, WaitCause.PIPE)
    assert (sleeper.state, sleeper.cause) == (WaitState.INTERRUPTIBLE, WaitCause.SLEEP)
    python = [frame for frame in sleeper.stack.frames if frame.side is PYTHON_SIDE]
    assert [(frame.function, frame.lines[0].line) for frame in python[:2]] == [
        ("leaf", 4), ("rest", 6),
    ]  # fmt: skip
    native = [frame.function for frame in main.stack.frames if frame.side is USER_SIDE]
    assert native[0] in ("read", "__libc_read", "__read")
    assert native[-1] == "_start"
    assert 0 <= sleeper.waited_ns < 600e9
    calls = [frame.offset for frame in main.stack.frames if frame.side is KERNEL_SIDE]
    assert calls == [int(re.search(r"\+(0x\w+)/", line)[1], 16) - 1 for line in returns]
