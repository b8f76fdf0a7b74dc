"""Function names in installed and compiled files match llvm-symbolizer; gaps have no names.

``KPROFILER_SYMBOL_ADDRESSES=1000`` looks up 1,000 addresses per file, and adds large files.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.host import Access
from otel_kprofiler.symbols.user.build import read_functions
from otel_kprofiler.symbols.user.debug_files import BuildIdDirectories, want_debug_file
from tests.unit.symbols.user.elf_programs import build, tool

ADDRESSES = int(os.environ.get("KPROFILER_SYMBOL_ADDRESSES", "200"))
IS_LONG = ADDRESSES >= 1000
SYMBOLIZER = next(filter(shutil.which, ("llvm-symbolizer-14", "llvm-symbolizer")), None)
LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libcrypto.so.3", "libpython3.11.so.1.0")
PROGRAMS = ("python3", "bash")
LARGE_LIBRARIES, LARGE_PROGRAMS = ("libLLVM-14.so.1",), ("node", "go", "cargo")
GO = 'package main\nimport "fmt"\nfunc main() { fmt.Println("a") }\n'
RUST = 'fn main() { let v: Vec<u32> = (0..9).collect(); println!("{:?}", v); }\n'
BUILDS = {
    "pie": (),
    "no-pie": ("-no-pie",),
    "static": ("-static",),
    "static-pie": ("-static-pie",),
    "branch-tracking": ("-fcf-protection", "-Wl,-z,lazy,-z,ibtplt"),
    "moved": ("-no-pie", "-Wl,-Ttext=0x10000000"),
    "gold": ("-fuse-ld=gold",),
    "debug": ("-g",),
}

pytestmark = pytest.mark.skipif(SYMBOLIZER is None, reason="needs llvm-symbolizer")


def installed():
    folders = [Path(f"/usr/lib/{os.uname().machine}-linux-gnu"), Path("/lib64")]
    for name in LIBRARIES + (LARGE_LIBRARIES if IS_LONG else ()):
        yield next((str(folder / name) for folder in folders if (folder / name).exists()), name)
    for name in PROGRAMS + (LARGE_PROGRAMS if IS_LONG else ()):
        yield shutil.which(name, path=f"/usr/bin:{os.environ['PATH']}") or name


class Truth:
    """Symbols, code sections and stubs of a file or its debug file, read with pyelftools."""

    def __init__(self, path, symbols_path):
        self.named, self.unsized, self.data = [], set(), []
        for fromkey in dict.fromkeys((symbols_path, path)):
            with open(fromkey, "rb") as file:
                self._read(ELFFile(file))
        with open(path, "rb") as file:
            self.code = [
                (s["sh_addr"], s["sh_size"], s.name) for s in ELFFile(file).iter_sections()
                if s["sh_flags"] & 4 and s["sh_size"]
            ]  # fmt: skip
            has_stubs = any(name.startswith(".plt") for _, _, name in self.code)
        self.stubs = find_stubs(path) if has_stubs else {}

    def _read(self, elf):
        for section in elf.iter_sections():
            if section["sh_type"] not in ("SHT_SYMTAB", "SHT_DYNSYM"):
                continue
            for symbol in section.iter_symbols():
                kind = symbol["st_info"]["type"]
                if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or not symbol.name:
                    continue
                start, size = symbol["st_value"], symbol["st_size"]
                name = symbol.name.partition("@")[0]
                if kind == "STT_OBJECT":
                    self.data.append((start, start + size, name))
                elif kind in ("STT_FUNC", "STT_LOOS", "STT_GNU_IFUNC", "STT_NOTYPE"):
                    if size:
                        self.named.append((start, start + size, name))
                    else:
                        self.unsized.add(name)

    def is_stub(self, table, found):
        """Returns whether a stub, or a namesake of the stub, jumps to the function of that name."""
        called = [self.stubs[at] for at in range(found.start, found.end) if at in self.stubs]
        if not called:
            return any(self.is_stub(table, twin) for twin in table.find(found.name)
                       if twin != found)  # fmt: skip
        name = found.name.removesuffix("@plt")
        return name == called[0] or name in {one for at, _, one in self.named if at == called[0]}

    def names_at(self, address):
        return {name for start, end, name in self.named if start <= address < end}

    def data_at(self, address):
        return {name for start, end, name in self.data if start <= address < end}


def find_stubs(path):
    """Returns the target of each jump through a PLT slot: a name, or a resolver's address."""
    slots = {}
    for line in tool("readelf", "-rW", path).splitlines():
        fields = line.split()
        if len(fields) == 4 and fields[2].startswith("R_X86_64_IRELATIV"):
            slots[int(fields[0], 16)] = int(fields[3], 16)
        elif len(fields) >= 5 and fields[2] in ("R_X86_64_JUMP_SLO", "R_X86_64_JUMP_SLOT",
                                                "R_X86_64_GLOB_DAT"):  # fmt: skip
            slots[int(fields[0], 16)] = fields[4].partition("@")[0]
    sections = (".plt", ".plt.sec", ".plt.got", ".iplt")
    options = [option for name in sections for option in ("-j", name)]
    results = {}
    for line in tool("objdump", "-d", "--no-show-raw-insn", *options, path).splitlines():
        if jump := re.match(r" *([0-9a-f]+):\s+(?:bnd )?jmp +\*.* # ([0-9a-f]+)", line):
            results[int(jump[1], 16)] = slots.get(int(jump[2], 16))
    return results


def addresses(truth, count, rng):
    """Yields random code addresses, weighted by section size, plus extra ones in small sections."""
    for address, size, _ in rng.choices(truth.code, [size for _, size, _ in truth.code], k=count):
        yield address + rng.randrange(size)
    for address, size, _ in truth.code:
        for _ in range(min(count // 10, size) if size < 1 << 14 else 0):
            yield address + rng.randrange(size)


def symbolize(path, wanted, *options):
    """Returns the name of the physical function at each address; empty if not found."""
    done = subprocess.run(
        [SYMBOLIZER, f"--obj={path}", "--functions=linkage", "--no-demangle", "--inlines",
         "--output-style=JSON", *options],
        input="".join(f"{address:#x}\n" for address in wanted),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    names = [row["Symbol"][-1]["FunctionName"] if row.get("Symbol") else "" for row in rows]
    return ["" if name == "??" else name.partition("@")[0] for name in names]


def find_functions(path):
    """Returns a file's function table as read by the package, and the symbol file's path."""
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        elf = read_elf(source, None)
        finder = BuildIdDirectories(Access()).find(want_debug_file(source, elf, path))
        debug = next(finder, None)
        try:
            return read_functions(source, elf, lambda: debug), debug.path if debug else path
        finally:
            if debug:
                debug.close()


def judge(table, truth, address, theirs):
    """Returns why both names are acceptable, such as "same", or None if either is wrong."""
    result = table.lookup(address)
    certain = truth.names_at(address)
    if not result or not result.name:
        if not theirs:
            return "none"
        if not certain and theirs in truth.unsized:
            return "they continue after a symbol without a size"
        return "data" if not certain and theirs in truth.data_at(address) else None
    if result.name.endswith("@plt"):
        return "stub" if not certain and truth.is_stub(table, result) else None
    return judge_name(table.names_at(result.start), certain, theirs, truth)


def judge_name(ours, certain, theirs, truth):
    if theirs in ours:
        return "same" if certain.intersection(ours) else "same, of a symbol without a size"
    if not certain:  # a symbol without a size extends to the next bound
        return "they leave out a symbol without a size" if truth.unsized & {*ours} else None
    if not certain.intersection(ours):
        return None
    if not theirs or theirs in truth.unsized:
        return "they have a label, or nothing, inside of a function"
    if any(name.startswith(f"{theirs}.") for name in ours):
        return "they leave out what the compiler appends"
    return None


def check(path):
    table, symbols_path = find_functions(path)
    truth = Truth(path, symbols_path)
    wanted = list(addresses(truth, ADDRESSES, random.Random(path)))
    reasons = Counter()
    for address, theirs in zip(wanted, symbolize(path, wanted), strict=True):
        reason = judge(table, truth, address, theirs)
        assert reason, f"{address:#x}: {table.lookup(address)}, llvm-symbolizer: {theirs}"
        reasons[reason] += 1
    assert reasons["same"] >= ADDRESSES // 10
    sys.stdout.write(f"{Path(path).name}: {dict(reasons)}\n")


@pytest.mark.parametrize("path", list(installed()))
def test_symbols_in_installed_files_match_llvm_symbolizer(path):
    if not os.path.exists(path):
        pytest.skip(f"there is no {path}")
    check(path)


@pytest.mark.parametrize("kind", BUILDS)
def test_symbols_in_compiled_files_match_llvm_symbolizer(kind, tmp_path):
    check(build(tmp_path, kind, *BUILDS[kind]))


def test_no_function_in_a_stripped_program_is_named_after_its_neighbour(tmp_path):
    whole = build(tmp_path, "whole", "-static")
    bare = os.path.join(tmp_path, "bare")
    tool("strip", "-o", bare, whole)
    table, truth = find_functions(bare)[0], Truth(whole, whole)
    starts = {start for start, _, _ in truth.named}
    rng = random.Random(1)
    exact = 0
    for address in addresses(truth, ADDRESSES, rng):
        result = table.lookup(address)
        assert result is None or result.name == ""
        exact += result is not None and result.start in starts
    assert exact > ADDRESSES // 2


@pytest.mark.parametrize(("language", "source"), [("go", GO), ("rs", RUST)])
def test_symbols_in_go_and_rust_programs_match_llvm_symbolizer(language, source, tmp_path):
    compiler = {"go": "go", "rs": "rustc"}[language]
    if language == "go" and not IS_LONG:
        pytest.skip("compiling its library takes half a minute")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    file, program = tmp_path / f"main.{language}", tmp_path / "program"
    file.write_text(source)
    command = ["go", "build"] if language == "go" else ["rustc", "-O"]
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOCACHE": str(tmp_path / "cache")}
    subprocess.run([*command, "-o", program, file], check=True, cwd=tmp_path, env=environment)
    check(str(program))
