"""Modules that come and go: announcements and looks become snapshots for each time."""

import errno
import itertools
import logging
import lzma
import struct
import threading
import time
from pathlib import Path

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols import ModuleWatch, Symbolizer
from otel_kprofiler.symbols.kernel.uevents import (
    ModuleAction,
    ModuleEvent,
    NoEvents,
    parse_uevent,
)
from otel_kprofiler.symbols.kernel.watch import MAX_ATTEMPTS

KERNEL = 0xFFFFFFFF81000000
TEXT = 0xFFFFFFFFC0001000
INIT = 0xFFFFFFFFC0100000
CORE = f"""{KERNEL:016x} T _text
{KERNEL + 0x100:016x} T vfs_read
{KERNEL + 0x8000:016x} T _etext
"""


class Events(NoEvents):
    """Announcements that tests make."""

    def __init__(self):
        super().__init__()
        self.queue = []
        self.error = None

    def is_waiting(self):
        return bool(self.queue or self.error)

    def receive(self):
        if self.error:
            error, self.error = self.error, None
            raise error
        data, self.queue = self.queue, []
        return data

    def announce(self, action, name):
        self.queue.append(
            f"{action}@/module/{name}\0ACTION={action}\0DEVPATH=/module/{name}\0"
            f"SUBSYSTEM=module\0SEQNUM=7\0".encode()
        )
        self.wake()


class Host:
    """A captured tree in which modules can be loaded and unloaded."""

    def __init__(self, root: Path):
        self.root = root
        self.modules = {}
        self.events = Events()
        self.kallsyms_opened = 0
        self.files = Access(str(root))
        self.open_fd = self.files.open_fd
        self.read_link, self.list_dir = self.files.read_link, self.files.list_dir
        self.read_bytes = self.files.read_bytes
        (root / "proc").mkdir()
        (root / "sys/module").mkdir(parents=True)
        self.files.open_fd = self._open
        self.write()

    def _open(self, path):
        self.kallsyms_opened += path == "/proc/kallsyms"
        return Access.open_fd(self.files, path)

    def write(self):
        lines, symbols = [], CORE
        for name, (base, functions, state, init) in reversed(self.modules.items()):
            lines.append(f"{name} 8192 0 - {state} 0x{base:016x}\n")
            shown = {**functions, **init} if state == "Loading" else functions
            for function, address in shown.items():
                symbols += f"{address:016x} t {function}\t[{name}]\n"
        for path, content in (("modules", "".join(lines)), ("kallsyms", symbols)):
            new = self.root / "proc" / f"{path}.new"
            new.write_text(content)
            new.replace(self.root / "proc" / path)

    def load(
        self, name, base=TEXT, *, prefix="", build_id=1, state="Live", init=INIT, announce=True
    ):
        functions = {f"{prefix}{name}_a": base + 0x10, f"{prefix}{name}_b": base + 0x80}
        folder = self.root / "sys/module" / name
        (folder / "sections").mkdir(parents=True, exist_ok=True)
        (folder / "notes").mkdir(exist_ok=True)
        for section, address in ((".text", base), (".data", base + 0x1000), (".init.text", init)):
            (folder / "sections" / section).write_text(f"0x{address:016x}\n")
        note = struct.pack("<III", 4, 20, 3) + b"GNU\0" + bytes([build_id] * 20)
        (folder / "notes" / ".note.gnu.build-id").write_bytes(note)
        self.modules[name] = (base, functions, state, {f"{name}_init": init + 8})
        self.write()
        if announce:
            self.events.announce("add", name)

    def unload(self, name, announce=True):
        folder = self.root / "sys/module" / name
        for file in itertools.chain(folder.glob("*/*"), folder.glob("*"), [folder]):
            file.unlink() if file.is_file() else file.rmdir()
        del self.modules[name]
        self.write()
        if announce:
            self.events.announce("remove", name)


def boot_ns():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture
def symbolizer(host):
    host.load("old", TEXT + 0x100000, announce=False)
    watch = ModuleWatch(host.files, lambda: host.events)
    found = Symbolizer.live(host.files, modules=watch)
    found.watch = watch
    settle(found)
    yield found
    found.close()


def settle(symbolizer, timeout_s=5.0):
    """Advance until all that was announced is applied; returns the time until then in seconds."""
    began = time.monotonic()
    asked_ns = boot_ns()
    while symbolizer.advance(boot_ns()) < asked_ns:
        assert time.monotonic() < began + timeout_s
        time.sleep(0.002)
    return time.monotonic() - began


def frame(symbolizer, pc, time_ns=None):
    time_ns = boot_ns() if time_ns is None else time_ns
    return symbolizer.resolve_addresses([pc], time_ns=time_ns)[0]


def wait_for_name(symbolizer, pc, name):
    end = time.monotonic() + 20
    while frame(symbolizer, pc).function != name:
        assert time.monotonic() < end
        time.sleep(0.02)
        symbolizer.advance(boot_ns())


def test_a_module_is_known_soon_after_its_announcement(host, symbolizer):
    vmlinux, old = symbolizer.module("vmlinux"), symbolizer.module("old")
    before_ns = boot_ns()
    host.load("fresh")
    assert settle(symbolizer) < 1
    found = frame(symbolizer, TEXT + 0x14)
    assert (found.function, found.module.name, found.address) == ("fresh_a", "fresh", 0x14)
    assert found.module.build_id == "01" * 20
    assert symbolizer.module("vmlinux") is vmlinux
    assert symbolizer.module("old") is old
    assert frame(symbolizer, TEXT + 0x14, before_ns - 10**9).module is None


def test_what_ran_before_the_announcement_belongs_to_the_module(host, symbolizer):
    """Init code and the functions that it calls, from the last look that showed them free."""
    between_ns = boot_ns()
    host.load("fresh")
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x84, between_ns).function == "fresh_b"
    init = frame(symbolizer, INIT + 0x10, between_ns)
    assert (init.module.name, init.lines) == ("fresh", ())
    assert init.module.file_id != symbolizer.module("fresh").file_id
    assert frame(symbolizer, INIT + 0x10).unresolved is Unresolved.UNMAPPED


def test_a_reload_at_the_same_address_is_another_module(host, symbolizer):
    host.load("fresh")
    settle(symbolizer)
    first_ns = boot_ns()
    host.unload("fresh")
    settle(symbolizer)
    gap_ns = boot_ns()
    host.load("fresh", prefix="other_", build_id=2)
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14, first_ns).function == "fresh_a"
    assert frame(symbolizer, TEXT + 0x14).function == "other_fresh_a"
    assert frame(symbolizer, TEXT + 0x14).module.build_id == "02" * 20
    assert frame(symbolizer, TEXT + 0x14, gap_ns).function in ("", "other_fresh_a")


def test_a_reload_within_one_batch_is_seen(host, symbolizer):
    host.load("fresh")
    settle(symbolizer)
    before = symbolizer.module("fresh")
    first_ns = boot_ns()
    host.unload("fresh")
    host.load("fresh", prefix="other_")
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14, first_ns).function == "fresh_a"
    assert frame(symbolizer, TEXT + 0x14).function == "other_fresh_a"
    assert symbolizer.module("fresh").generation > before.generation


def test_an_unloaded_module_is_named_for_its_time_only(host, symbolizer):
    ran_ns = boot_ns()
    host.unload("old")
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x100014, ran_ns).function == "old_a"
    gone = frame(symbolizer, TEXT + 0x100014)
    assert (gone.module, gone.unresolved) == (None, Unresolved.MODULE_GONE)


def test_an_address_used_again_by_another_module_is_never_the_neighbours(host, symbolizer):
    """Without an announcement of the end it is nobody's between two looks."""
    ran_ns = boot_ns() - 10**9
    time.sleep(0.12)
    settle(symbolizer)
    doubt_ns = boot_ns()
    host.unload("old", announce=False)
    host.load("fresh", TEXT + 0x100000)
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x100014, ran_ns).function == "old_a"
    assert frame(symbolizer, TEXT + 0x100014, doubt_ns).unresolved is Unresolved.MODULE_GONE
    assert frame(symbolizer, TEXT + 0x100014).function == "fresh_a"


def test_init_code_is_named_while_it_runs_and_a_failure_leaves_nothing(host, symbolizer):
    """It is not announced: looking finds it."""
    host.load("failing", state="Loading", announce=False)
    time.sleep(0.12)
    symbolizer.advance(boot_ns())
    settle(symbolizer)
    running_ns = boot_ns()
    init = frame(symbolizer, INIT + 0x10, running_ns)
    assert (init.module.name, init.function, init.offset) == ("failing", "failing_init", 8)
    assert frame(symbolizer, TEXT + 0x14, running_ns).function == "failing_a"
    host.unload("failing", announce=False)
    time.sleep(0.12)
    symbolizer.advance(boot_ns())
    settle(symbolizer)
    assert frame(symbolizer, INIT + 0x10).module is None
    assert frame(symbolizer, TEXT + 0x14).unresolved is Unresolved.MODULE_GONE
    assert not symbolizer.find("failing_init")


def test_init_code_that_succeeds_is_gone_afterwards(host, symbolizer):
    host.load("slow", state="Loading", announce=False)
    time.sleep(0.12)
    symbolizer.advance(boot_ns())
    settle(symbolizer)
    running_ns = boot_ns()
    number = symbolizer.module("slow").generation
    host.load("slow")
    settle(symbolizer)
    assert frame(symbolizer, INIT + 0x10, running_ns).function == "slow_init"
    assert frame(symbolizer, INIT + 0x10).module is None
    assert frame(symbolizer, TEXT + 0x14).function == "slow_a"
    assert symbolizer.module("slow").generation == number
    assert not symbolizer.find("slow_init")


def test_lost_announcements_lead_to_a_rescan(host, symbolizer):
    host.load("fresh", announce=False)
    host.events.error = OSError(errno.ENOBUFS, "lost")
    host.events.wake()
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14).function == "fresh_a"
    assert symbolizer.watch.counts.rescans == 1


def test_a_failing_watcher_starts_again_and_misses_nothing(host, symbolizer, caplog):
    caplog.set_level(logging.CRITICAL)
    host.load("fresh", announce=False)
    host.events.error = OSError(errno.EBADF, "broken")
    host.events.wake()
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14).function == "fresh_a"
    assert symbolizer.watch.counts.restarts == 1


def test_a_burst_is_handled_together(host, symbolizer):
    readings = symbolizer.watch.counts.readings
    opened = host.kallsyms_opened
    for number in range(50):
        host.load(f"m{number}", TEXT + 0x4000 * number, init=INIT + 0x1000 * number)
    settle(symbolizer)
    for number in range(50):
        assert frame(symbolizer, TEXT + 0x4000 * number + 0x14).module.name == f"m{number}"
        wait_for_name(symbolizer, TEXT + 0x4000 * number + 0x14, f"m{number}_a")
    assert symbolizer.watch.counts.readings - readings < 50
    assert host.kallsyms_opened - opened <= 50


def test_names_that_cannot_be_read_yet_say_so_and_come_later(host, symbolizer):
    kallsyms = host.root / "proc/kallsyms"
    host.load("fresh", announce=False)
    kallsyms.write_text(CORE)
    host.events.announce("add", "fresh")
    settle(symbolizer)
    early = frame(symbolizer, TEXT + 0x14)
    assert (early.module.name, early.address, early.function) == ("fresh", 0x14, "")
    host.write()
    wait_for_name(symbolizer, TEXT + 0x14, "fresh_a")


def test_a_module_without_names_is_not_looked_for_for_ever(host, symbolizer):
    host.load("fresh", announce=False)
    (host.root / "proc/kallsyms").write_text(CORE)
    opened = host.kallsyms_opened
    host.events.announce("add", "fresh")
    end = time.monotonic() + 4
    while host.kallsyms_opened < opened + MAX_ATTEMPTS and time.monotonic() < end:
        symbolizer.advance(boot_ns())
        time.sleep(0.02)
    time.sleep(0.3)
    assert host.kallsyms_opened == opened + MAX_ATTEMPTS
    assert frame(symbolizer, TEXT + 0x14).unresolved is Unresolved.NO_SYMBOL_TABLE


def test_without_announcements_modules_are_found_by_looking(host, caplog):
    def refuse():
        raise OSError(errno.EPERM, "no socket")

    with caplog.at_level(logging.WARNING):
        watch = ModuleWatch(host.files, refuse)
    assert "no socket" in watch.problem
    symbolizer = Symbolizer.live(host.files, modules=watch)
    settle(symbolizer)
    host.load("fresh")
    time.sleep(0.12)
    symbolizer.advance(boot_ns())
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14).function == "fresh_a"
    symbolizer.close()


def test_closing_ends_the_thread(host, symbolizer):
    symbolizer.close()
    symbolizer.close()
    assert "kprofiler-modules" not in {thread.name for thread in threading.enumerate()}


def test_captured_uevents_are_understood():
    """All module events of a boot, among those of devices."""
    captured = Path(__file__).parents[2] / "data/kernel/6.12-uevents.xz"
    data = lzma.decompress(captured.read_bytes())
    events, others = [], 0
    while data:
        *_, length = struct.unpack_from("<dIII", data)
        event = parse_uevent(data[20 : 20 + length])
        data = data[20 + length :]
        others += event is None
        events += [event] if event else []
    assert events[:3] == [
        ModuleEvent(ModuleAction.ADDED, "dummy"),
        ModuleEvent(ModuleAction.REMOVED, "dummy"),
        ModuleEvent(ModuleAction.ADDED, "dummy"),
    ]
    assert (len(events), others) == (163, 175)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 50,
        b"libudev\0\xfe\xed\xca\xfe",
        b"add@/module/x\0ACTION=add\0DEVPATH=/module/x",
        b"add@/module/x\0ACTION=bind\0DEVPATH=/module/x\0SUBSYSTEM=module",
        b"add@/module/x\0ACTION=add\0DEVPATH=/module/x/y\0SUBSYSTEM=module",
        b"add@/module/\0ACTION=add\0DEVPATH=/module/\0SUBSYSTEM=module",
    ],
)
def test_other_datagrams_are_passed_over(data):
    assert parse_uevent(data) is None
