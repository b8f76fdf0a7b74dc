"""Runs native programs that publish thread contexts, and compares samples with program logs."""

import bisect
import os
import shutil
import struct
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.model import ON_CPU
from otel_kprofiler.otlp import ProcessContext
from otel_kprofiler.otlp.process_context import encode_process_context
from otel_kprofiler.processes import ProcessContexts
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

SOURCES = Path(__file__).parent / "data" / "thread_context"
SCHEMA = {
    "threadlocal.schema_version": "tlsdesc_v1_dev",
    "threadlocal.attribute_key_map": ("span.hex", "thread.name"),
}
NODEJS_SCHEMA = {**SCHEMA, "threadlocal.schema_version": "nodejs_v1_dev"}
NAME = "otel_thread_ctx_v1"
WANTED = int(os.environ.get("KPROFILER_CONTEXT_SAMPLES", "2000"))
"""A test waits for this many samples with a span."""
LATEST_S = 600
PREBUILT = "KPROFILER_CONTEXT_PROGRAMS"
"""Environment variable with the path of prebuilt programs, for machines without a compiler."""
_A64_DIALECTS = {
    "-mtls-dialect=gnu": "-mtls-dialect=trad",
    "-mtls-dialect=gnu2": "-mtls-dialect=desc",
}
_LINE = struct.Struct("<5Q16s8s")


class Model(NamedTuple):
    """A TLS model: compiler options of the library and program, and how the library is loaded."""

    library: tuple[str, ...] | None
    program: tuple[str, ...] = ()
    is_late: bool = False
    modules: int = 0  # number of other libraries with TLS to load before the library


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


GUEST_MODELS = ("local_exec", "descriptor", "opened_general_dynamic")
"""The TLS models that are tested in virtual machines."""
MUSL_MODELS = (
    "local_exec",
    "local_exec_fixed",
    "local_exec_static",
    "initial_exec",
    "general_dynamic",
    "descriptor",
    "descriptor_symbolic",
    "general_dynamic_symbolic",
    "sysv_hash",
    "opened_general_dynamic",
    "opened_descriptor",
    "opened_behind_others",
)
"""The TLS models that musl supports: musl cannot dlopen() a library that needs static TLS."""


def build(directory, name, late_ms=1500, compiler="gcc", source="program.c"):
    """Compiles a program. Returns the paths of the program and of the libraries that it opens."""
    if PREBUILT in os.environ:
        return find_files(Path(os.environ[PREBUILT], name), name)
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    program, opened = find_files(directory, name)
    model, library = MODELS[name], directory / "libcontext.so"
    words = [compiler, "-O2", "-g0", "-o", program, SOURCES / source]
    if model.library is None:
        words.append(SOURCES / "variable.c")
    else:
        dialects = _A64_DIALECTS if compiler.startswith("aarch64") else {}
        options = [dialects.get(option, option) for option in model.library]
        command = [compiler, "-O2", "-shared", "-fPIC", *options]
        compile_with([*command, "-o", library, SOURCES / "variable.c"])
        if model.is_late:
            words.append(f"-DLATE_MS={late_ms}")
        else:
            words += [library, f"-Wl,-rpath,{directory}"]
    compile_with([*words, *model.program, "-pthread", "-ldl"])
    for other in opened[:-1]:
        compile_with([*command, "-o", other, SOURCES / "other.c"])
    return program, opened


def find_files(directory, name):
    model = MODELS[name]
    opened = [directory / f"libother{number}.so" for number in range(model.modules)]
    opened += [directory / "libcontext.so"] if model.is_late else []
    return directory / "program", opened


def compile_with(words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write_payload(directory, extra=None):
    path = directory / "payload"
    context = ProcessContext({"service.name": "native"}, SCHEMA if extra is None else extra)
    path.write_bytes(encode_process_context(context))
    return path


class Service:
    """A program that logs its contexts until ``close`` stops it."""

    def __init__(self, words, log):
        self._log = log
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def wait_ready(self):
        assert self._process.stdout.readline() == "ready\n"

    def read_log(self):
        """Stops the program, and returns each thread's contexts in time order."""
        self._process.communicate("", timeout=LATEST_S)
        assert self._process.returncode == 0
        lines = defaultdict(list)
        for *times, tid, trace, span in _LINE.iter_unpack(self._log.read_bytes()):
            lines[tid].append((times, trace, span))
        return lines


class Program(Service):
    def __init__(self, directory, name, threads, extra=None, **options):
        program, libraries = build(directory, name, **options)
        log = directory / "log"
        words = [program, write_payload(directory, extra), log, str(threads)]
        super().__init__([*words, *libraries], log)


class Reader:
    """Samples this process's descendants by name, and reads their process contexts."""

    def __init__(self, *names, **options):
        config = SamplerConfig(
            samples_per_second=999, stacks="both", target_pids=(os.getpid(),),
            target_descendants=True, target_comms=names, **options,
        )  # fmt: skip
        self.sampler = EbpfSampler(config)
        self.sampler.start()
        self.contexts = ProcessContexts(Access(), first_look_s=0, answer_timeout_s=1)
        self.contexts.follow_threads(self.sampler.contexts)
        self._seen = set()
        self.samples = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.contexts.close()
        self.sampler.close()

    def drain(self):
        new = self.sampler.drain()
        self.samples += new
        for process in {sample.process for sample in new} - self._seen:
            self._seen.add(process)
            self.contexts.expect(process)

    def collect_until(self, condition):
        deadline = time.monotonic() + LATEST_S
        while not condition():
            assert time.monotonic() < deadline, Counter(
                sample.link is None for sample in self.samples
            )
            time.sleep(0.1)
            self.drain()
            self.contexts.look(self._seen)

    def count_links(self, kind=ON_CPU):
        return sum(sample.kind is kind and sample.link is not None for sample in self.samples)

    def decode(self, sample):
        has_span = sample.link is not None
        return dict(self.contexts.decode(sample.process, sample.context, has_span=has_span))


def find_lines(lines, time_ns):
    """Returns the last two contexts before a time; near a change, a sample may have either."""
    at = bisect.bisect_right(lines, time_ns, key=lambda line: line[0][0])
    return lines[max(at - 2, 0) : at]


def compare(samples, log):
    """Counts the outcomes of comparing each sample's link with its thread's log."""
    first_ns = min(sample.time_ns for sample in samples if sample.link)
    counts = Counter()
    for sample in samples:
        # The end of a wait is reported late, when the context may have changed, so compare the
        # context at the midpoint of the wait.
        time_ns = (
            sample.wait.start_ns + sample.wait.duration_ns // 2 if sample.wait else sample.time_ns
        )
        lines = find_lines(log.get(sample.tid, ()), time_ns)
        if sample.link:
            is_right = any(
                begin <= time_ns <= end and sample.link[:2] == (trace, span)
                for (begin, _, _, end), trace, span in lines
            )
            counts["right" if is_right else "wrong"] += 1
        elif time_ns >= first_ns:
            is_inside = any(since <= time_ns <= until for (_, since, until, _), *_ in lines)
            counts["missing" if is_inside else "none"] += 1
    return counts


def find_overlong_waits(samples):
    """Returns linked waits whose parts add up to more than the wait's elapsed time."""
    parts = defaultdict(int)
    for sample in samples:
        if sample.link and sample.wait and sample.wait.is_ended:
            key = sample.tid, sample.wait.start_ns, sample.time_ns
            parts[key] += sample.wait.duration_ns
    # While a clock is being slewed, the difference between two reads may be off by a microsecond.
    return [(key, passed) for key, passed in parts.items() if passed > key[2] - key[1] + 1000]
