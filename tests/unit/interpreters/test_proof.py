"""Layout verification succeeds in every installed interpreter, and detects wrong layouts."""

import sys
import threading
from contextlib import contextmanager

import pytest

from otel_kprofiler.interpreters import InterpreterRefused, Refusal, open_own
from otel_kprofiler.interpreters.proof import prove
from tests.commands import run_python
from tests.further import further
from tests.interpreters import VERSIONS, require_pythons

_PROVE = "from otel_kprofiler.interpreters import open_own; print(open_own().interpreter.version)"


@pytest.mark.system
@pytest.mark.parametrize("minor", VERSIONS)
def test_every_installed_interpreter_is_verified(minor):
    for python in require_pythons(minor):
        ran = python.run("-c", _PROVE)
        assert ran.stdout.strip() == python.version, ran.stderr


_WITHOUT_MAIN_THREAD = """
import os, threading, time
from otel_kprofiler.interpreters import InterpreterRefused, open_own

def verify():
    while open("/proc/self/maps").read():
        time.sleep(0.01)
    try:
        open_own()
    except InterpreterRefused:
        print("refused", flush=True)

def fork():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    else:
        threading.Thread(target=verify).start()

threading.Thread(target=fork).start()
"""


@pytest.mark.system
def test_the_interpreter_of_a_process_without_a_main_thread_is_rejected():
    """In a child that a thread forked, this thread is the main thread, and may end first."""
    assert run_python(_WITHOUT_MAIN_THREAD) == "refused\n"


# Members whose wrong values may go undetected: some versions ignore them, or a neighbor is equal.
UNSEEN = {
    *("flags", "interpreters_head", "interpreter_next", "thread_bytes", "thread_status"),
    *("cframe_frame", "frame_bytes", "frame_entry", "frame_header", "entry_owner"),
    *("code_stack_words", "code_variables", "code_version"),
}


@pytest.mark.parametrize("shift", [-8, -4, -1, 1, 4, 8])
def test_a_wrong_layout_offset_is_detected(shift):
    own = open_own()
    layout = own.interpreter.layout
    for name, value in layout._asdict().items():
        if name not in UNSEEN and value + shift >= 0:
            with pytest.raises(InterpreterRefused) as refused:
                prove(layout._replace(**{name: value + shift}), own.process)
            assert refused.value.refusal is Refusal.NOT_PROVED, name


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="has no such members")
@pytest.mark.parametrize("name", ["cframe_frame", "frame_entry", "code_stack_words"])
def test_offsets_present_only_in_older_versions_are_verified(name):
    own = open_own()
    layout = own.interpreter.layout
    with pytest.raises(InterpreterRefused):
        prove(layout._replace(**{name: getattr(layout, name) + 8}), own.process)


@pytest.mark.parametrize("address", [0, 8, 1 << 46, (1 << 64) - 8])
def test_unmapped_interpreter_addresses_are_rejected(address):
    own = open_own()
    for name in ("runtime_at", "code_type"):
        with pytest.raises(InterpreterRefused) as refused:
            prove(own.interpreter.layout, own.process._replace(**{name: address}))
        assert refused.value.refusal is Refusal.NOT_PROVED


@contextmanager
def threads_that_come_and_go():
    over = threading.Event()

    def start_others():
        while not over.is_set():
            short = threading.Thread(target=sum, args=(range(2000),))
            short.start()
            short.join()

    starters = [threading.Thread(target=start_others) for _ in range(2)]
    for starter in starters:
        starter.start()
    try:
        yield
    finally:
        over.set()
        for starter in starters:
            starter.join()


@pytest.mark.system
@pytest.mark.parametrize("times", [40, *further(200)])
def test_threads_may_start_and_exit_during_verification(times):
    with threads_that_come_and_go():
        for _ in range(times):
            open_own()


def test_verification_leaves_no_thread_behind():
    before = set(threading.enumerate())
    open_own()
    assert set(threading.enumerate()) <= before


def test_interpreters_are_verified_even_while_functions_are_traced():
    sys.setprofile(lambda *_: None)
    try:
        open_own()
    finally:
        sys.setprofile(None)
