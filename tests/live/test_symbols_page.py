"""The examples in docs/symbols.md work as documented."""

import ctypes
import os
import shutil
import subprocess

import pytest
from samplers import spawned
from unwind_maps import compile_c

from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.symbols import find_process
from tests.examples import examples, run_example

pytestmark = pytest.mark.live

EXAMPLES = examples("symbols.md")
PROGRAM = """
    #include <stdio.h>
    #include <unistd.h>
    static inline __attribute__((always_inline)) int inner(int x) { return getpid() * x; }
    __attribute__((noinline)) int hidden(int x) { return inner(x) + 1; }
    int main(int count, char **words) {
        printf("%p\\n", (void *)hidden);
        fflush(stdout);
        pause();
        return hidden(count);
    }
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(compile_c(tmp_path_factory.mktemp("page") / "program", PROGRAM, "-g", "-O2"))


@pytest.fixture
def running(path):
    with spawned(path, stdout=subprocess.PIPE, text=True) as process:
        yield {"pid": process.pid, "address": int(process.stdout.readline(), 16)}


def functions(text):
    return [line.split()[1].partition("+")[0] for line in text.splitlines()]


def test_the_symbols_example_resolves_process_and_kernel_addresses(running, capsys):
    pid, address = running["pid"], running["address"]
    given = run_example(EXAMPLES, "Symbols", pid=pid, addresses=[address + 1, 0x10])
    first, second, malloc = capsys.readouterr().out.splitlines()
    assert first.split()[1] == "hidden+0x1"
    assert "no module is known" in second
    assert "libc" in malloc
    if not given["kernel"]:
        pytest.skip("symbols of the kernel are hidden")
    run_example(EXAMPLES, "Symbols", pid=pid, addresses=[given["kernel"][0].address, address])
    assert functions(capsys.readouterr().out)[:2] == ["vfs_read", "hidden"]


def test_the_single_file_example_resolves_an_address_in_a_file(path, capsys):
    given = run_example(EXAMPLES, "One file", path=path)
    assert (given["found"].function, given["found"].offset) == ("main", 4)
    assert given["same"].address == given["found"].address
    assert str(given["file"].build_id) in capsys.readouterr().out


def test_the_offset_example_prints_the_address_and_symbol_for_a_file_offset(running, path, capsys):
    (hidden,) = run_example(EXAMPLES, "One file", path=path)["file"].find("hidden")
    capsys.readouterr()
    run_example(EXAMPLES, "Convert file offsets to addresses", path=path, pid=running["pid"],
        file_offset=hidden.file_offset)  # fmt: skip
    assert capsys.readouterr().out == f"{running['address']:#x} hidden\n"


def test_the_process_filter_example_excludes_unselected_processes(running, capsys):
    run_example(EXAMPLES, "Resolve only some processes", **running)
    assert capsys.readouterr().out == "hidden Unresolved.LEFT_OUT\n"


def test_the_process_events_example_reports_mappings_and_execs():
    lines = []
    with subprocess.Popen(["sh", "-c", "read go; ls /; true"], stdin=subprocess.PIPE,
                          stdout=subprocess.DEVNULL) as process:  # fmt: skip

        def printed(*words):
            lines.append(words)
            process.stdin.close()  # the shell is tracked by now, and may continue

        run_example(EXAMPLES, "Process events", pid=process.pid, print=printed)
    assert any(pid == process.pid and "libc" in path for pid, _, path in lines)
    (child,) = {pid for pid, *rest in lines if rest == ["executes", "ls"]}
    assert any(pid == child and path.endswith("/ls") for pid, _, path in lines)


def test_the_custom_resolver_example_combines_custom_names_with_names_from_files(running, capsys):
    pid, address = running["pid"], running["address"]
    names = {0x7000: "compiled", address + 2: "preferred"}
    given = run_example(EXAMPLES, "Write a resolver", pid=pid, names=names,
                addresses=[0x7000, address, address + 2])  # fmt: skip
    assert functions(capsys.readouterr().out) == ["compiled", "hidden", "preferred"]
    result = given["resolver"].find("hidden", pid) + given["resolver"].find("compiled", pid)
    assert [place.address for place in result] == [address, 0x7000]
    start = ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value
    (other,) = given["resolver"].resolve([start], os.getpid())
    assert (other.function, other.process) == ("PyObject_Call", find_process(os.getpid()))


def test_the_debug_file_example_finds_names_and_source_lines(path, tmp_path, monkeypatch, capsys):
    pytest.importorskip("symbolic")
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    monkeypatch.delenv("DEBUGINFOD_URLS", raising=False)
    stripped, debug = separate(path, tmp_path)
    folder = tmp_path / "debug"
    build_id = build_id_of(stripped)
    kept = folder / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug"
    kept.parent.mkdir(parents=True)
    shutil.move(debug, kept)
    with spawned(stripped, stdout=subprocess.PIPE, text=True) as process:
        run_example(
            EXAMPLES, "Debug files, source lines, debuginfod",
            folder=str(folder), address=int(process.stdout.readline(), 16), pid=process.pid,
        )  # fmt: skip
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[-1][0] == "hidden"
    assert int(printed[-1][2]) == 5


def test_the_custom_finder_example_reads_names_from_the_debug_file(path, tmp_path, capsys):
    stripped, debug = separate(path, tmp_path)
    run_example(EXAMPLES, "Write a finder of debug files", path=stripped, folder=str(tmp_path))
    assert capsys.readouterr().out == "[]\n"
    shutil.move(debug, tmp_path / build_id_of(stripped))
    run_example(EXAMPLES, "Write a finder of debug files", path=stripped, folder=str(tmp_path))
    assert "hidden" in capsys.readouterr().out


def separate(path, folder):
    stripped, debug = str(folder / "stripped"), str(folder / "symbols")
    subprocess.run(["objcopy", "--only-keep-debug", path, debug], check=True)
    subprocess.run(["strip", "-o", stripped, path], check=True)
    return stripped, debug


def build_id_of(path):
    with open(path, "rb") as file:
        return read_elf(FileSource(file.fileno(), os.fstat(file.fileno()).st_size)).build_id


def test_the_demangling_example_prints_demangled_names(capsys):
    run_example(EXAMPLES, "Readable names")
    cxx, rust, plain = capsys.readouterr().out.splitlines()
    assert cxx in {"std::vector<int>::push_back(int)", "_ZNSt6vectorIiE9push_backEi"}
    assert rust.split() == ["123foo::bar", "foo::bar"]
    assert plain == "malloc"


def test_the_kernel_example_prints_the_module_vmlinux(capsys):
    given = {}
    try:
        exec(EXAMPLES["The kernel"][0], given)
    except NameError:
        pytest.skip("symbols of the kernel are hidden")
    assert "vmlinux" in capsys.readouterr().out


def test_every_example_has_a_test():
    with open(__file__) as file, open(os.path.join(os.path.dirname(__file__), "..", "unit",
                                      "symbols", "test_captured.py")) as other:  # fmt: skip
        tests = file.read() + other.read()
    assert [heading for heading in EXAMPLES if f'"{heading}"' not in tests] == []
