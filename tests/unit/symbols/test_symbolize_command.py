"""``symbolize`` resolves addresses in files, processes and profiles of small compiled programs."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from otel_kprofiler.cli.symbolize_output import parse_address
from otel_kprofiler.elf import FileSource, hash_file
from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    BuildId,
    FileId,
    Form,
    Frame,
    Module,
    ModuleKind,
    Stack,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window
from otel_kprofiler.symbols import ElfResolver, FileIdentity, InstalledFiles, SymbolSources
from otel_kprofiler.symbols.resolvers import installed
from tests.servers import HttpServer
from tests.unit.symbols.user.elf_programs import build, symbols_of, tool
from tests.windows import make_window

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def program(folder):
    """Builds a program whose addresses differ from its file offsets."""
    return build(folder, "program", "-no-pie")


@pytest.fixture(scope="module")
def unmarked(folder):
    return build(folder, "unmarked", "-Wl,--build-id=none")


@pytest.fixture(scope="module")
def split(folder):
    """Returns a stripped program, the directory of its debug file, and the program's symbols."""
    path = build(folder, "split", "-Wl,--build-id=sha1")
    build_id = ElfResolver(path).build_id
    debug = folder / "debug" / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug"
    debug.parent.mkdir(parents=True)
    whole = symbols_of(path)
    tool("objcopy", "--only-keep-debug", path, debug)
    tool("strip", path)
    return path, folder / "debug", whole


@pytest.fixture
def programs(program, unmarked, split):
    return program, unmarked, split


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    monkeypatch.setattr(installed, "DIRECTORIES", ())  # a search of /usr takes a second


@pytest.mark.parametrize(
    ("word", "address"),
    [
        ("0x10", 0x10), ("0X1f", 0x1F), ("612", 0x612), ("7f00", 0x7F00),
        ("ffffffff81000000", 0xFFFFFFFF81000000), ("add", None), ("face", None), ("0xg", None),
        ("bad_face_dead", None), ("-123456789", None), ("", None), ("main", None), ("1f_0", None),
    ],
)  # fmt: skip
def test_address_arguments_are_parsed(word, address):
    assert parse_address(word) == address


def test_addresses_and_offsets_of_a_user_file_are_resolved(symbolize, program):
    address = symbols_of(program)["main"][0]
    (result,) = ElfResolver(program).find("main")
    assert result.file_offset != address
    status, by_address, _ = symbolize("--elf", program, f"{address + 3:#x}")
    assert (status, by_address.split()[:2]) == (0, [f"{address + 3:#x}", "main+0x3"])
    by_offset = symbolize("--elf", program, "--file-offset", f"{result.file_offset + 3:x}")
    assert by_offset == (0, by_address, "")
    assert symbolize("--elf", program, "main+0x3") == (0, by_address, "")
    assert symbolize("--elf", program, "no+0x3")[0] == 1
    status, by_name, _ = symbolize("--elf", program, "main", "--json")
    shown = json.loads(by_name)
    assert (shown["address"], shown["file_offset"]) == (f"{address:#x}", f"{result.file_offset:#x}")
    assert (shown["function"], shown["path"]) == ("main", program)


def test_several_files_are_distinguished_by_their_ids(symbolize, program, unmarked):
    both = ("--elf", program, "--elf", unmarked)
    first, second = ElfResolver(program), ElfResolver(unmarked)
    assert second.build_id is None
    place = symbols_of(unmarked)["main"][0]
    for key in (unmarked, second.file_id):
        status, output, _ = symbolize(*both, f"{key}:{place:#x}")
        assert (status, output.split()[1]) == (0, "main+0x0")
    assert symbolize(*both, f"{first.build_id}:{symbols_of(program)['main'][0]:#x}")[0] == 0
    assert len(symbolize(*both, "main")[1].splitlines()) == 2
    status, _, errors = symbolize(*both, "0x10")
    assert (status, "is ambiguous" in errors) == (2, True)
    status, _, errors = symbolize(*both, "ab:0x10")
    assert (status, "no file has this id" in errors) == (1, True)


def test_a_missing_symbol_or_file_is_reported(symbolize, program):
    status, output, errors = symbolize("--elf", program, "0x1", "no_such_name", "main")
    assert status == 1
    assert output.splitlines()[0].startswith("0x1  [the address lies between")
    assert "no_such_name: no such symbol" in errors
    assert "main+0x0" in output
    status, _, errors = symbolize("--elf", program + "?", "main")
    assert (status, "cannot read" in errors) == (3, True)
    assert symbolize("--elf", __file__, "main")[0] == 1


def test_debug_files_are_searched_for_in_the_given_directories(symbolize, split):
    path, folder, whole = split
    address = whole["hidden"][0]
    assert symbolize("--elf", path, f"{address:#x}")[0] == 1
    status, output, _ = symbolize("--elf", path, "--debug-directory", folder, f"{address:#x}")
    assert (status, output.split()[1]) == (0, "hidden+0x0")
    (debug,) = folder.rglob("*.debug")
    assert symbolize("--elf", debug, f"{address:#x}")[1].split()[1] == "hidden+0x0"


INLINED = """
#include <stdio.h>
static inline __attribute__((always_inline)) int inner(int x) { return printf("%d", x); }
__attribute__((noinline)) int outer(int x) { return inner(x) + 1; }
int main(int count, char **words) { return outer(count); }
"""


def test_source_lines_include_inlined_functions(symbolize, folder, monkeypatch):
    pytest.importorskip("symbolic")
    monkeypatch.setenv("CACHE_DIRECTORY", str(folder / "cache"))
    path = build(folder, "inlined", "-g", source=INLINED)
    (outer,) = ElfResolver(path).find("outer")
    size = symbols_of(path)["outer"][1]
    places = [f"{address:#x}" for address in range(outer.address, outer.address + size)]
    _, output, _ = symbolize("--elf", path, "--lines", "--json", *places)
    lines = [json.loads(line)["lines"] for line in output.splitlines()]
    results = {tuple(line["function"] for line in result) for result in lines}
    assert results == {("outer",), ("inner", "outer")}
    assert {line[-1]["line"] for line in lines} == {4}
    inside = places[[len(line) for line in lines].index(2)]
    first, *others = symbolize("--elf", path, "--lines", inside)[1].splitlines()
    assert first.split()[1].startswith("outer+")
    assert [line.split()[0] for line in others] == ["inner", "outer"]
    assert others[0].endswith(":3")


def test_addresses_names_and_offsets_of_a_process_are_resolved(symbolize):
    pid = os.getpid()
    status, output, _ = symbolize("--pid", pid, "--json", "PyObject_Call")
    shown = json.loads(output)
    assert (status, shown["function"], shown["pid"]) == (0, "PyObject_Call", pid)
    status, output, _ = symbolize("--pid", pid, shown["address"])
    assert (status, output.split()[1]) == (0, "PyObject_Call+0x0")
    assert symbolize("--pid", pid, "PyObject_Call+0x0") == (0, output, "")
    place = f"{shown['path']}:{shown['file_offset']}"
    assert symbolize("--pid", pid, "--file-offset", place) == (0, output, "")
    status, output, errors = symbolize("--pid", pid, "0x10", "no_such_name")
    assert status == 1
    assert output == "0x10  [no module is known at the address]  unknown  no build id\n"
    assert errors == "no_such_name: not found in the process\n"


def test_a_missing_process_is_an_error(symbolize):
    assert symbolize("--pid", 4_194_305, "0x10")[0] == 3
    assert symbolize("--pid", os.getpid(), "--file-offset", "0x10")[0] == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--pid", "1", "--elf", "a", "0x1"), ("--payload", "a"), ("-o", "a", "main"),
        ("--pid", "1"), (), ("--elf", "a"), ("--elf", "a", "--kallsyms", "b", "--rva", "1"),
        ("--payload", "a", "-o", "b", "main"), ("--file-offset", "1"), ("--rva", "1"),
        ("--pid", "1", "--payload", "a", "-o", "b"), ("--pid", "1", "--kallsyms", "a", "1"),
    ],
)  # fmt: skip
def test_incompatible_options_are_rejected(symbolize, words):
    status, output, errors = symbolize(*words)
    assert (status, output) == (2, "")
    assert "Error: " in errors


def test_debuginfod_requires_configured_servers(symbolize, program, monkeypatch):
    monkeypatch.delenv("DEBUGINFOD_URLS", raising=False)
    status, _, errors = symbolize("--elf", program, "--debuginfod", "main")
    assert (status, "DEBUGINFOD_URLS" in errors) == (2, True)


def user_module(path, **changes):
    result = ElfResolver(path)
    given = {"name": os.path.basename(path), "kind": ModuleKind.USER, "build_id": result.build_id,
             "file_id": result.file_id, "base": 0}  # fmt: skip
    return Module(**{**given, **changes})


def encode(frames, **options):
    """Returns a payload with one sample."""
    sample = WindowSample(Stack.from_frames(frames), 5, "cat", 1, None, [10**18 + 5])
    window = make_window(10**18, 10**18 + 1000, ({"process.pid": 5}, [sample]), period_ns=1000)
    return encode_window(window, **options).batches[0].payload


def frames_of(payload):
    (window,) = decode_windows(payload)
    ((_, sample),) = window.profiles[0].samples
    return sample.stack.frames


@pytest.mark.parametrize("form", list(Form))
def test_a_payload_is_symbolized_from_local_files(symbolize, tmp_path, programs, form):
    program, unmarked, (stripped, debug, whole) = programs
    elsewhere = user_module(stripped, name="not-here", file_id=FileId("ab" * 16))
    frames = (
        Frame(user_module(program), symbols_of(program)["shown"][0] + 2, (), 0, USER_SIDE),
        Frame(user_module(unmarked), symbols_of(unmarked)["main"][0], (), 0, USER_SIDE),
        Frame(user_module(stripped), whole["hidden"][0], (), 0, USER_SIDE, Unresolved.NO_NAME),
        Frame(elsewhere, whole["main"][0] + 1, (), 0, USER_SIDE),
        Frame(user_module(program, build_id=BuildId("12" * 20)), 0x401000, (), 0, USER_SIDE),
        Frame(None, 0x7F0000001000, (), 0, USER_SIDE, Unresolved.NO_FILE),
    )
    path, output = tmp_path / "in", tmp_path / "out"
    path.write_bytes(encode(frames, form=form))
    words = ("--payload", path, "-o", output, "--debug-directory", debug)
    words += ("--elf", program, "--elf", unmarked, "--elf", stripped)
    status, _, errors = symbolize(*words)
    assert (status, errors.splitlines()[0]) == (0, "named 4 of 5 locations")
    assert "1 without a name in program  build-id 1212" in errors
    payload = output.read_bytes()
    assert check_payload(payload) == []
    assert payload[:1] == path.read_bytes()[:1]
    named = frames_of(payload)
    assert [frame.function for frame in named] == ["shown", "main", "hidden", "main", "", ""]
    assert [frame.address for frame in named] == [frame.address for frame in frames]
    status, _, errors = symbolize(*words)
    assert (status, "already exists" in errors) == (1, True)
    status, _, errors = symbolize(*words, "--force", "--json")
    counts = json.loads(errors)
    assert (status, counts["nameless"], counts["named"]) == (0, 5, 4)
    assert [file["file"] for file in counts["missing"]] == ["program"]
    if form is Form.JSON:
        assert symbolize("--payload", path, "-o", "-", *words[4:])[1].encode() == payload


@pytest.fixture
def server(split, tmp_path, monkeypatch):
    """Runs a debuginfod server with the debug file for the stripped program."""
    _, folder, _ = split
    (debug,) = folder.rglob("*.debug")
    path = f"/buildid/{debug.parent.name}{debug.stem}/debuginfo"

    def answer(request):
        found = request.path == path
        request.reply(200 if found else 404, debug.read_bytes() if found else b"")

    with HttpServer(answer) as http:
        monkeypatch.setenv("DEBUGINFOD_URLS", http.url)
        monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
        yield


def test_symbols_of_missing_files_are_fetched_from_servers(symbolize, tmp_path, server, split):
    stripped, _, whole = split
    elsewhere = user_module(stripped, name="not-here", file_id=FileId("ab" * 16))
    frames = (Frame(elsewhere, whole["hidden"][0], (), 0, USER_SIDE),)
    path, output = tmp_path / "in", tmp_path / "out"
    path.write_bytes(encode(frames))
    words = ("--payload", path, "-o", output, "--force")
    assert symbolize(*words)[0] == 1
    assert symbolize(*words, "--debuginfod")[0] == 0
    assert [frame.function for frame in frames_of(output.read_bytes())] == ["hidden"]


def test_a_payload_whose_files_are_all_missing_is_reported(symbolize, tmp_path):
    module = Module("gone.so", ModuleKind.USER, BuildId("ab" * 20), FileId("cd" * 16), 0)
    kernel = Module("ext4", ModuleKind.LOADED, BuildId("ef" * 20), FileId("cd" * 16), 1 << 63)
    frames = (
        Frame(kernel, 0x10, (), 0, KERNEL_SIDE, Unresolved.NO_SYMBOL),
        Frame(module, 0x1000, (), 0, USER_SIDE),
    )
    path, output = tmp_path / "in", tmp_path / "out"
    path.write_bytes(encode(frames))
    status, _, errors = symbolize("--payload", path, "-o", output)
    assert (status, errors.splitlines()[0]) == (1, "named 0 of 2 locations")
    assert output.read_bytes() == path.read_bytes()
    path.write_bytes(b"no profiles")
    assert symbolize("--payload", path, "-o", tmp_path / "other")[0] == 1
    assert not (tmp_path / "other").exists()
    status, _, errors = symbolize("--payload", tmp_path / "missing", "-o", tmp_path / "other")
    assert (status, "cannot read" in errors) == (3, True)


def test_installed_files_are_located_by_name_and_verified_by_id(tmp_path, program, unmarked):
    for folder, path in (("a", unmarked), ("b/c", program)):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(path, tmp_path / folder / "tool")
    files = InstalledFiles(SymbolSources(), directories=[str(tmp_path)])
    for path in (program, unmarked):
        known = ElfResolver(path)
        code = files.find(FileIdentity("tool", known.build_id or BuildId(""), known.file_id))
        assert code.details.file_id == known.file_id
    with open(program, "rb") as file:
        wrong = hash_file(FileSource(file.fileno(), 64))
    assert files.find(FileIdentity("tool", BuildId(""), wrong)) is None
    assert files.find(FileIdentity("tool", BuildId(""), FileId(""))) is None


def test_a_file_is_located_by_its_path_on_the_profiled_host(tmp_path, program, unmarked):
    copy = tmp_path / "moved"
    shutil.copy(program, copy)
    known = ElfResolver(copy)
    files = InstalledFiles(SymbolSources(), directories=[])
    identity = FileIdentity("tool", known.build_id or BuildId(""), known.file_id)
    assert files.find(identity) is None
    assert files.find(identity._replace(path=str(unmarked))) is None
    assert files.find(identity._replace(path=str(copy))) is not None


def test_symbolize_searches_files_mapped_by_processes(tmp_path, program):
    copy = tmp_path / "of-a-process"
    shutil.copy(sys.executable, copy)
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [copy, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHOME": sys.base_prefix},
    ) as process:  # fmt: skip
        process.stdout.read(1)
        known = ElfResolver(copy)
        files = InstalledFiles(SymbolSources(), directories=[])
        assert files.find(FileIdentity(copy.name, known.build_id or "", known.file_id)) is not None
        process.stdin.close()
