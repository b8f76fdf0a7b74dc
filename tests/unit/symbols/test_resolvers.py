"""Resolvers can be combined, can use captured kernel symbols, and can be custom classes."""

import pytest

from otel_kprofiler.model import USER_SIDE, Frame, Line, Module, ModuleKind, ProcessKey, Unresolved
from otel_kprofiler.symbols import (
    CachedResolver,
    ChainResolver,
    KernelResolver,
    PidFilter,
    Resolution,
    Symbolizer,
)

FILE = Module("a.so", ModuleKind.USER, None, "ab" * 16, 0)


class Table:
    """A custom resolver that maps addresses to the same names in all processes."""

    def __init__(self, names, module=None, reason=Unresolved.NO_SYMBOL):
        self.names, self.module, self.reason = names, module, reason
        self.asked, self.closed = [], 0

    def resolve(self, addresses, pid=None):
        self.asked.append((list(addresses), pid))
        return [self.answer(address, pid) for address in addresses]

    def answer(self, address, pid):
        name = self.names.get(address)
        lines, reason = ((Line(name),), None) if name else ((), self.reason)
        frame = Frame(self.module, address, lines, 0, USER_SIDE, reason)
        return Resolution(address, frame, pid and ProcessKey(pid, 5))

    def find(self, name, pid=None):
        return [self.answer(at, pid) for at, known in self.names.items() if known == name]

    def close(self):
        self.closed += 1


def functions(answers):
    return [answer.function for answer in answers]


def test_a_chain_passes_unnamed_addresses_to_the_next_resolver():
    first, second = Table({1: "one"}), Table({1: "other", 2: "two"}, FILE)
    chain = ChainResolver(first, second)
    answers = chain.resolve([3, 1, 2, 3], 7)
    assert functions(answers) == ["", "one", "two", ""]
    assert [answer.address for answer in answers] == [3, 1, 2, 3]
    assert (first.asked, second.asked) == ([([3, 1, 2, 3], 7)], [([3, 2, 3], 7)])
    assert answers[0].module is FILE, "the one that knows more"
    assert functions(chain.resolve([1, 1])) == ["one", "one"]
    assert len(second.asked) == 1, "not asked if nothing is left"


@pytest.mark.parametrize("swapped", [False, True])
def test_a_chain_returns_the_most_complete_result_if_no_result_has_a_name(swapped):
    nothing = Table({}, reason=Unresolved.UNMAPPED)
    in_file = Table({}, FILE)
    resolvers = [nothing, in_file, Table({}, FILE, Unresolved.NO_NAME)]
    (answer,) = ChainResolver(*(resolvers[::-1] if swapped else resolvers)).resolve([5])
    assert answer.unresolved is Unresolved.NO_NAME
    (answer,) = ChainResolver(nothing, Table({}, reason=Unresolved.HIDDEN)).resolve([5])
    assert answer.unresolved is Unresolved.UNMAPPED, "the first of equals"


def test_a_chain_of_resolvers_returns_each_address_for_a_name_only_once():
    chain = ChainResolver(Table({1: "f", 2: "f"}), Table({2: "f", 3: "f"}))
    assert [answer.address for answer in chain.find("f")] == [1, 2, 3]
    assert chain.find("g") == []


def test_an_empty_chain_of_resolvers_resolves_nothing():
    (answer,) = ChainResolver().resolve([5])
    assert answer.unresolved is Unresolved.UNMAPPED


def test_closing_a_chain_closes_its_resolvers():
    parts = [Table({}), Table({}), Table({})]
    made = ChainResolver(CachedResolver(parts[0]), PidFilter(parts[1], ()))
    Symbolizer(kernel=parts[2], user=made).close()
    assert [part.closed for part in parts] == [1, 1, 1]


def test_a_cache_calls_its_resolver_once_per_address():
    table = Table({1: "one"})
    cache = CachedResolver(table)
    for _ in range(2):
        assert functions(cache.resolve([2, 1, 2], 7)) == ["", "one", ""]
    assert functions(cache.resolve([1], 8)) == ["one"]
    assert table.asked == [([2, 1, 2], 7), ([1], 8)]
    assert functions(cache.find("one")) == ["one"]


def test_a_cache_evicts_the_oldest_entry():
    table = Table({at: str(at) for at in range(10)})
    cache = CachedResolver(table, entries=4)
    assert functions(cache.resolve(range(10))) == [str(at) for at in range(10)]
    table.asked.clear()
    assert functions(cache.resolve([5, 6, 9])) == ["5", "6", "9"]
    assert table.asked == [([5], None)]


def test_cached_results_are_discarded_after_a_state_change():
    table, state = Table({1: "old"}), {7: 0}
    cache = CachedResolver(table, state=state.get)
    assert functions(cache.resolve([1], 7)) == ["old"]
    table.names = {1: "new"}
    assert functions(cache.resolve([1], 7)) == ["old"]
    state[7] = 1
    assert functions(cache.resolve([1], 7)) == ["new"]


def test_a_pid_filter_excludes_other_processes():
    table, pids = Table({1: "one"}), {7}
    only = PidFilter(table, pids)
    assert functions(only.resolve([1], 7)) == functions(only.resolve([1])) == ["one"]
    (answer,) = only.resolve([1], 8)
    assert (answer.function, answer.unresolved) == ("", Unresolved.LEFT_OUT)
    assert (only.find("one", 8), functions(only.find("one", 7))) == ([], ["one"])
    pids.add(8)
    assert functions(only.resolve([1], 8)) == ["one"]


def test_the_kernel_resolver_agrees_with_its_symbolizer(modules):
    resolver = KernelResolver(modules)
    (match,) = modules.find("__connect")
    (result,) = resolver.find("__connect")
    assert (result.address, result.module_address) == (match.address, match.rva)
    (answer,) = resolver.resolve([match.address + 2], pid=7)
    assert (answer.function, answer.offset, answer.process) == ("__connect", 2, None)
    assert answer.module is result.module
    assert answer.build_id == match.module.build_id
    assert str(answer) == f"{match.address + 2:#x} __connect+0x2 irqbypass+{match.rva + 2:#x}"
    assert resolver.find("__connect", pid=7) == []
    (user,) = resolver.resolve([0x1000])
    assert user.unresolved is Unresolved.UNMAPPED
    assert user.frame.side is USER_SIDE


def test_kernel_and_user_addresses_can_be_resolved_in_one_call(modules):
    (match,) = modules.find("__connect")
    user = Table({1: "one", 2: "two"})
    symbolizer = Symbolizer(kernel=KernelResolver(modules), user=user)
    answers = symbolizer.resolve([1, match.address, 2, 3], 7)
    assert functions(answers) == ["one", "__connect", "two", ""]
    assert user.asked == [([1, 2, 3], 7)]
    assert functions(symbolizer.find("one", 7)) == ["one"]
    assert functions(symbolizer.find("__connect")) == ["__connect"]
    assert symbolizer.find("__connect", 7) == []


def test_a_symbolizer_without_resolvers_reports_addresses_as_unmapped():
    answers = Symbolizer().resolve([1, 1 << 63])
    assert [answer.unresolved for answer in answers] == [Unresolved.UNMAPPED] * 2
    assert Symbolizer().find("f") == []
