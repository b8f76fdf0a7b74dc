"""SIGTERM during the export at exit takes effect once the export is complete."""

import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.system

SERVICE = """
import os, signal, time
from otel_kprofiler.sdk import ProfileProcessor, ProfilerProvider
from otel_kprofiler.sdk.signals import come_before_sigterm

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)  # the handler runs here

class Exporting(ProfileProcessor):
    def on_window(self, window):
        pass

    def shutdown(self, timeout_millis=0):
        for _ in range(TIMES):
            terminate()
        print("exported", flush=True)

def begin():
    provider = ProfilerProvider()
    provider.add_profile_processor(Exporting())
    come_before_sigterm(flush=provider.force_flush, end=provider.shutdown)
"""


def run(code, times=1):
    """Sends SIGTERM to a service during its export at exit; returns its exit status and output."""
    source = SERVICE.replace("TIMES", str(times)) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_export_at_exit_is_completed_before_the_signal_takes_effect():
    assert run("begin()") == (-signal.SIGTERM, "exported\n")


def test_a_second_signal_does_not_wait_for_the_export():
    assert run("begin()", times=2) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("times", [0, 1])
def test_a_worker_exports_its_samples_and_exits_as_if_it_were_not_profiled(times):
    code = """
    import multiprocessing
    worker = multiprocessing.get_context("fork").Process(target=begin)
    worker.start()
    worker.join()
    print(worker.exitcode)
    """
    assert run(code, times) == (0, f"exported\n{-signal.SIGTERM if times else 0}\n")


def test_the_services_signal_handler_runs_after_the_export():
    code = """
    import sys
    def handle(number, frame):
        print("handled", flush=True)
        sys.exit(3)
    signal.signal(signal.SIGTERM, handle)
    import multiprocessing
    worker = multiprocessing.get_context("fork").Process(target=begin)
    worker.start()
    worker.join()
    print(worker.exitcode)
    """
    assert run(code) == (0, "exported\nhandled\n3\n")


def test_a_child_forked_during_an_export_is_killed_by_sigterm():
    code = """
    import threading
    class Forking(ProfileProcessor):
        on_window = None

        def shutdown(self, timeout_millis=0):
            pid = os.fork()
            if pid == 0:
                terminate()
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

    provider = ProfilerProvider()
    provider.add_profile_processor(Forking())
    come_before_sigterm(flush=provider.force_flush, end=provider.shutdown)
    """
    assert run(code) == (0, f"{-signal.SIGTERM}\n")


def test_the_handler_exports_the_samples_of_the_latest_profiler():
    code = """
    begin()
    class Later(Exporting):
        def shutdown(self, timeout_millis=0):
            print("later", flush=True)

    provider = ProfilerProvider()
    provider.add_profile_processor(Later())
    come_before_sigterm(flush=provider.force_flush, end=provider.shutdown)
    terminate()
    """
    status, output = run(code)
    assert (status, output.split()[0]) == (-signal.SIGTERM, "later")


def test_the_signal_takes_effect_during_interpreter_finalization():
    code = """
    import sys
    class Last:
        write = sys.stdout.write
        def flush(self, flush=sys.stdout.flush):
            flush()
            if sys.is_finalizing():  # threads can no longer start
                terminate()

    begin()
    sys.stdout = Last()
    """
    assert run(code, times=0) == (-signal.SIGTERM, "exported\n")
