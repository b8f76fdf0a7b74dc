"""Hostile ksymbol records are parsed safely, and the table agrees with a linear search."""

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.bpf.btf import parse_program_btf
from otel_kprofiler.model import Ksymbol, KsymbolAction, KsymbolChange, ModuleKind
from otel_kprofiler.symbols.kernel.bpf import KsymbolTable
from otel_kprofiler.tracking import make_changes, parse_perf_records
from otel_kprofiler.tracking.ksymbol_readers import parse_ksymbol_lines
from otel_kprofiler.tracking.program_iterator import parse_program_rows

SLOTS = 6
A = 0xFFFF_FFFF_C000_0FC0  # so that the slots span two pages
STEP_NS = 100_000_000  # longer than the history of unloaded code


@st.composite
def records(draw):
    body = draw(st.binary(max_size=96))
    kind = draw(st.sampled_from([2, 17, 17, 18, 99]))
    size = draw(st.one_of(st.just(len(body) + 8), st.integers(0, 200)))
    return struct.pack("=IHH", kind, 0, size) + body


def look_up_all(table, history, steps):
    """Looks up every address between steps; yields the time, the result and the expected names."""
    for number in range(steps + 2):
        time_ns = number * STEP_NS + STEP_NS // 2
        for address in range(A, A + 64 * SLOTS, 8):
            true = [
                code.name
                for code, since_ns, until_ns in history
                if since_ns <= time_ns < until_ns
                and code.start <= address < code.start + code.length
            ]
            yield time_ns, table.lookup(address, time_ns), true


@pytest.mark.fuzz
@settings(max_examples=500, deadline=None)
@given(st.lists(records(), max_size=8).map(b"".join) | st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_are_parsed_as_perf_records_without_an_exception(data, timed):
    perf_records = parse_perf_records(data, timed=timed)
    assert len(perf_records.records) <= len(data) // 8
    table = KsymbolTable()
    for change in make_changes(perf_records.records):
        table.apply(change)
        table.lookup(change.symbols[0].start, change.time_ns)


@pytest.mark.fuzz
@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=64))
def test_arbitrary_btf_and_iterator_output_is_parsed_without_a_crash(data, tail):
    header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(data), len(data), len(tail))
    parse_program_btf(data)
    parse_program_btf(header + data + tail)
    parse_ksymbol_lines(data)
    with contextlib.suppress(ValueError):
        parse_program_rows(data)


# Each step loads a symbol into a slot or unloads the slot.
steps = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(steps, st.sets(st.integers(0, 40)))
def test_a_lookup_returns_the_symbol_that_was_loaded_at_the_given_time(choices, readings):
    """The oracle is a list of intervals. Full reads between the steps do not change the results."""
    table, live, history = KsymbolTable(), {}, []
    for number, (slot, kind) in enumerate(choices, 1):
        time_ns = number * STEP_NS
        start = A + 64 * slot
        if slot in live:
            code = live.pop(slot)
            history.append((code, code.since_ns, time_ns))
            table.apply(KsymbolChange(time_ns, KsymbolAction.REMOVED, (code._replace(since_ns=0),)))
        else:
            code = Ksymbol(start, 16 + 16 * kind, f"bpf_prog_{kind}", ModuleKind.BPF, time_ns)
            live[slot] = code
            table.apply(KsymbolChange(time_ns, KsymbolAction.ADDED, (code,)))
        if number in readings:
            table.apply(KsymbolChange(time_ns + 1, KsymbolAction.ALL_READ, tuple(live.values())))
    history += [(code, code.since_ns, 1 << 62) for code in live.values()]
    for _, result, true in look_up_all(table, history, len(choices)):
        assert ([result.symbol.name] if result else []) == true
    assert {code.symbol for code in table.live()} == set(live.values())


# Each step loads or unloads a symbol in a slot. The record of the step may be lost. Programs or all
# symbols may be reread after the step, before or after the loss is noticed.
readings = [None, None, KsymbolAction.PROGRAMS_READ, KsymbolAction.ALL_READ]
lossy_step = st.tuples(
    *(st.integers(0, SLOTS - 1), st.integers(0, 3), st.booleans(), st.booleans()),
    *(st.sampled_from(readings), st.sampled_from([-1, 1])),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(lossy_step, max_size=30), st.booleans())
def test_lost_records_never_lead_to_a_wrong_name(choices, timed):
    table, live, history, reported = KsymbolTable(), {}, [], []
    polled_ns, is_lost, first_loss_ns = 0, False, 1 << 62
    choices = [*choices, (0, 0, False, True, KsymbolAction.ALL_READ, 1)]
    for number, (slot, kind, lose, poll, reading, after) in enumerate(choices, 1):
        time_ns = number * STEP_NS
        if slot in live:
            code = live.pop(slot)
            history.append((code, code.since_ns, time_ns))
            change = KsymbolChange(time_ns, KsymbolAction.REMOVED, (code._replace(since_ns=0),))
        else:
            # A reloaded program is identified by its load time, other symbols by name.
            is_program = kind < 3
            name = f"bpf_prog_{kind if timed else number}" if is_program else f"page_{number}"
            shape = ModuleKind.BPF if is_program else ModuleKind.OUT_OF_LINE
            code = Ksymbol(A + 64 * slot, 16 + 16 * kind, name, shape, time_ns)
            live[slot] = code
            change = KsymbolChange(time_ns, KsymbolAction.ADDED, (code,))
        is_lost |= lose
        reported += [] if lose else [change]
        if not poll:
            continue
        now_ns = time_ns + STEP_NS * 7 // 10
        if is_lost:
            first_loss_ns = min(first_loss_ns, polled_ns)
            reported.insert(0, KsymbolChange(polled_ns, KsymbolAction.LOST, until_ns=now_ns))
        if reading is not None:
            there = [
                code if timed and code.kind is ModuleKind.BPF else code._replace(since_ns=0)
                for code in live.values()
                if code.kind is ModuleKind.BPF or reading is KsymbolAction.ALL_READ
            ]
            reported.append(KsymbolChange(now_ns + after, reading, tuple(there)))
        for change in reported:
            table.apply(change)
        polled_ns, is_lost, reported = now_ns, False, []
    history += [(code, code.since_ns, 1 << 62) for code in live.values()]
    for time_ns, result, true in look_up_all(table, history, len(choices)):
        names = [result.symbol.name] if result and not result.is_uncertain else []
        assert names in (true, [])
        if time_ns < first_loss_ns or time_ns > polled_ns:
            assert names == true
    there = {(code.start, code.name) for code in live.values()}
    assert {(code.symbol.start, code.symbol.name) for code in table.live()} == there
