"""The committed C libraries match their sources, and run with any C library."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sources import PACKAGE

pytestmark = pytest.mark.system
LIBRARIES = sorted(PACKAGE.glob("*/*.abi3.so"))
C_FUNCTIONS = {
    "speedups": {"memchr", "memcmp", "memcpy"},
    "thread_record": {
        "dl_iterate_phdr", "getpid", "memcpy", "mprotect", "syscall", "sysconf",
    },
}  # fmt: skip
"""The C functions that each package's library may import."""


def test_each_package_has_a_library_for_each_processor():
    assert [library.parent.name for library in LIBRARIES] == [
        name for name in C_FUNCTIONS for _ in ("aarch64", "x86_64")
    ]


def test_the_library_builds_are_reproducible(tmp_path):
    """The libraries are rebuilt in a different directory to check that they do not embed paths."""
    compilers = ("x86_64-linux-gnu-gcc-12", "aarch64-linux-gnu-gcc-12")
    if any(read_version(compiler) != "12.2.0" for compiler in compilers):
        pytest.skip("needs gcc 12.2.0 for x86-64 and arm64")
    if not Path("/usr/include/python3.11/Python.h").exists():
        pytest.skip("needs the headers of Python 3.11")
    shutil.copy(PACKAGE / "build_libraries.sh", tmp_path)
    for name in C_FUNCTIONS:
        tmp_path.joinpath(name).mkdir()
        for source in PACKAGE.joinpath(name).glob("*.[ch]"):
            shutil.copy(source, tmp_path / name)
    subprocess.run([tmp_path / "build_libraries.sh"], cwd="/", check=True)
    built = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("*/*.so")}
    assert built == {path.relative_to(PACKAGE): path.read_bytes() for path in LIBRARIES}


def read_version(compiler):
    if shutil.which(compiler) is None:
        return None
    return subprocess.check_output([compiler, "-dumpfullversion"], text=True).strip()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_library_has_no_dependencies_and_imports_only_portable_functions(library):
    text = read_dynamic_section(library)
    assert "(NEEDED)" not in text
    needed = {line.split()[-1] for line in text.splitlines() if " UND " in line}
    others = {name for name in needed if not name.startswith(("Py", "_Py"))} - {"UND"}
    assert others <= C_FUNCTIONS[library.parent.name]


@pytest.mark.parametrize(
    "library", [path for path in LIBRARIES if "record" in path.name], ids=lambda path: path.name
)
def test_the_thread_record_library_exports_its_variable(library):
    text = read_dynamic_section(library)
    assert re.search(r"R_(X86_64|AARCH64)_TLSDESC .* otel_thread_ctx_v1", text)
    assert any("TLS" in line and line.endswith(" otel_thread_ctx_v1") for line in text.splitlines())


def read_dynamic_section(library):
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    return subprocess.check_output(["readelf", "-dW", "-r", "--dyn-syms", library], text=True)
