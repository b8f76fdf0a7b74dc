"""Commands that read profiles start without importing the packages that record them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PROFILE = str(Path(__file__).parents[2] / "data/otlp/ebpf-profiler.otlp.gz")
UNUSED = ("bpf", "sampling", "symbols", "unwinding", "pipeline", "sdk")


@pytest.mark.parametrize(("command", "count"), [("report", 1), ("diff", 2)])
def test_commands_that_read_profiles_do_not_import_the_sampler(command, count):
    code = (
        "import sys; from otel_kprofiler.cli.main import cli\n"
        f"cli({[command] + [PROFILE] * count}, standalone_mode=False)\n"
        f"print([m for m in {UNUSED} if f'otel_kprofiler.{{m}}' in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
