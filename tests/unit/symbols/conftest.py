"""Fixtures: captured kernels, which are loaded once, and a function that runs ``symbolize``."""

import lzma
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from otel_kprofiler.cli.main import main
from otel_kprofiler.symbols import CapturedFiles, KernelSymbolizer

# Tests import helpers from this directory.
sys.path.insert(0, str(Path(__file__).parent))

DATA = Path(__file__).parents[2] / "data" / "kernel"


@pytest.fixture(scope="session")
def clones_folder():
    return DATA / "6.12-clones"


@pytest.fixture(scope="session")
def boundaries():
    """Returns the symbols that delimit code in linker scripts."""
    return [line.split()[0] for line in (DATA / "boundaries.txt").read_bytes().splitlines()]


@pytest.fixture(scope="session")
def read_lines():
    """Returns a simple parser for kallsyms, which yields address, type, name and module."""

    def read(path):
        for line in lzma.decompress(path.read_bytes()).decode().splitlines():
            address, kind, name, *module = line.split()
            yield int(address, 16), kind, name, module[0].strip("[]") if module else ""

    return read


@pytest.fixture(scope="session")
def clones_lines(clones_folder, read_lines):
    return list(read_lines(clones_folder / "kallsyms.xz"))


@pytest.fixture(scope="session")
def clones(clones_folder, tmp_path_factory):
    """Returns a symbolizer for a captured kernel that has clones of freed init functions."""
    root = tmp_path_factory.mktemp("sys_module")
    sections = defaultdict(dict)
    for line in (clones_folder / "sections.txt").read_text().splitlines():
        module, section, address = line.split()
        sections[module][section] = address
    for module, addresses in sections.items():
        folder = root / module / "sections"
        folder.mkdir(parents=True)
        for section, address in addresses.items():
            (folder / section).write_text(address + "\n")
    return KernelSymbolizer.from_files(
        kallsyms=clones_folder / "kallsyms.xz",
        modules=clones_folder / "proc_modules",
        sys_module=root,
    )


@pytest.fixture(scope="session")
def modules_folder():
    return DATA / "6.12-modules"


@pytest.fixture(scope="session")
def modules_files(modules_folder):
    return CapturedFiles(
        {
            "/proc/kallsyms": modules_folder / "kallsyms.xz",
            "/proc/modules": modules_folder / "proc_modules",
            "/sys/module": modules_folder / "sys_module.tar.xz",
            "/sys/kernel/notes": modules_folder / "sys_kernel_notes",
        }
    )


@pytest.fixture(scope="session")
def modules(modules_files):
    """Returns the captured kernel that has 126 modules."""
    return KernelSymbolizer.live(modules_files)


@pytest.fixture
def symbolize(capfdbinary):
    """Returns a function that runs ``symbolize`` and returns its status, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["symbolize", *map(str, arguments)])
        output, errors = capfdbinary.readouterr()
        return ended.value.code or 0, output.decode(), errors.decode()

    return run
