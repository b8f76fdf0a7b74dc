"""A fake host backed by files, on which tests load and unload modules."""

import itertools
import lzma
import struct
import time
from pathlib import Path

from otel_kprofiler.host import Access
from otel_kprofiler.tracking.module_uevents import NoEvents, parse_uevent
from tests.waiting import wait_until

CAPTURED = Path(__file__).parents[2] / "data/kernel/6.12-uevents.xz"

KERNEL = 0xFFFFFFFF81000000
TEXT = 0xFFFFFFFFC0001000
INIT = 0xFFFFFFFFC0100000
CORE = f"""{KERNEL:016x} T _text
{KERNEL + 0x100:016x} T vfs_read
{KERNEL + 0x8000:016x} T _etext
"""


class Events(NoEvents):
    """A fake source of uevents, which tests queue."""

    def __init__(self):
        super().__init__()
        self.queue = []
        self.error = None
        self.receipts = 0

    def is_waiting(self):
        return bool(self.queue or self.error)

    def receive(self):
        self.receipts += 1
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
    """A captured host on which tests load and unload modules."""

    def __init__(self, root: Path):
        self.root = root
        self.made_ns = boot_ns()
        self.modules = {}
        self.events = Events()
        self.kallsyms_opened = 0
        self.before_kallsyms = lambda: None
        self.files = Access(str(root))
        self.open_fd = self.files.open_fd
        self.read_link, self.list_dir = self.files.read_link, self.files.list_dir
        self.read_bytes = self.files.read_bytes
        (root / "proc").mkdir()
        (root / "sys/module").mkdir(parents=True)
        self.files.open_fd = self._open
        self.write()

    def _open(self, path):
        if path == "/proc/kallsyms":
            self.kallsyms_opened += 1
            self.before_kallsyms()
        return Access.open_fd(self.files, path)

    def write(self):
        lines, symbols = [], CORE
        for name, (base, functions, state, init) in reversed(self.modules.items()):
            lines.append(f"{name} 8192 0 - {state} 0x{base:016x}\n")
            shown = functions
            if state == "Loading":  # kallsyms still contains sections and imports
                shown = {**functions, **init}
                symbols += f"{0:016x} ? \t[{name}]\n{base:016x} t \t[{name}]\n"
                symbols += f"{KERNEL + 0x100:016x} U vfs_read\t[{name}]\n"
                symbols += f"{KERNEL + 0x200:016x} w weak_reference\t[{name}]\n"
            for function, address in shown.items():
                symbols += f"{address:016x} t {function}\t[{name}]\n"
        for path, content in (("kallsyms", symbols), ("modules", "".join(lines))):
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

    def finish_scan(self):
        """Waits until the watch has finished a scan that may already have begun."""
        for _ in range(3):  # a scan follows two receipts
            receipts = self.events.receipts
            self.events.wake()
            wait_until(lambda before=receipts: self.events.receipts > before)


def read_captured():
    """Yields (datagram, event) for each uevent captured during boot, module loads and unloads.

    The event is None for a datagram about a device.
    """
    data = lzma.decompress(CAPTURED.read_bytes())
    while data:
        *_, length = struct.unpack_from("<dIII", data)
        datagram, data = data[20 : 20 + length], data[20 + length :]
        yield datagram, parse_uevent(datagram)


def boot_ns():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def settle(symbolizer, timeout_s=60.0, now_ns=boot_ns):
    """Advances the symbolizer until it has applied all announced changes."""
    end = time.monotonic() + timeout_s
    asked_ns = now_ns()
    while symbolizer.advance(now_ns()) < asked_ns:
        assert time.monotonic() < end
        time.sleep(0.002)


def frame(symbolizer, pc, time_ns=None):
    time_ns = boot_ns() if time_ns is None else time_ns
    return symbolizer.resolve_addresses([pc], time_ns=time_ns)[0]


def wait_for_name(symbolizer, pc, name):
    end = time.monotonic() + 60
    while frame(symbolizer, pc).function != name:
        assert time.monotonic() < end
        time.sleep(0.02)
        symbolizer.advance(boot_ns())
