"""The running kernel's module uevents are received in a separate network namespace."""

import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from otel_kprofiler.host import Uevents
from otel_kprofiler.host.uevents import RECEIVE_BYTES
from otel_kprofiler.symbols import KernelSymbolizer, read_snapshot
from otel_kprofiler.tracking import ModuleWatch
from tests.raw_forks import check_in_child

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/symbols"))
from module_host import TEXT, Host, boot_ns, frame, settle, wait_for_name

pytestmark = pytest.mark.live

CLONE_NEWNET = 0x40000000
NETLINK_KOBJECT_UEVENT = 15
REQUEST_ACK = 5


class Namespace:
    """A network namespace in which the kernel broadcasts uevents sent by the test."""

    def __init__(self, **options):
        self.error = None
        thread = threading.Thread(target=self._open, args=(options,))
        thread.start()
        thread.join()
        if self.error:
            pytest.skip(f"unshare(CLONE_NEWNET): {self.error}")

    def _open(self, options):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):  # for this thread only
            self.error = os.strerror(ctypes.get_errno())
            return
        self.events = Uevents(**options)
        self.sender = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_KOBJECT_UEVENT)

    def announce(self, action, name):
        text = (
            f"{action}@/module/{name}\0ACTION={action}\0DEVPATH=/module/{name}\0SUBSYSTEM=module\0"
        ).encode()
        self.sender.send(struct.pack("IHHII", 16 + len(text), 16, REQUEST_ACK, 1, 0) + text)
        status = struct.unpack_from("i", self.sender.recv(4096), 16)[0]
        assert status == 0, os.strerror(-status)

    def close(self):
        self.sender.close()
        self.events.close()


def test_events_are_received_on_descriptors_above_the_select_limit(no_low_descriptors, namespace):
    while namespace.events.is_waiting():  # the host's events may reach all namespaces
        namespace.events.receive()
    namespace.announce("add", "one")
    assert namespace.events.is_waiting()


def open_sockets():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = {os.readlink(path) for path in paths if os.path.lexists(path)}
    return {link for link in links if link.startswith("socket:")}


def test_the_uevent_socket_is_closed_in_a_forked_child(tmp_path):
    host = Host(tmp_path)
    before = open_sockets()
    symbolizer = KernelSymbolizer.live(host.files, modules=ModuleWatch(host.files, Uevents))
    settle(symbolizer)
    opened = open_sockets() - before
    assert len(opened) == 1

    def check():
        assert not opened & open_sockets()

    with warnings.catch_warnings():
        # caused by os.fork() in a multithreaded process
        warnings.simplefilter("ignore", DeprecationWarning)
        check_in_child(check)
    settle(symbolizer)
    symbolizer.close()


@pytest.fixture
def namespace():
    result = Namespace()
    yield result
    result.close()


@pytest.fixture
def host(tmp_path, namespace):
    """Returns captured host files that tests can modify. The real kernel sends the uevents."""
    result = Host(tmp_path)
    result.events = namespace
    result.load("old", TEXT + 0x100000, announce=False)
    return result


@pytest.fixture
def symbolizer(host, namespace):
    watch = ModuleWatch(host.files, lambda: namespace.events)
    result = KernelSymbolizer.live(host.files, modules=watch)
    result.watch = watch
    settle(result)
    yield result
    result.close()


def test_module_loads_and_unloads_are_tracked(host, symbolizer, request):
    """File ids and RVAs resolve within 250 ms, and names are correct at each sample's time."""
    delays = []
    for _ in range(5):
        host.load("fresh")
        began = time.monotonic()
        while frame(symbolizer, TEXT + 0x14).module is None:
            symbolizer.advance(boot_ns())
            time.sleep(0.001)
        delays.append(time.monotonic() - began)
        result = frame(symbolizer, TEXT + 0x14)
        assert (result.address, result.module.build_id) == (0x14, "01" * 20)
        wait_for_name(symbolizer, TEXT + 0x14, "fresh_a")
        live_ns = boot_ns()
        settle(symbolizer)
        host.unload("fresh")
        settle(symbolizer)
        assert frame(symbolizer, TEXT + 0x14).module is None
        assert frame(symbolizer, TEXT + 0x14, live_ns).function == "fresh_a"
    request.node.user_properties.append(("delays_ms", [round(delay * 1e3) for delay in delays]))
    assert min(delays) <= 0.25
    assert symbolizer.watch.counts.events == 10
    assert symbolizer.watch.counts.rescans == 0


@pytest.fixture(params=["pyroute2", "standard library"])
def source(request, monkeypatch):
    if request.param == "standard library":
        monkeypatch.setitem(sys.modules, "pyroute2.netlink.uevent", None)
    return request.param


def test_a_socket_overflow_triggers_a_rescan_of_the_modules(tmp_path, source):
    namespace = Namespace(receive_bytes=1)
    host = Host(tmp_path)
    host.load("fresh", announce=False)
    watch = ModuleWatch(host.files, lambda: namespace.events)
    snapshot = read_snapshot(host.files)
    host.load("late", TEXT + 0x8000, announce=False)
    for _ in range(200):
        namespace.announce("add", "noise")
    result = KernelSymbolizer(snapshot, modules=watch)
    settle(result)
    wait_for_name(result, TEXT + 0x8014, "late_a")
    assert watch.counts.rescans == 1
    result.close()
    namespace.close()


def test_lost_uevents_are_reported_once(source):
    namespace = Namespace(receive_bytes=1)
    for _ in range(50):
        namespace.announce("add", "noise")
    with pytest.raises(OSError, match="No buffer space available") as raised:
        namespace.events.receive()
    assert raised.value.errno == errno.ENOBUFS
    kept = namespace.events.receive()
    assert 0 < len(kept) < 50
    assert all(data.startswith(b"add@/module/noise\0ACTION=add\0") for data in kept)
    namespace.announce("add", "after")
    assert [data.split(b"\0")[0] for data in namespace.events.receive()] == [b"add@/module/after"]
    namespace.close()


def test_only_uevents_sent_by_the_kernel_are_received(source, namespace):
    port = namespace.events._socket.getsockname()[0]
    namespace.sender.sendto(b"add@/module/forged\0ACTION=add\0", (port, 0))
    assert namespace.events.is_waiting()
    namespace.announce("add", "real")
    assert [data.split(b"\0")[0] for data in namespace.events.receive()] == [b"add@/module/real"]


def test_the_uevent_socket_buffers_many_datagrams_and_never_blocks(source):
    events = Uevents()
    with open("/proc/sys/net/core/rmem_max") as file:
        wanted = min(RECEIVE_BYTES, int(file.read()))
    assert events._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * wanted
    assert not events._socket.getblocking()
    assert not events._socket.get_inheritable()
    assert events.receive() == []
    events.close()


RECEIVE_TWICE = """
import logging, sys
{before}
from otel_kprofiler.host import Uevents
logging.basicConfig(format="%(name)s: %(message)s")
for _ in range(2):
    events = Uevents()
    with open("/sys/devices/virtual/mem/null/uevent", "w") as file:
        file.write("change")
    received = []  # other devices may change, too
    while b"change@/devices/virtual/mem/null" not in received:
        received += [data.split(b"\\0")[0] for data in events.receive()]
        events.wait(0.1)
    print("received")
    events.close()
print(sorted(sys.modules.keys() & {{"pyroute2.netlink.uevent", "pyroute2.iproute"}}))
"""
REFUSING = """
import pyroute2.netlink.uevent
def refuse(self):
    raise RuntimeError("no sockets today")
pyroute2.netlink.uevent.AsyncUeventSocket.setup_socket = refuse
"""


def receive_twice(before=""):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RECEIVE_TWICE.format(before=before)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_only_the_uevent_protocol_is_imported_from_pyroute2():
    printed, log = receive_twice()
    assert printed == ["received"] * 2 + ["['pyroute2.netlink.uevent']"]
    assert log == []


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("sys.modules['pyroute2'] = None", "No module named 'pyroute2"),
        (REFUSING, "no sockets today"),
    ],
    ids=["missing", "refusing"],
)
def test_the_standard_library_is_the_fallback_for_pyroute2(before, reason):
    printed, log = receive_twice(before)
    assert printed[:2] == ["received"] * 2
    assert len(log) == 1
    assert log[0].startswith("otel_kprofiler.host.uevents: pyroute2 cannot open a uevent socket")
    assert reason in log[0]


def test_closing_the_socket_closes_every_descriptor(source):
    before = os.listdir("/proc/self/fd")
    events = Uevents()
    assert not events.is_waiting()
    events.wake()
    events.wait(10)
    events.wait(0)
    assert events.receive() == []
    events.close()
    events.close()
    assert os.listdir("/proc/self/fd") == before


def test_closing_a_watch_closes_its_socket_and_is_idempotent(tmp_path):
    before = os.listdir("/proc/self/fd")
    host = Host(tmp_path)
    symbolizer = KernelSymbolizer.live(host.files, modules=ModuleWatch(host.files, Uevents))
    settle(symbolizer)
    symbolizer.close()
    symbolizer.close()
    assert os.listdir("/proc/self/fd") == before
