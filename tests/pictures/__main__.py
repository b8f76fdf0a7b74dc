"""Runs a demo on this host, and saves screenshots of its flame graph page in ``docs/images``.

Run ``python -m tests.pictures`` as root, with gcc, Chromium, and ``pngquant`` on the path. The demo
runs in ``/opt/demo``, in its own cgroup, with the host name *shop*. The demo consists of two order
services from ``examples`` and a C program. After five seconds, the order services are replaced by a
corrected service and OpenSSL.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from tests.browser.conftest import Browser

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMAGES = ROOT / "docs/images"
DEMO = Path("/opt/demo")
ON_SHOP = ["unshare", "--uts", "sh", "-c", 'hostname shop && exec "$@"', "sh"]
KPROFILER = [*ON_SHOP, sys.executable, "-m", "otel_kprofiler"]
FIND_CGROUPS = ["findmnt", "-t", "cgroup2", "--noheadings", "--first-only", "-o", "TARGET"]
GROUP = Path(subprocess.check_output(FIND_CGROUPS, text=True).strip(), "shop")
IN_GROUP = ["sh", "-c", f'echo $$ > {GROUP}/cgroup.procs && exec "$@"', "sh"]
ORDERS = ["/usr/bin/python3", "slow_orders.py"]
HALF_MS = 5_000
COMPARED = (
    f"[0, {HALF_MS}, {2 * HALF_MS}].map(ms => Math.floor(viewer.profile().parts[0].start_ms + ms))"
)
PICTURES = {
    "flame-graph": ("transforms=recursion", None),
    "page-table": ("tab=table&kind=on_cpu&tracks=off", "do_syscall_64"),
    "page-difference": (
        "kind=on_cpu&tracks=off&transforms=recursion&baseline={0}-{1}&range={1}-{2}",
        None,
    ),
    "page-source": ("tab=source&tracks=off", "look_up (slow_orders.py:"),
}


def start(*command):
    return subprocess.Popen([*IN_GROUP, *command], cwd=DEMO, stdout=subprocess.DEVNULL)


def end(*processes):
    for process in processes:
        process.kill()
        process.wait()


def record(profile):
    shutil.copy(ROOT / "examples/slow_orders.py", DEMO)
    build = ["gcc", "-O2", "-g", "-fno-omit-frame-pointer", "-pthread", "-o", "catalog"]
    subprocess.run([*build, HERE / "catalog.c"], cwd=DEMO, check=True)
    options = ["--off-cpu", "--user-symbols", "lines", "-d", "10s", "-o", profile]
    slow = [start("./catalog"), start(*ORDERS), start(*ORDERS)]
    command = [*KPROFILER, "record", *options, "--cgroup", GROUP]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as recording:
        halfway = recording.stderr.readline()
        assert halfway.startswith("5 s:"), halfway
        end(*slow[1:])
        mended = [start(*ORDERS, "--mended"), start("openssl", "dgst", "-sha512", "/dev/urandom")]
        recording.stderr.read()
    end(slow[0], *mended)
    assert recording.returncode == 0


@contextmanager
def viewed(profile):
    command = [*KPROFILER, "view", "--no-browser", profile]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))[0]
        finally:
            server.terminate()


def wait(browser, condition):
    until = time.monotonic() + 30
    while not browser.evaluate(condition):
        assert time.monotonic() < until, condition
        time.sleep(0.1)


def open_view(browser, address, view):
    browser.open("about:blank")
    browser.open(f"{address}#{view}", height=720)
    wait(browser, "window.viewer.panes.length > 0")


def take(browser, address, name, view, function):
    open_view(browser, address, "")
    open_view(browser, address, view.format(*browser.evaluate(COMPARED)))
    if function:
        row = (
            "[...document.querySelectorAll('.body > .table tbody button')]"
            f".find(one => one.textContent.startsWith('{function}'))"
        )
        wait(browser, f"Boolean({row})")
        browser.evaluate(f"{row}.click()")
    browser.evaluate("new Promise(done => setTimeout(done, 500))")
    picture = IMAGES / f"{name}.png"
    browser.screenshot(picture)
    subprocess.run(["pngquant", "--force", "--ext", ".png", "--strip", picture], check=True)


def main():
    DEMO.mkdir()
    GROUP.mkdir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder, "shop.otlp")
            record(profile)
            with viewed(profile) as address:
                browser = Browser(shutil.which("chromium"), Path(folder, "chromium"))
                for name, (view, function) in PICTURES.items():
                    take(browser, address, name, view, function)
                browser.close()
    finally:
        shutil.rmtree(DEMO)
        GROUP.rmdir()


if __name__ == "__main__":
    main()
