"""The thread record of Python code always matches the current span."""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.emulated import ROOT, run_on_arm64
from tests.further import further
from tests.servers import free_port

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="interpreters are for x86-64"),
]
SCENARIOS = Path(__file__).with_name("scenarios.py")
CAPTURED = {"capture_output": True, "text": True, "timeout": 300}
PLACE = Path(__file__).with_name("place.py")


@pytest.mark.parametrize(
    "name",
    [
        "nested", "threads", "contexts", "begin_after_a_failure", "loop",
        "eager", "c_code", "c_code_in_part_of_a_page", "trio",
        "greenlets", "greenlets_are_traced_already",
        "interrupts", "changes_context", "no_python_code", "fork", "attributes", "endpoints",
        "ends", "c_fork", "subinterpreters", "start_in_a_subinterpreter",
        *further("begin_in_a_context", "uvloop"),
    ],
)  # fmt: skip
def test_the_record_always_matches_the_current_span(name):
    if name == "eager" and sys.version_info < (3, 12):
        pytest.skip("eager tasks need Python 3.12")
    if name.startswith("c_code") and shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    done = subprocess.run(
        [sys.executable, SCENARIOS, name], env={**os.environ, "PYTHONPATH": str(ROOT)}, **CAPTURED
    )
    assert done.returncode == 0, done.stderr
    checked, linked = map(int, done.stdout.split())
    if name not in {"attributes", "endpoints"}:
        assert 0 < linked <= checked


EMULATED = [
    "nested", "threads", "contexts", "begin_in_a_context", "begin_after_a_failure", "loop",
    "interrupts", "fork", "attributes", "endpoints", "ends", "subinterpreters",
    "start_in_a_subinterpreter",
]  # fmt: skip
"""Scenarios without third-party C code, excluding `c_fork` because qemu lacks MADV_DONTFORK."""


def compile_helper(compiler, folder):
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source, library = folder / "helper.c", folder / "helper.so"
    source.write_text(
        "unsigned long thread_pointer(void) { return (unsigned long)__builtin_thread_pointer(); }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-nostdlib", source, "-o", library], check=True)
    return library


def test_the_thread_local_variable_is_found_where_the_linker_placed_it(tmp_path):
    helper = compile_helper("x86_64-linux-gnu-gcc-12", tmp_path)
    subprocess.run(
        [sys.executable, PLACE, helper], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )


@pytest.mark.long
def test_the_arm64_thread_local_variable_is_found_where_the_linker_placed_it(tmp_path):
    run_on_arm64(PLACE, compile_helper("aarch64-linux-gnu-gcc-12", tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", EMULATED)
def test_the_arm64_record_always_matches_the_current_span(name):
    checked, linked = map(int, run_on_arm64(SCENARIOS, name).split())
    assert 0 <= linked <= checked
    assert linked or name in {"attributes", "endpoints"}


APPLICATION = """
import json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import thread_context
from otel_kprofiler.processes import read_process_context
from tests.thread_record import read_record

trace.set_tracer_provider(TracerProvider())
tracer = trace.get_tracer("service")
thread_context.start()
started = os.getpid()

def app(environ, start_response):
    with tracer.start_as_current_span("GET /") as span:
        context, published = span.get_span_context(), read_process_context(os.getpid())
        answer = {
            "pid": os.getpid(),
            "is_forked": os.getpid() != started,
            "is_right": read_record()[:2] == (context.trace_id, context.span_id),
            "schema": published.extra["threadlocal.schema_version"],
            "names": published.extra["threadlocal.attribute_key_map"],
        }
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
"""


def test_gunicorn_workers_with_a_preloaded_application_publish_their_spans(tmp_path):
    tmp_path.joinpath("service.py").write_text(APPLICATION)
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--threads", "2"]
    command += ["--bind", f"127.0.0.1:{port}", "--chdir", str(tmp_path), "service:app"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as gunicorn:
        try:
            pids, until = set(), time.monotonic() + 60
            while len(pids) < 2:
                assert time.monotonic() < until, pids
                with contextlib.suppress(ConnectionError):
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                    connection.request("GET", "/")
                    answer = json.loads(connection.getresponse().read())
                    connection.close()
                    pids.add(answer.pop("pid"))
                    assert answer == {
                        "is_forked": True,
                        "is_right": True,
                        "schema": "tlsdesc_v1_dev",
                        "names": ["otel_kprofiler.local_root_span.name"],
                    }
        finally:
            gunicorn.terminate()
