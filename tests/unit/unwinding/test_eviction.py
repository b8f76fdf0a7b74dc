"""Slots and bytes are allocated to tables as a simple model predicts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.model import FileKey
from otel_kprofiler.unwinding import Limits
from otel_kprofiler.unwinding.eviction import TableSpace
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused

SLOTS = 5
LIMITS = Limits(total_bytes=100, file_bytes=60, idle_ns=10)


def key(number):
    return FileKey(number, 1, 0)


class Kernel:
    """A fake kernel that stores the contents of the slots, as visible to the BPF program."""

    def __init__(self):
        self.slots = [None] * SLOTS
        self.used = [0] * SLOTS


def claim_of(space, *request):
    try:
        return space.claim(*request), None
    except TableRefused as error:
        return None, error.refusal


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.integers(1, 70)),
        st.tuples(st.sampled_from(["remove", "load", "cancel"]), st.integers(0, 9)),
        st.tuples(st.just("use"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("wait"), st.integers(1, 15)),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_table_slots_and_bytes_are_never_allocated_twice(steps):
    """Claims overlap as if made by several threads; the steps of each claim run in order."""
    space, kernel, now_ns = TableSpace(SLOTS, LIMITS), Kernel(), 100
    # claims whose victims have not been evicted yet; claims whose victims have been evicted
    claimed, ready = ([], [])
    for number, (step, value) in enumerate(steps):
        if step == "claim":
            before = dict(space.tables)
            claim, reason = claim_of(space, value, kernel.used, now_ns)
            if reason:
                assert (reason is Refusal.TOO_LARGE) == (value > LIMITS.file_bytes)
                assert space.tables == before
                continue
            last = {k: max(t.loaded_ns, kernel.used[t.slot]) for k, t in before.items()}
            for table in claim.victims:
                assert now_ns - last[table.key] >= LIMITS.idle_ns
                assert all(last[table.key] <= last[other] for other in space.tables)
            claimed.append(claim)
        elif step == "remove" and claimed:
            claim = claimed.pop(value % len(claimed))
            for table in claim.victims:
                assert kernel.slots[table.slot] == table.key
                kernel.slots[table.slot] = None
            space.removed(claim)
            ready.append(claim)
        elif step in ("load", "cancel") and ready:
            claim = ready.pop(value % len(ready))
            assert kernel.slots[claim.slot] is None
            if step == "load":
                kernel.slots[claim.slot] = key(number)
                kernel.used[claim.slot] = 0
                space.add(claim, key(number), now_ns)
            else:
                space.cancel(claim)
        elif step == "use" and kernel.slots[value]:
            kernel.used[value] = now_ns
        elif step == "wait":
            now_ns += value
        leaving = sum(table.size for claim in claimed for table in claim.victims)
        loading = sum(claim.size for claim in claimed + ready)
        assert space.bytes == sum(table.size for table in space.tables.values()) + leaving + loading
        assert space.bytes - leaving <= LIMITS.total_bytes
        slots = [table.slot for table in space.tables.values()] + [c.slot for c in claimed + ready]
        assert len(set(slots)) == len(slots)


def test_a_table_in_use_is_not_evicted():
    space = TableSpace(1, LIMITS)
    space.add(space.claim(10, [0], 100), key(1), 100)
    with pytest.raises(TableRefused) as caught:
        space.claim(10, [105], 112)
    assert caught.value.refusal is Refusal.MEMORY_IN_USE
    assert [table.key for table in space.claim(10, [105], 115).victims] == [key(1)]
