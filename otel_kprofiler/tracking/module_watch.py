"""Tracks modules as they are loaded and unloaded.

A thread, started by the first poll, sleeps until the kernel announces a module. The thread then
reads the sections and build ids of new modules (sufficient for file ids and RVAs), and then the
modules' symbol names. ``poll`` also checks the list of modules, because a module is not announced
while its init function is running, and never if the function fails.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Final

from otel_kprofiler import forks
from otel_kprofiler.clock import SystemTime
from otel_kprofiler.errors import describe_error
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from otel_kprofiler.host import CpuShare, HostFiles
from otel_kprofiler.symbols import (
    FOREVER,
    LOADING,
    PROC_KALLSYMS,
    PROC_MODULES,
    VMLINUX,
    FoundModule,
    LineCollector,
    LoadedModule,
    ModuleCounts,
    ModuleFiles,
    ModuleReading,
    ProcModule,
    Removal,
    Snapshot,
    add_names,
    make_file_id,
    make_found,
    parse_modules,
    read_module,
    read_pieces,
    taken_pages,
)
from otel_kprofiler.tracking.module_uevents import (
    ModuleAction,
    ModuleEvents,
    NoEvents,
    parse_uevent,
)

SCAN_INTERVAL_NS: Final = 100_000_000
"""Minimum interval between checks of the module list when no module is announced."""
BATCH_NS: Final = 20_000_000
"""Announcements within this period are handled together."""
NAMES_SHARE: Final = 0.05
"""Maximum long-term fraction of one CPU's time spent on reading names."""
MAX_ATTEMPTS: Final = 5
"""Number of failed attempts after which retries slow down to one per :data:`RETRY_INTERVAL_NS`."""
RETRY_INTERVAL_NS: Final = 60_000_000_000
"""Interval between attempts to read a module's names or sections after repeated failures."""

_YIELD_S: Final = 50e-6  # allows other threads to acquire the GIL
_LIST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_UNLOADING: Final = "Unloading"
_log = logging.getLogger(__name__)


class ModuleWatch(ForkAware):
    """Tracks the modules on this host until closed.

    One thread must call ``begin``, ``poll`` and ``close``, in that order.

    Args:
        open_events: opens the source of the kernel's module announcements. If ``open_events``
            raises an ``OSError``, the error becomes :attr:`problem`, and modules are detected only
            by polling the module list.
        until_bpf: whether to stop reading kallsyms at the first BPF program.
        keep_datagrams: whether to keep datagrams for :meth:`take_datagrams`.
        missed_since_ns: boottime after which changes were missed, as in a forked child; all modules
            are then compared with the snapshot passed to ``begin``.
        names_share: maximum long-term fraction of one CPU spent on reading names.
    """

    def __init__(
        self,
        files: HostFiles,
        open_events: Callable[[], ModuleEvents],
        *,
        until_bpf: bool = False,
        keep_datagrams: bool = False,
        missed_since_ns: int | None = None,
        names_share: float = NAMES_SHARE,
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        self.counts = ModuleCounts()
        self.problem = ""
        self._files = files
        self._open_events = open_events
        self._until_bpf = until_bpf
        self._keep_datagrams = keep_datagrams
        self._share = CpuShare(names_share)
        self._now = now_ns or SystemTime().boot_ns
        self._lock = ProcessLock()  # guards the attributes up to the next comment
        # Everything announced up to _heard_ns has been received.
        self._complete_ns = self._looked_ns = self._heard_ns = self._now()
        self._events = self._open()
        self._added: dict[str, int] = {}
        self._removed: dict[str, Removal] = {}
        self._rescan = missed_since_ns is not None
        if missed_since_ns is not None:
            self._complete_ns = self._looked_ns = missed_since_ns
        self._asked = True
        self._busy = True
        self._readings: list[ModuleReading] = []
        self._datagrams: list[tuple[int, bytes]] = []
        # Only the worker modifies the members below. poll() reads them while the worker is idle.
        self._known: dict[str, FoundModule] = {}
        self._unknown_gone_ns = 0
        self._retries: dict[str, int] = {}
        self._retry_ns = FOREVER
        self._names_ns = FOREVER
        self._failed_ns = self._looked_ns + RETRY_INTERVAL_NS
        self._worked_ns = 0
        self._next = 1
        self._kernel_file_id = make_file_id(None, VMLINUX)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kprofiler-modules", daemon=True)
        forks.register(ForkStep.RELEASE, self)

    def begin(self, snapshot: Snapshot) -> None:
        """Start from a snapshot that was read after this watch was created; call once."""
        vmlinux = snapshot.module(VMLINUX)
        if vmlinux is not None:
            self._kernel_file_id = vmlinux.file_id
        for symbols in snapshot.loaded():
            module = symbols.module
            listed = ProcModule(module.name, 0, "Live", module.base)
            files = ModuleFiles({}, module.build_id, "", "")
            attempts = None if symbols.table is not None or snapshot.hidden else MAX_ATTEMPTS
            self._known[module.name] = FoundModule(listed, files, LoadedModule(symbols), attempts)
            self._next = max(self._next, module.generation + 1)
        self._events.wake()

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Returns new changes, and the ``CLOCK_BOOTTIME`` up to which they are complete."""
        if self._thread.ident is None and not self._closed:
            self._thread.start()
        with self._lock:
            readings, self._readings = self._readings, []
            if not self._busy and not self._events.is_waiting():
                self._heard_ns = max(self._heard_ns, now_ns)
                if now_ns - self._looked_ns < SCAN_INTERVAL_NS or self._is_unchanged():
                    self._complete_ns = now_ns
                else:
                    self._asked = self._busy = True
                    self._events.wake()
            return readings, self._complete_ns

    def take_datagrams(self) -> list[tuple[int, bytes]]:
        """Returns the datagrams received since the last call, each with its boottime."""
        with self._lock:
            taken, self._datagrams = self._datagrams, []
        return taken

    def close(self) -> None:
        """Stop the thread; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._events.wake()
        if self._thread.is_alive():
            self._thread.join()
        forks.unregister(self)
        self._events.close()

    def after_fork_in_child(self) -> None:
        """Close the shared socket."""
        self._closed = True
        forks.unregister(self)
        self._events.close()

    def _open(self) -> ModuleEvents:
        try:
            return self._open_events()
        except OSError as error:
            self.problem = (
                f"modules are found only by polling /proc/modules: {describe_error(error)}"
            )
        _log.warning("%s", self.problem)
        return NoEvents()

    def _is_unchanged(self) -> bool:
        """Returns whether the module list is unchanged. The caller must hold the lock."""
        looked_ns = self._now()
        try:
            lines = self._read_list()
        except OSError:
            return False  # the thread will report the error
        modules = self._known
        for line in lines:
            module = modules.get(line.name)
            if module is None or not module.is_at(line):
                return False
            if (module.listed.state == LOADING) != (line.state == LOADING):
                return False
        if len(lines) != len(modules):
            return False
        self._looked_ns = looked_ns
        return True

    def _read_list(self) -> list[ProcModule]:
        """Returns the loaded modules, oldest first. Raises ``OSError``."""
        try:
            lines, _ = parse_modules(self._files.read_bytes(PROC_MODULES))
        except FileNotFoundError:  # a kernel without module support
            return []
        return [
            line for line in reversed(lines) if line.state != _UNLOADING or line.name in self._known
        ]

    def _run(self) -> None:
        pause_s = 0.05
        while not self._closed:
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - counted and logged; otherwise, tracking would stop
                _log.exception("module tracking failed; restarting it and rereading all modules")
                self._count(restarts=1)
                with self._lock:
                    self._events.close()
                    self._events = NoEvents()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                with self._lock:
                    self._events = self._open()
                    self._rescan = self._busy = True

    def _serve(self) -> None:
        while not self._closed:
            if not self._busy:
                next_ns = min(self._retry_ns, self._names_ns)
                wait_s = None if next_ns == FOREVER else (next_ns - self._now()) / 1e9
                self._events.wait(wait_s)
            self._receive()
            now_ns = self._now()
            if now_ns >= min(self._retry_ns, self._names_ns):
                self._busy = True
            if self._busy:
                time.sleep(max(0, self._worked_ns + BATCH_NS - now_ns) / 1e9)
                self._receive()
                self._scan()
                self._read_names()
                self._worked_ns = self._now()
                with self._lock:
                    asked = self._added or self._removed or self._rescan or self._asked
                    self._busy = bool(asked) or self._names_ns <= self._worked_ns

    def _receive(self) -> None:
        """Queue modules from received events, and bound their removal times."""
        with self._lock:
            asked_ns = self._now()
            try:
                datagrams = self._events.receive()
            except OSError as error:
                self._rescan = self._busy = True
                if error.errno != errno.ENOBUFS:
                    raise
                self._count(rescans=1)
                datagrams = self._events.receive()
            now_ns = self._now()
            for datagram in datagrams:
                event = parse_uevent(datagram)
                if event is None:
                    continue
                if self._keep_datagrams:
                    self._datagrams.append((now_ns, datagram))
                self._count(events=1)
                name = event.name
                if event.action is ModuleAction.ADDED:
                    self._added[name] = now_ns
                    continue
                if name in self._removed or name not in self._known:
                    self._unknown_gone_ns = now_ns
                self._removed.setdefault(name, Removal(self._heard_ns, now_ns))
                self._added.pop(name, None)
            self._heard_ns = asked_ns
            self._busy = bool(self._busy or self._added or self._removed or self._rescan)

    def _scan(self) -> None:
        """Read the module list, and the sections and build ids of new modules."""
        with self._lock:
            added, self._added = self._added, {}
            removed, self._removed = self._removed, {}
            again, self._rescan, self._asked = self._rescan, False, False
        free_ns = max(self._looked_ns, self._unknown_gone_ns)
        looked_ns = self._now()
        try:
            lines = self._read_list()
        except OSError as error:
            _log.warning("the module list cannot be read: %s", describe_error(error))
            with self._lock:
                self._added, self._removed = {**added, **self._added}, {**self._removed, **removed}
                self._rescan = True
            time.sleep(_LIST_PAUSE_S)
            return
        retries = {}
        if looked_ns >= self._retry_ns:
            retries, self._retries, self._retry_ns = self._retries, {}, FOREVER
        taken = [line.address for line in lines if line.address]
        taken += [
            page for module in self._known.values() for page in taken_pages(module.files.sections)
        ]
        last = self._known
        modules: dict[str, FoundModule] = {}
        ended = {last[name].number: gone for name, gone in removed.items() if name in last}
        for line in lines:
            name = line.name
            previous = last.get(name)
            if name in removed:
                previous = None
                if line.state == _UNLOADING:
                    continue
            started_ns = added.get(name, free_ns)
            if previous is not None and previous.is_at(line):
                previous = previous.started(line, started_ns)
                if not (again or name in added or name in retries):
                    modules[name] = previous
                    continue
            files = read_module(self._files, name)
            if not files.sections and line.address:
                self._retry(name, retries.get(name, 0))
            if previous is not None and previous.is_at(line) and previous.is_same(files):
                modules[name] = previous
                continue
            until_ns = FOREVER if line.state == LOADING else added.get(name)
            modules[name] = make_found(
                line, files, taken, self._kernel_file_id, number=self._next, init_until_ns=until_ns
            )
            self._next += 1
        kept = {module.number for module in modules.values()}
        for number in {module.number for module in last.values()} - kept - ended.keys():
            ended[number] = Removal(self._looked_ns, looked_ns)  # the removal was not announced
        self._count(readings=1)
        self._publish(modules, ended, looked_ns, free_ns)
        self._looked_ns = looked_ns

    def _publish(
        self,
        modules: dict[str, FoundModule],
        ended: dict[int, Removal],
        looked_ns: int,
        free_ns: int,
    ) -> None:
        last = [module.loaded for module in self._known.values()]
        loaded = tuple(module.loaded for module in modules.values())
        with self._lock:
            self._known = modules
            if [*loaded] != last:
                self._readings.append(ModuleReading(looked_ns, free_ns, ended, loaded))

    def _retry(self, name: str, attempts: int) -> None:
        pause_ns = BATCH_NS << attempts if attempts < MAX_ATTEMPTS else RETRY_INTERVAL_NS
        self._retries[name] = attempts + 1
        self._retry_ns = min(self._retry_ns, self._now() + pause_ns)

    def _read_names(self) -> None:
        """Read missing symbol names, unless the CPU budget for reading names is exhausted."""
        began_ns = self._now()
        attempts = {name: module.attempts for name, module in self._known.items()}
        failed = {name for name, count in attempts.items() if count and count >= MAX_ATTEMPTS}
        self._names_ns = self._failed_ns if failed else FOREVER
        wanted = {
            name: self._known[name].number
            for name, count in attempts.items()
            if count is not None and (name not in failed or began_ns >= self._failed_ns)
        }
        if not wanted:
            return
        wait_ns = self._share.wait_ns(began_ns)
        if wait_ns:
            self._names_ns = began_ns + wait_ns + BATCH_NS
            return
        if began_ns >= self._failed_ns:
            self._failed_ns = self._names_ns = began_ns + RETRY_INTERVAL_NS
        began_cpu_ns = time.thread_time_ns()
        lines = self._collect(wanted)
        taken = [module.listed.address for module in self._known.values()]
        modules = dict(self._known)
        for name, number in wanted.items():
            module = modules.get(name)
            if module is not None and module.number == number:
                modules[name] = module = add_names(module, lines.get(name), taken)
                if module.attempts is not None:
                    later_ns = self._failed_ns
                    if module.attempts < MAX_ATTEMPTS:
                        later_ns = self._now() + (5 * BATCH_NS << module.attempts)
                    self._names_ns = min(self._names_ns, later_ns)
        self._count(names_read=1)
        self._publish(modules, {}, self._looked_ns, self._looked_ns)
        if any(module.attempts == 0 for module in modules.values()):
            self._names_ns = self._now()  # the module was detected while names were being read
        self._share.spend(time.thread_time_ns() - began_cpu_ns)

    def _collect(self, names: Iterable[str]) -> dict[str, bytes]:
        """Collects the kallsyms lines for modules while handling announcements that arrive."""
        collector = LineCollector(names, until_bpf=self._until_bpf)
        try:
            descriptor = self._files.open_fd(PROC_KALLSYMS)
            with closing(read_pieces(descriptor, report_cpu_ns=self._share.spend)) as pieces:
                for piece in pieces:
                    if self._events.is_waiting():
                        self._receive()
                        self._scan()
                    if not collector.feed(piece) or self._closed:
                        break
                    time.sleep(_YIELD_S)
        except OSError as error:
            _log.warning("module symbols cannot be read: %s", describe_error(error))
            return {}
        return collector.lines

    def _count(self, **more: int) -> None:
        counts = self.counts
        self.counts = counts._replace(**{k: getattr(counts, k) + n for k, n in more.items()})
