"""Symbols in many modules match the module files, and code without a backing file is named."""

import platform
import subprocess
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import pytest
from guest.kernel_files import kprobe_inside, sysctl, traced
from guest.modules import insert, loaded_objects, read_module_symbols, remove, spinning
from guest.nobody import as_nobody
from guest.sampled import sampler

from otel_kprofiler.model import ModuleKind, Unresolved
from otel_kprofiler.symbols import HiddenCause, KernelSymbolizer

pytestmark = pytest.mark.kernel

# Small modules that need no hardware, loaded in this order with their dependencies.
MODULES = (
    *("xxhash_generic", "soundcore", "libcrc32c", "dummy", "ifb", "sch_fq", "tcp_bbr"),
    *("tcp_vegas", "nls_utf8", "nls_ascii", "michael_mic", "cmac", "ccm", "br_netfilter"),
    *("loop", "configfs", "ip_tables", "nf_tables", "veth", "tun"),
)


def visible(symbolizer):
    """Returns why symbols are hidden and how many are visible, in a form that can be pickled."""
    return symbolizer.hidden, len(symbolizer.find("schedule"))


def test_kprobe_pages_and_trampolines_are_named():
    """Kprobe pages and ftrace trampolines are named as such."""
    with kprobe_inside("ksys_read"), traced(["ksys_write"]):
        pages = [s for s in read_module_symbols() if s.module.startswith("__builtin__")]
        names = {page.name for page in pages}
        if platform.machine() == "x86_64":  # arm64 calls tracers without trampolines
            assert "ftrace_trampoline" in names
        assert names & {"kprobe_insn_page", "kprobe_optinsn_page"}
        symbolizer = KernelSymbolizer.live()
        for page in pages:
            (frame,) = symbolizer.resolve_addresses([page.address])
            assert frame.function == page.name
            assert frame.module.kind is ModuleKind.OUT_OF_LINE


def test_bpf_programs_are_named():
    """A loaded BPF program appears under its name, as a separate module."""
    with sampler():
        # Linux 5.10 names subprograms after their program.
        symbols = [s for s in read_module_symbols() if "_kprofiler_" in s.name]
        symbolizer = KernelSymbolizer.live()
        # Resolve each address as a leaf frame, because callers are looked up at return address - 1.
        frames = [symbolizer.resolve_addresses([symbol.address])[0] for symbol in symbols]
    assert symbols
    for symbol, frame in zip(symbols, frames, strict=True):
        assert symbol.module == "bpf"
        # Linux 5.10 lists a program twice: as itself, and as its first function.
        assert frame.function in {one.name for one in symbols if one.address == symbol.address}
        assert frame.module.kind is ModuleKind.BPF


HIDDEN = HiddenCause.NO_CAP_SYSLOG


@pytest.mark.parametrize(
    ("restrict", "without", "with_syslog"),
    [
        (0, HIDDEN, None),
        (1, HIDDEN, None),
        (2, HiddenCause.KPTR_RESTRICT, HiddenCause.KPTR_RESTRICT),
    ],
)
def test_hidden_symbols_are_reported_as_hidden(restrict, without, with_syslog):
    """Symbols are visible only with CAP_SYSLOG, and only if kptr_restrict is 0 or 1."""
    with sysctl("kernel.kptr_restrict", restrict):
        for capabilities, hidden in (((), without), (("CAP_SYSLOG",), with_syslog)):
            assert as_nobody(capabilities, lambda: visible(KernelSymbolizer.live())) == (
                hidden,
                0 if hidden else 1,
            )


def test_frames_report_that_their_symbols_are_hidden():
    """Frames whose symbols are hidden state that reason instead of a guessed name."""
    address = next(s.address for s in read_module_symbols() if s.type in "tT")
    with sysctl("kernel.kptr_restrict", 2):
        (frame,) = KernelSymbolizer.live().resolve_addresses([address])
    assert frame.unresolved is Unresolved.HIDDEN


def test_the_kernel_build_id_matches_the_build_id_in_sys_kernel_notes():
    """The kernel's build id matches the build id in ``/sys/kernel/notes``."""
    notes = Path("/sys/kernel/notes").read_bytes()
    build_id = KernelSymbolizer.live().snapshot.vmlinux_build_id
    assert build_id is not None
    assert b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0" + bytes.fromhex(build_id) in notes


def load(name):
    subprocess.run(["modprobe", name], check=True)


def overlapping_sizes():
    """Returns (address, size) of modules whose range in ``/proc/modules`` overlaps the next."""
    fields = [line.split() for line in Path("/proc/modules").read_text().splitlines()]
    extents = sorted((int(f[5], 16), int(f[1])) for f in fields)
    return [low for low, high in pairwise(extents) if sum(low) > high[0]]


@pytest.fixture(scope="module")
def modules():
    """Loads many modules while ftrace keeps the symbols of their init functions."""
    # Since Linux 6.4, the text and data of a module are allocated separately. The data of the last
    # module loaded here is too large for the gap that holds the module's text, so the module's
    # address plus size extends beyond the previous module.
    insert()
    load("nls_iso8859_1")
    remove()
    load("nls_cp949")
    with traced(f"*:mod:{name}" for name in MODULES):
        for name in MODULES:
            load(name)
        yield loaded_objects()


class Truth:
    """The runtime addresses of all module functions, computed from the files alone."""

    def __init__(self, modules):
        names = {}
        for module, (base, file) in modules.items():
            for name, places in file.functions.items():
                for start, end in places:
                    if not name.startswith("__pfx_"):
                        ends, aliases = names.setdefault(base + start, ([], set()))
                        ends.append(base + end)
                        aliases.add((module, name))
        self._starts = sorted(names)
        self._names = names
        self.functions = [
            (start, max(ends)) for start, (ends, _) in names.items() if max(ends) > start
        ]

    def at(self, address):
        """Returns all (module, name) pairs for the nearest symbol at or below an address.

        A label without a size ends the function that contains it, as in kallsyms. The result is
        empty if the address is beyond the end of the symbol.
        """
        start = self._starts[bisect_right(self._starts, address) - 1]
        ends, aliases = self._names[start]
        return aliases if address < max(ends) or max(ends) == start else set()


def shown(frame):
    """Returns a frame's module and linkage name."""
    if not frame.lines:
        return None
    return frame.module.name, frame.lines[-1].system_name or frame.lines[-1].function


@pytest.fixture(scope="module")
def truth(modules):
    return Truth(modules)


@pytest.mark.one_boot
def test_every_module_function_matches_the_elf_files(modules, truth):
    """Every function in every loaded module has the name, module and RVA from its ELF file."""
    symbolizer = KernelSymbolizer.live()
    wrong = []
    for start, end in truth.functions:
        for address in (start, end - 1):
            (frame,) = symbolizer.resolve_addresses([address])
            if shown(frame) in truth.at(address):
                base, file = modules[frame.module.name]
                if (frame.address, frame.module.build_id) == (address - base, file.build_id):
                    continue
            wrong.append((hex(address), truth.at(address), shown(frame)))
    assert len(truth.functions) > 1000
    if tuple(map(int, platform.release().split(".")[:2])) >= (6, 4):
        assert overlapping_sizes(), "nothing here distinguishes sections from address + size"
    assert not wrong, f"{len(wrong)} of {2 * len(truth.functions)}: {wrong[:5]}"


def test_names_of_freed_init_functions_are_never_used_for_later_code(truth):
    """Ftrace's clones of freed init functions never name the code that reuses their memory."""
    clones = [
        symbol
        for symbol in read_module_symbols()
        if symbol.module in MODULES
        and symbol.type in "tT"
        and (symbol.module, symbol.name) not in truth.at(symbol.address)
        and not symbol.name.startswith("__pfx_")
    ]
    assert clones, "the tracer kept no clone"
    symbolizer = KernelSymbolizer.live()
    in_live_code = 0
    for clone in clones:
        (frame,) = symbolizer.resolve_addresses([clone.address])
        live = truth.at(clone.address)
        in_live_code += bool(live)
        if live or frame.lines:
            assert shown(frame) in live, clone
    assert in_live_code, "no clone lies in code of another module: load more modules"


def test_executable_sections_with_unusual_names_belong_to_their_module(modules):
    """Executable sections with unusual names belong to their module."""
    with spinning() as file:
        symbolizer = KernelSymbolizer.live()
        assert ".kprof.text" in {part.name for part in symbolizer.module("kprof_spin").ranges}
        (mid,) = file.functions["kprof_mid"]
        assert symbolizer.find("kprof_mid")[0].rva == mid.start
    remove()
