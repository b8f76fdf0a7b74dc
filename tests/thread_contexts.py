"""Native programs that publish thread contexts, compiled for each way to reach the variable."""

import shutil
import struct
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_kprofiler.otlp import ProcessContext
from otel_kprofiler.otlp.process_context import encode_process_context

SOURCES = Path(__file__).parent / "data" / "thread_context"
SCHEMA = {
    "threadlocal.schema_version": "tlsdesc_v1_dev",
    "threadlocal.attribute_key_map": ("span.hex", "thread.name"),
}
NAME = "otel_thread_ctx_v1"
_LINE = struct.Struct("<5Q16s8s")


class Model(NamedTuple):
    """A way to reach the variable: how library and program are compiled, whether it is late."""

    library: tuple[str, ...] | None
    program: tuple[str, ...] = ()
    is_late: bool = False
    modules: int = 0  # libraries with thread-local variables that are opened before


MODELS = {
    "local_exec": Model(None, ("-rdynamic",)),
    "local_exec_fixed": Model(None, ("-rdynamic", "-no-pie", "-fno-pie")),
    "local_exec_static": Model(
        None, ("-static-pie", "-Wl,--export-dynamic-symbol=otel_thread_ctx_v1")
    ),
    "initial_exec": Model(("-ftls-model=initial-exec",)),
    "general_dynamic": Model(("-mtls-dialect=gnu",)),
    "descriptor": Model(("-mtls-dialect=gnu2",)),
    "descriptor_symbolic": Model(("-mtls-dialect=gnu2", "-Wl,-Bsymbolic")),
    "general_dynamic_symbolic": Model(("-mtls-dialect=gnu", "-Wl,-Bsymbolic")),
    "sysv_hash": Model(("-mtls-dialect=gnu", "-Wl,--hash-style=sysv")),
    "opened_initial_exec": Model(("-ftls-model=initial-exec",), is_late=True),
    "opened_general_dynamic": Model(("-mtls-dialect=gnu", "-DLARGE"), is_late=True),
    "opened_descriptor": Model(("-mtls-dialect=gnu2", "-DLARGE"), is_late=True),
    "opened_behind_others": Model(("-mtls-dialect=gnu2", "-DLARGE"), is_late=True, modules=40),
}


MUSL_MODELS = (
    "local_exec",
    "initial_exec",
    "general_dynamic",
    "descriptor",
    "descriptor_symbolic",
    "opened_general_dynamic",
    "opened_descriptor",
)
"""Ways that musl knows, too."""


def build(directory, name, late_ms=1500, compiler="gcc", source="program.c"):
    """Compile a program; returns its path, and those of the libraries that it opens."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    model = MODELS[name]
    program, library = directory / "program", directory / "libcontext.so"
    words = [compiler, "-O2", "-g0", "-o", program, SOURCES / source]
    if model.library is None:
        words.append(SOURCES / "variable.c")
    else:
        command = [compiler, "-O2", "-shared", "-fPIC", *model.library]
        compile_with([*command, "-o", library, SOURCES / "variable.c"])
        if model.is_late:
            words.append(f"-DLATE_MS={late_ms}")
        else:
            words += [library, f"-Wl,-rpath,{directory}"]
    compile_with([*words, *model.program, "-pthread", "-ldl"])
    others = [directory / f"libother{number}.so" for number in range(model.modules)]
    for other in others:
        compile_with([*command, "-o", other, SOURCES / "other.c"])
    return program, [*others, library] if model.is_late else []


def compile_with(words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write_payload(directory, extra=None):
    """Write the payload of a process context; returns its path."""
    path = directory / "payload"
    context = ProcessContext({"service.name": "native"}, SCHEMA if extra is None else extra)
    path.write_bytes(encode_process_context(context))
    return path


class Program:
    """A running program. Stop it by closing it."""

    def __init__(self, directory, name, threads, extra=None, **options):
        program, libraries = build(directory, name, **options)
        self._log = directory / "log"
        words = [program, write_payload(directory, extra), self._log, str(threads)]
        self._process = subprocess.Popen(
            [*words, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def wait_ready(self):
        """Wait until its threads start."""
        assert self._process.stdout.readline() == "ready\n"

    def read_log(self):
        """End the program; returns the contexts of each thread in their order."""
        self._process.communicate("", timeout=60)
        assert self._process.returncode == 0
        lines = defaultdict(list)
        for *times, tid, trace, span in _LINE.iter_unpack(self._log.read_bytes()):
            lines[tid].append((times, trace, span))
        return lines
