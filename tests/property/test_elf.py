"""Captured kernels agree with their ELF files: address → (module, RVA) → function and back.

The files are the ``.ko`` files in the fixtures (KPROFILER_FIXTURES), or vmlinux and all modules
from the kernel's debug package (KPROFILER_DEBUG, set by ``make test-debug-package``). The oracle
reads the files with pyelftools, and takes the address of each section from the captured sysfs.
"""

import lzma
import os
import random
import sys
from bisect import bisect_right
from collections import defaultdict
from io import BytesIO
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from otel_kprofiler.symbols import CapturedFiles, ElfSymbols, KernelSymbolizer
from otel_kprofiler.symbols.kernel.names import is_marker

DATA = Path(__file__).parents[1] / "data" / "kernel" / "6.12-modules"
FIXTURES = Path(os.environ.get("KPROFILER_FIXTURES", ""), "6.12-debian")
DEBUG = os.environ.get("KPROFILER_DEBUG", "")
RANDOM_ADDRESSES = 100_000

pytestmark = pytest.mark.skipif(
    not (DEBUG or FIXTURES.is_dir()), reason="neither KPROFILER_FIXTURES nor KPROFILER_DEBUG is set"
)


@pytest.fixture
def say(capsys):
    """Returns a function that prints values between pytest's progress dots."""

    def write(text):
        with capsys.disabled():
            sys.stdout.write(f" {text} ")

    return write


def find_files():
    """Returns the ELF files by module name. Only the debug package contains vmlinux."""
    if DEBUG:
        results = {path.name: path for path in Path(DEBUG).rglob("*.ko*")}
        results |= {"vmlinux": next(Path(DEBUG).rglob("boot/vmlinux-*"))}
    else:
        results = {path.name: path for path in FIXTURES.glob("ko/*.ko.xz")}
    return {name.partition(".")[0].replace("-", "_"): path for name, path in results.items()}


def copies():
    """Returns the files captured from one boot, with complete kallsyms if fixtures are present."""
    kallsyms = FIXTURES / "kallsyms.xz"
    return {
        "kallsyms": kallsyms if kallsyms.exists() else DATA / "kallsyms.xz",
        "modules": DATA / "proc_modules",
        "sys_module": DATA / "sys_module.tar.xz",
        "notes": DATA / "sys_kernel_notes",
    }


@pytest.fixture(scope="module")
def captured():
    places = ("/proc/kallsyms", "/proc/modules", "/sys/module", "/sys/kernel/notes")
    return CapturedFiles(dict(zip(places, copies().values(), strict=True)))


@pytest.fixture(scope="module")
def symbolizer(captured):
    return KernelSymbolizer.live(captured)


@pytest.fixture(scope="module")
def symbols(captured, symbolizer):
    """Returns the ELF symbols, by module name, of modules whose exact file is available."""
    files = find_files()
    results = {}
    for module in symbolizer.snapshot.modules:
        if module.name in files:
            elf = ElfSymbols(str(files[module.name]))
            assert elf.name == module.name
            if elf.build_id == module.build_id:
                assert elf.file_id == module.file_id
                results[module.name] = elf
    return results


@pytest.fixture(scope="module")
def oracle(captured, symbols):
    """Returns (start, end, names) of functions and labels at runtime addresses, by module."""
    files = find_files()
    return {name: read_functions(captured, name, files[name]) for name in symbols}


def read_functions(captured, module, path):
    data = path.read_bytes()
    elf = ELFFile(BytesIO(lzma.decompress(data) if path.suffix == ".xz" else data))
    folder = f"/sys/module/{module}/sections"
    slide = 0
    places = {}
    if module == "vmlinux":
        core = captured.read_bytes("/proc/kallsyms").decode().splitlines()
        text = next(int(line[:16], 16) for line in core if line.endswith(" _text"))
        slide = text - elf.get_section_by_name(".symtab").get_symbol_by_name("_text")[0]["st_value"]
    else:
        listed = set(captured.list_dir(folder))
        for index, section in enumerate(elf.iter_sections()):
            name = section.name
            if section["sh_flags"] & 4 and name in listed and not name.startswith(".init"):
                places[index] = int(captured.read_bytes(f"{folder}/{name}"), 16)
    code = {index for index, section in enumerate(elf.iter_sections()) if section["sh_flags"] & 4}
    functions = defaultdict(set)
    for symbol in elf.get_section_by_name(".symtab").iter_symbols():
        index, kind = symbol["st_shndx"], symbol["st_info"]["type"]
        if kind not in {"STT_FUNC", "STT_NOTYPE"} or not symbol.name or index not in code:
            continue
        if is_marker(symbol.name.encode()):
            continue  # a marker, not code
        if module == "vmlinux" or index in places:
            start = symbol["st_value"] + (slide if module == "vmlinux" else places[index])
            functions[start, start + symbol["st_size"]].add(symbol.name)
    return sorted((start, end, names) for (start, end), names in functions.items())


def names_by_size(functions, address):
    """Returns the names of functions that contain an address, and of their last label up to it."""
    at = bisect_right(functions, address, key=lambda row: row[0])
    rows = functions[max(0, at - 24) : at]
    around = [names for start, end, names in rows if start <= address < end]
    return set().union(*around, *(names for start, _, names in rows if start == rows[-1][0]
                                  and around))  # fmt: skip


def has_name(names, frame_names):
    return bool({name.removeprefix("__pfx_") for name in names} & set(frame_names))


def test_functions_survive_the_round_trip_through_file_id_and_rva(symbolizer, symbols, oracle, say):
    checked, wrong = 0, []
    for module, functions in oracle.items():
        for start, end, names in functions:
            for address in {start, max(start, end - 1)}:
                frame = symbolizer.resolve_addresses([address])[0]
                if module == "vmlinux" and frame.module is None:
                    continue  # freed exit text in the kernel
                match = symbols[module].find(frame.address) if frame.module.name == module else None
                expected = names_by_size(functions, address) or names
                checked += 1
                if match is None or not has_name(expected, match.names):
                    wrong.append((module, hex(address), expected, match))
    say(f"{checked} addresses of {len(oracle)} files, {len(wrong)} wrong")
    assert len(oracle) >= (100 if DEBUG else 10)
    assert not wrong, wrong[:60]


def test_random_addresses_resolve_according_to_function_sizes(symbolizer, symbols, oracle, say):
    """Inside a function, the frame and the ELF lookup both have the function's name.

    In a gap, the ELF lookup returns no name, and the frame has none if function sizes are known.
    """
    files = find_files()
    sized = KernelSymbolizer.from_files(**copies(), elf=[files[name] for name in symbols])
    rng = random.Random(11)
    ranges = [
        (part, module)
        for module in symbolizer.snapshot.modules if module.name in oracle
        for part in module.ranges
    ]  # fmt: skip
    weights = [part.end - part.start for part, _ in ranges]
    named = gaps = by_kallsyms = labels = 0
    wrong = []
    for part, module in rng.choices(ranges, weights, k=RANDOM_ADDRESSES):
        address = rng.randrange(part.start, part.end)
        names = names_by_size(oracle[module.name], address)
        frame = symbolizer.resolve_addresses([address])[0]
        exact = sized.resolve_addresses([address])[0]
        assert (exact.module.build_id, exact.address) == (module.build_id, frame.address)
        match = symbols[module.name].find(frame.address)
        assert [line.system_name or line.function for line in exact.lines] == (
            [match.line.system_name or match.line.function] if match else []
        )
        shown = [frame.lines[0].system_name or frame.lines[0].function] if frame.lines else []
        if names:
            named += 1
            # without fixtures, kallsyms is incomplete
            of_frame = not FIXTURES.is_dir() or has_name(names, shown)
            right = match and has_name(names, match.names) and of_frame
        else:
            gaps += 1
            by_kallsyms += bool(shown)
            labels += match is not None
            right = match is None or any(
                start == end and has_name(result, match.names)  # a label without a size
                for start, end, result in oracle[module.name]
            )
        if not right:
            wrong.append((module.name, hex(address), names, shown, match))
    say(
        f"{named} in functions, {gaps} in gaps: {by_kallsyms} named by kallsyms alone, {labels}"
        f" with the file, by labels without a size; {len(wrong)} wrong"
    )
    assert named > RANDOM_ADDRESSES // 2
    assert not wrong, wrong[:60]


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="KPROFILER_FIXTURES is not set")
def test_every_live_symbol_matches_the_elf_file(captured, symbolizer, symbols, say):
    freed = {(clone.address, clone.name) for clone in symbolizer.snapshot.freed}
    init = symbolizer.snapshot._init_text
    checked, wrong = 0, []
    for line in captured.read_bytes("/proc/kallsyms").decode().splitlines():
        text, kind, name, *module = line.split()
        owner = module[0][1:-1] if module else "vmlinux"
        address = int(text, 16)
        if owner not in symbols or kind not in "tTwW" or (address, name) in freed:
            continue
        if is_marker(name.encode()):
            continue
        frame = symbolizer.resolve_addresses([address])[0]
        if frame.module is None and address >= init.end:
            continue
        match = symbols[owner].find(frame.address)
        checked += 1
        if match is None or not has_name([name], match.names):
            wrong.append((owner, hex(address), name, match))
    say(f"{checked} symbols, {len(wrong)} wrong")
    assert not wrong, wrong[:60]


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="KPROFILER_FIXTURES is not set")
def test_every_core_symbol_matches_system_map(symbolizer, captured, say):
    linked = defaultdict(set)
    system_map = lzma.decompress((FIXTURES / "lib" / "System.map.xz").read_bytes()).decode()
    rows = [line.split() for line in system_map.splitlines()]
    base = next(int(row[0], 16) for row in rows if row[2] == "_text")
    for address, _, name in rows:
        linked[int(address, 16) - base].add(name)
    checked, wrong = 0, []
    for line in captured.read_bytes("/proc/kallsyms").decode().splitlines():
        if "\t" not in line and line.split()[1] in "tTwW":
            frame = symbolizer.resolve_addresses([int(line[:16], 16)])[0]
            if frame.module is not None:
                checked += 1
                if line.split()[2] not in linked[frame.address]:
                    wrong.append(line)
    say(f"{checked} symbols, {len(wrong)} wrong")
    assert checked > 100_000
    assert not wrong, wrong[:60]
