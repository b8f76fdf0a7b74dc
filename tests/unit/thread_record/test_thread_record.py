"""Python's thread contexts: at each step the record is that of the current span."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import otel_kprofiler
from tests.thread_record import LIBRARY

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the library is for x86-64"),
]
SCENARIOS = Path(__file__).with_name("scenarios.py")
ROOT = Path(otel_kprofiler.__file__).parents[1]


@pytest.mark.parametrize(
    "name",
    [
        "nested", "threads", "contexts", "begin_in_a_context", "begin_after_a_failure", "loop",
        "eager", "uvloop", "c_code", "trio", "greenlets", "greenlets_are_traced_already",
        "interrupts", "no_python_code", "fork", "attributes", "endpoints",
        "ends",
    ],
)  # fmt: skip
def test_the_record_is_that_of_the_current_span_at_each_step(name):
    if name == "eager" and sys.version_info < (3, 12):
        pytest.skip("eager tasks need Python 3.12")
    if name == "c_code" and shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    done = subprocess.run(
        [sys.executable, SCENARIOS, name],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    checked, linked = map(int, done.stdout.split())
    if name not in {"attributes", "endpoints"}:
        assert 0 < linked <= checked


def test_the_library_is_what_its_source_compiles_to(tmp_path):
    version = (
        shutil.which("gcc-12")
        and subprocess.check_output(["gcc-12", "-dumpfullversion"], text=True).strip()
    )
    if version != "12.2.0" or not Path("/usr/include/python3.11/Python.h").exists():
        pytest.skip("needs gcc 12.2.0 and the headers of Python 3.11")
    for name in ("record.c", "imports.c", "imports.h", "build.sh"):
        shutil.copy(LIBRARY.with_name(name), tmp_path)
    subprocess.run([tmp_path / "build.sh"], cwd="/", check=True)
    assert (tmp_path / LIBRARY.name).read_bytes() == LIBRARY.read_bytes()


def test_the_library_needs_no_other_and_exports_the_variable():
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    text = subprocess.check_output(["readelf", "-dW", "-r", "--dyn-syms", LIBRARY], text=True)
    assert "(NEEDED)" not in text
    assert "R_X86_64_TLSDESC" in text
    assert any("TLS" in line and line.endswith(" otel_thread_ctx_v1") for line in text.splitlines())
