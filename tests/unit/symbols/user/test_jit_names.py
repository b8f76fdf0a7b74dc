"""Names of code without files are requested in one thread and read in another."""

import pytest

from otel_kprofiler.model import ProcessKey, Unresolved
from otel_kprofiler.symbols.user import jit_names as module
from otel_kprofiler.symbols.user.jit_file import MadeFunction
from otel_kprofiler.symbols.user.jit_names import LOOK_AGAIN_NS, JitNames


class Map:
    """A stand-in for a process's perf map."""

    def __init__(self):
        self.read_ns = -1
        self.functions = {}
        self.parts = 1
        self.exists = True
        self.closed = False
        self.nbytes = 100

    def update(self, now_ns):
        if not self.exists:
            raise FileNotFoundError
        self.parts -= 1
        if self.parts <= 0:
            self.read_ns = now_ns
        return self.parts > 0

    def lookup(self, address, at_ns):
        return self.functions.get(address)

    def close(self):
        self.closed = True


class Host:
    def __init__(self):
        self.now_ns = 1000
        self.maps = {}
        self.names = JitNames(self.open_map, lambda: self.now_ns)

    def open_map(self, key):
        return self.maps.setdefault(key, Map())

    def ask(self, key, address=0x10, at_ns=500):
        result, _ = self.names.name(key, address, at_ns)
        return result.lines[0].function if result.lines else result.unresolved

    def read(self):
        while self.names.has_work:
            self.names.read_one()


ONE, TWO = ProcessKey(7, 1), ProcessKey(7, 2)


@pytest.fixture
def host():
    return Host()


def test_a_jit_name_is_pending_until_the_perf_map_has_been_read_after_the_sample(host):
    assert host.ask(ONE) is Unresolved.SYMBOLS_PENDING
    host.maps[ONE].functions[0x10] = MadeFunction(0x10, 0x20, "hot")
    host.read()
    assert host.ask(ONE) == "hot"
    assert host.ask(ONE, at_ns=2000) is Unresolved.SYMBOLS_PENDING
    host.now_ns = 3000
    host.read()
    assert host.ask(ONE, at_ns=2000) == "hot"
    assert host.ask(ONE, address=0x99) is Unresolved.NO_FILE


def test_a_map_is_not_used_for_a_later_process_with_the_same_pid(host):
    host.ask(ONE), host.ask(TWO)
    host.maps[ONE].functions[0x10] = MadeFunction(0x10, 0x20, "old")
    host.read()
    assert (host.ask(ONE), host.ask(TWO)) == ("old", Unresolved.NO_FILE)


def test_a_large_perf_map_is_read_in_several_steps(host):
    host.ask(ONE)
    host.maps[ONE].parts = 3
    host.names.read_one()
    assert host.names.has_work
    assert host.ask(ONE) is Unresolved.SYMBOLS_PENDING
    host.read()
    assert host.ask(ONE) is Unresolved.NO_FILE


def test_a_process_without_a_perf_map_is_checked_again(host):
    host.ask(ONE)
    host.maps[ONE].exists = False
    host.read()
    assert host.ask(ONE) is Unresolved.NO_FILE
    assert not host.names.has_work
    host.now_ns += LOOK_AGAIN_NS
    host.maps[ONE].exists = True
    host.maps[ONE].functions[0x10] = MadeFunction(0x10, 0x20, "hot")
    host.ask(ONE)
    host.read()
    assert host.ask(ONE) == "hot"


def test_the_least_recently_used_maps_are_evicted(host, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 250)
    for number in range(3):
        host.ask(ProcessKey(number, 1))
        host.read()
    assert [one.closed for one in host.maps.values()] == [True, False, False]


def test_the_number_of_processes_with_open_perf_maps_is_bounded(host, monkeypatch):
    monkeypatch.setattr(module, "MAX_PROCESSES", 10)
    for number in range(100):
        host.ask(ProcessKey(number, 1))
        host.read()
    assert sum(not one.closed for one in host.maps.values()) == 10
    host.names.close()
    assert all(one.closed for one in host.maps.values())
