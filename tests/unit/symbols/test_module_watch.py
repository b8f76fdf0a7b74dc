"""Module tracking builds a history of snapshots from uevents and from the host's files."""

import errno
import logging
import threading
import time

import pytest
from module_host import CORE, INIT, TEXT, Host, boot_ns, frame, read_captured, settle, wait_for_name

from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.tracking import ModuleWatch
from otel_kprofiler.tracking.module_uevents import ModuleAction, ModuleEvent, parse_uevent
from otel_kprofiler.tracking.module_watch import MAX_ATTEMPTS
from tests.raising import raising


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture
def symbolizer(host):
    host.load("old", TEXT + 0x100000, announce=False)
    watch = ModuleWatch(host.files, lambda: host.events)
    result = KernelSymbolizer.live(host.files, modules=watch)
    result.watch = watch
    settle(result)
    host.finish_scan()  # a scan in progress could see a module before a test announces it
    yield result
    result.close()


def poll(symbolizer):
    """Makes the module watch poll for unannounced modules."""
    time.sleep(0.12)
    symbolizer.advance(boot_ns())
    settle(symbolizer)


def test_a_module_is_resolved_once_it_has_been_announced(host, symbolizer):
    vmlinux, old = symbolizer.module("vmlinux"), symbolizer.module("old")
    host.load("fresh")
    settle(symbolizer)
    result = frame(symbolizer, TEXT + 0x14)
    assert (result.function, result.module.name, result.address) == ("fresh_a", "fresh", 0x14)
    assert result.module.build_id == "01" * 20
    assert symbolizer.module("vmlinux") is vmlinux
    assert symbolizer.module("old") is old
    assert frame(symbolizer, TEXT + 0x14, host.made_ns).module is None


def test_a_forked_child_finds_modules_that_changed_since_the_last_read(host, symbolizer):
    host.load("fresh")
    host.load("going", TEXT + 0x200000, init=INIT + 0x1000)
    settle(symbolizer)
    since_ns = symbolizer.complete_until_ns
    symbolizer.watch.close()
    host.unload("fresh", announce=False)
    host.load("fresh", build_id=2, announce=False)
    host.unload("going", announce=False)
    host.load("coming", TEXT + 0x300000, init=INIT + 0x2000, announce=False)
    watch = ModuleWatch(host.files, lambda: host.events, missed_since_ns=since_ns)
    child = symbolizer.copy_for_child(files=host.files, modules=watch)
    try:
        settle(child)
        assert child.module("fresh").build_id == "02" * 20
        assert child.module("going") is None
        assert frame(child, TEXT + 0x300014).function == "coming_a"
        assert frame(child, TEXT + 0x100014).function == "old_a"
        assert child.module("old") is symbolizer.module("old")
        assert frame(child, TEXT + 0x14, since_ns + 1).module is None, "before or after?"
        assert frame(child, INIT + 0x10, since_ns).unresolved is Unresolved.UNMAPPED
    finally:
        child.close()


def test_code_run_before_its_module_was_announced_is_attributed_to_the_module(host, symbolizer):
    """Init code may run at any time between the last read and the announcement."""
    between_ns = boot_ns()
    host.load("fresh")
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x84, between_ns).function == "fresh_b"
    init = frame(symbolizer, INIT + 0x10, between_ns)
    assert (init.module.name, init.lines) == ("fresh", ())
    assert init.module.file_id != symbolizer.module("fresh").file_id
    assert frame(symbolizer, INIT + 0x10).unresolved is Unresolved.UNMAPPED


@pytest.mark.parametrize(("in_one_batch", "build_id"), [(False, 2), (True, 1)])
def test_a_reload_at_the_same_address_adds_a_new_module(host, symbolizer, in_one_batch, build_id):
    host.load("fresh")
    settle(symbolizer)
    before = symbolizer.module("fresh")
    first_ns = boot_ns()
    settle(symbolizer)
    host.unload("fresh")
    if not in_one_batch:
        settle(symbolizer)
    gap_ns = boot_ns()
    host.load("fresh", prefix="other_", build_id=build_id)
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14, first_ns).function == "fresh_a"
    assert frame(symbolizer, TEXT + 0x14).function == "other_fresh_a"
    assert frame(symbolizer, TEXT + 0x14).module.build_id == f"{build_id:02}" * 20
    assert in_one_batch or frame(symbolizer, TEXT + 0x14, gap_ns).function in ("", "other_fresh_a")
    assert symbolizer.module("fresh").generation > before.generation


def test_an_unloaded_module_is_named_only_in_samples_from_its_lifetime(host, symbolizer):
    ran_ns = boot_ns()
    settle(symbolizer)
    host.unload("old")
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x100014, ran_ns).function == "old_a"
    gone = frame(symbolizer, TEXT + 0x100014)
    assert (gone.module, gone.unresolved) == (None, Unresolved.MODULE_GONE)


def test_a_reused_address_never_resolves_to_the_wrong_module(host, symbolizer):
    """If a removal is not announced, the address resolves to no module between two reads."""
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


def test_init_code_is_named_only_while_it_runs_if_the_module_fails_to_load(host, symbolizer):
    """Without a uevent, polling finds a module whose init function is running."""
    host.load("failing", state="Loading", announce=False)
    poll(symbolizer)
    running_ns = boot_ns()
    init = frame(symbolizer, INIT + 0x10, running_ns)
    assert (init.module.name, init.function, init.offset) == ("failing", "failing_init", 8)
    assert frame(symbolizer, TEXT + 0x14, running_ns).function == "failing_a"
    host.unload("failing", announce=False)
    poll(symbolizer)
    assert frame(symbolizer, INIT + 0x10).module is None
    assert frame(symbolizer, TEXT + 0x14).unresolved is Unresolved.MODULE_GONE
    assert not symbolizer.find("failing_init")


def test_init_code_is_removed_after_initialization_succeeds(host, symbolizer):
    host.load("slow", state="Loading", announce=False)
    poll(symbolizer)
    running_ns = boot_ns()
    number = symbolizer.module("slow").generation
    host.load("slow")
    settle(symbolizer)
    assert frame(symbolizer, INIT + 0x10, running_ns).function == "slow_init"
    assert frame(symbolizer, INIT + 0x10).module is None
    assert frame(symbolizer, TEXT + 0x14).function == "slow_a"
    assert symbolizer.module("slow").generation == number
    assert not symbolizer.find("slow_init")


@pytest.mark.parametrize(
    ("error", "counter"), [(errno.ENOBUFS, "rescans"), (errno.EBADF, "restarts")]
)
def test_no_module_is_missed_after_a_failed_receive(host, symbolizer, caplog, error, counter):
    caplog.set_level(logging.CRITICAL)
    host.load("fresh", announce=False)
    host.events.error = OSError(error, "lost or broken")
    host.events.wake()
    settle(symbolizer)
    assert frame(symbolizer, TEXT + 0x14).function == "fresh_a"
    assert getattr(symbolizer.watch.counts, counter) == 1


def test_a_burst_of_announcements_is_handled_in_one_pass(host, symbolizer):
    readings = symbolizer.watch.counts.readings
    opened = host.kallsyms_opened
    with symbolizer.watch._lock:  # so that all announcements are read in one pass
        for number in range(50):
            host.load(f"m{number}", TEXT + 0x4000 * number, init=INIT + 0x1000 * number)
    settle(symbolizer)
    for number in range(50):
        assert frame(symbolizer, TEXT + 0x4000 * number + 0x14).module.name == f"m{number}"
        wait_for_name(symbolizer, TEXT + 0x4000 * number + 0x14, f"m{number}_a")
    assert symbolizer.watch.counts.readings - readings < 50
    assert host.kallsyms_opened - opened <= 50


def test_a_module_loaded_during_a_read_of_kallsyms_is_resolved_correctly(host, symbolizer):
    def load_once():
        host.before_kallsyms = lambda: None
        kallsyms = host.root / "proc/kallsyms"
        before = kallsyms.read_text()
        host.load("late", TEXT + 0x8000)
        kallsyms.write_text(before)  # this read is too early to show the module

    host.before_kallsyms = load_once
    host.load("fresh")
    wait_for_name(symbolizer, TEXT + 0x14, "fresh_a")
    host.write()
    wait_for_name(symbolizer, TEXT + 0x8014, "late_a")


def test_frames_in_a_new_module_are_unnamed_until_its_symbols_are_read(host, symbolizer):
    kallsyms = host.root / "proc/kallsyms"
    host.load("fresh", announce=False)
    kallsyms.write_text(CORE)
    host.events.announce("add", "fresh")
    settle(symbolizer)
    early = frame(symbolizer, TEXT + 0x14)
    assert (early.module.name, early.address, early.function) == ("fresh", 0x14, "")
    host.write()
    wait_for_name(symbolizer, TEXT + 0x14, "fresh_a")


@pytest.mark.system
def test_the_search_for_a_modules_symbols_ends_after_a_fixed_number_of_attempts(host, symbolizer):
    host.load("fresh", announce=False)
    (host.root / "proc/kallsyms").write_text(CORE)
    opened = host.kallsyms_opened
    host.events.announce("add", "fresh")
    end = time.monotonic() + 60
    while host.kallsyms_opened < opened + MAX_ATTEMPTS and time.monotonic() < end:
        symbolizer.advance(boot_ns())
        time.sleep(0.02)
    time.sleep(0.3)
    assert host.kallsyms_opened == opened + MAX_ATTEMPTS
    assert frame(symbolizer, TEXT + 0x14).unresolved is Unresolved.NO_SYMBOL_TABLE


def test_polling_finds_modules_that_were_never_announced(host, caplog):
    with caplog.at_level(logging.WARNING):
        watch = ModuleWatch(host.files, raising(OSError(errno.EPERM, "no socket")))
    assert "no socket" in watch.problem
    symbolizer = KernelSymbolizer.live(host.files, modules=watch)
    settle(symbolizer)
    host.load("fresh")
    poll(symbolizer)
    assert frame(symbolizer, TEXT + 0x14).function == "fresh_a"
    symbolizer.close()


def test_closing_the_watch_stops_its_thread(host, symbolizer):
    symbolizer.close()
    symbolizer.close()
    assert "kprofiler-modules" not in {thread.name for thread in threading.enumerate()}


def test_captured_uevents_are_parsed():
    """The capture contains all module events of a boot, interleaved with device events."""
    captured = [event for _, event in read_captured()]
    events = [event for event in captured if event]
    assert events[:3] == [
        ModuleEvent(ModuleAction.ADDED, "dummy"),
        ModuleEvent(ModuleAction.REMOVED, "dummy"),
        ModuleEvent(ModuleAction.ADDED, "dummy"),
    ]
    assert (len(events), captured.count(None)) == (163, 175)


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
def test_datagrams_without_module_events_are_ignored(data):
    assert parse_uevent(data) is None
