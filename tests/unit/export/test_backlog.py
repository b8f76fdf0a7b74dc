"""The totals of a backlog are those of its batches, and only its oldest batches are visited."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.export import Spool
from otel_kprofiler.export.backlog import Backlog, Held
from otel_kprofiler.export.recovery import Stored
from otel_kprofiler.model import LossCause, SampleCounts


def held(number, *, is_stored=True):
    samples = SampleCounts(on_cpu=number, off_cpu=1)
    stored = Stored(number, samples, 10 * number, float(number), number // 3, 0)
    return Held(number, samples, 10 * number, (), stored if is_stored else None, [])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.booleans()),
        st.tuples(st.just("take"), st.booleans()),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 12))),
        st.tuples(st.just("remove_stored"), st.integers(0, 12)),
    )
)


@given(STEPS)
def test_totals_and_order_are_exact_after_any_steps(steps):
    backlog, expected, numbers = Backlog(), [], itertools.count(1)
    for step, value in steps:
        if step == "append":
            expected.append(held(next(numbers), is_stored=value))
            backlog.append(expected[-1])
        elif step == "take" and expected:
            first = backlog.popleft()
            assert first == expected.pop(0)
            if value:
                backlog.appendleft(first)
                expected.insert(0, first)
        elif step == "remove":
            dropped = [one for at, one in enumerate(expected) if at in value]
            backlog.remove(dropped)
            expected = [one for one in expected if one not in dropped]
        elif step == "remove_stored":
            dropped = backlog.stored_through(value)
            assert dropped == [one for one in expected if one.stored and one.number <= value]
            backlog.remove(dropped)
            expected = [one for one in expected if one not in dropped]
        assert list(backlog) == expected
        assert backlog.first == (expected[0] if expected else None)
        samples, number, size = backlog.totals()
        assert +samples == sum((one.samples for one in expected), SampleCounts())
        assert (number, size) == (len(expected), sum(one.size for one in expected))


@pytest.mark.parametrize(
    ("limits", "now", "overdue", "cause"),
    [
        ({"max_age_s": 10}, 14.5, [3, 4], LossCause.SPOOL_AGED),
        ({"max_age_s": 100}, 14.5, [], None),
        ({"max_bytes": 1}, 14.5, [3, 4, 5], LossCause.SPOOL_FULL),
    ],
)
def test_only_overdue_batches_are_visited(tmp_path, limits, now, overdue, cause):
    spool = Spool(str(tmp_path), now=lambda: now, **limits)
    visited = []
    waiting = (visited.append(number) or held(number).stored for number in itertools.count(3))
    stored, why = spool.find_overdue(waiting, 0)
    assert ([one.number for one in stored], why) == (overdue, cause)
    assert len(visited) <= len(overdue) + 1
    spool.close()
