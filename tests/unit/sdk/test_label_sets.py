"""Label sets can be nested, and are limited in number and size."""

import asyncio
import contextvars
import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import context as otel_context

from otel_kprofiler.model import Stack, WindowSample
from otel_kprofiler.sdk import labels
from otel_kprofiler.sdk.label_sets import KEY, LabelCounts, LabelSets, process_labels
from tests.windows import make_window

STACK = Stack.from_frames(())


def current():
    number = otel_context.get_value(KEY)
    return None if number is None else dict(process_labels.find(number))


def test_labels_can_be_nested_and_apply_only_within_their_block():
    assert current() is None
    with labels(tenant="acme", region=None):
        assert current() == {"tenant": "acme", "region": "None"}
        with labels({"tenant": 7}, turn=1.5):
            assert current() == {"tenant": "7", "region": "None", "turn": "1.5"}
        assert current() == {"tenant": "acme", "region": "None"}
        with pytest.raises(KeyError), labels(failed=True):
            raise KeyError
        assert current() == {"tenant": "acme", "region": "None"}
        assert contextvars.copy_context().run(current) == current()
        with labels():
            assert current() == {"tenant": "acme", "region": "None"}
    assert current() is None


def test_identical_label_sets_share_a_number_regardless_of_order():
    with labels(a=1, b=2):
        first = otel_context.get_value(KEY)
    with labels(b="2"), labels(a="1"):
        assert otel_context.get_value(KEY) == first
    assert type(first) is int, "the sampler reads no other type"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"": 1}, "1 to 100 characters"),
        ({"a" * 101: 1}, "1 to 100 characters"),
        ({7: 1}, "1 to 100 characters: 7"),
        ({"thread.id": 1}, "samples already have an attribute thread.id"),
        ({"otel_kprofiler.x": 1}, "samples already have"),
        ({f"{number}": number for number in range(17)}, r"too many labels: 17 \(at most 16\)"),
    ],
)
def test_an_invalid_label_is_rejected(given, message):
    with pytest.raises(ValueError, match=message), labels(given):
        pytest.fail("it was accepted")
    assert current() is None


def test_long_values_are_truncated_and_excess_external_labels_are_dropped():
    outer = {f"outer{number:02}": number for number in range(10)}
    with labels(outer), labels({f"inner{number}": "x" * 300 for number in range(8)}):
        result = current()
    assert len(result) == 16
    assert {len(result[f"inner{number}"]) for number in range(8)} == {200}
    assert "outer07" in result
    assert "outer08" not in result


def test_labels_can_be_used_as_a_function_decorator():
    @labels(job="report")
    def find():
        return current()

    assert [find(), find(), current()] == [{"job": "report"}, {"job": "report"}, None]


@pytest.mark.system
def test_labels_apply_while_a_decorated_coroutine_function_runs():
    @labels(job="report")
    async def find():
        before = current()
        await asyncio.sleep(0)
        return before, current()

    async def run():
        return await asyncio.gather(find(), find()), current()

    assert inspect.iscoroutinefunction(find)
    labelled = {"job": "report"}
    assert asyncio.run(run()) == ([(labelled, labelled)] * 2, None)


async def generate_async():
    yield


def generate():
    yield


@pytest.mark.parametrize("function", [generate, generate_async])
def test_generator_functions_cannot_be_decorated_with_labels(function):
    with pytest.raises(TypeError, match=f"generator function {function.__name__}: put the loop"):
        labels(job="report")(function)


def test_a_block_of_labels_can_be_nested_in_itself():
    block = labels(job="report")
    with block:
        with block:
            assert current() == {"job": "report"}
        assert current() == {"job": "report"}
    assert current() is None


def test_least_recently_set_label_sets_are_evicted():
    sets = LabelSets(limit=3)
    numbers = [sets.number((("n", f"{number}"),)) for number in range(3)]
    assert sets.number((("n", "0"),)) == numbers[0]
    new = sets.number((("n", "new"),))
    assert sets.find(numbers[1]) == ()
    assert sets.find(numbers[0]) == (("n", "0"),)
    assert sets.find(new) == (("n", "new"),)
    assert (len(sets), sets.forgotten) == (3, 1)
    again = sets.number((("n", "1"),))
    assert again not in {*numbers, new}, "the old number may still be in a context"
    assert sets.find(again) == (("n", "1"),)


def test_concurrent_threads_receive_the_numbers_of_their_label_sets():
    sets, wrong = LabelSets(limit=50), []

    def use(first):
        for turn in range(3000):
            wanted = (("n", f"{(first * 7 + turn) % 90}"),)
            if sets.find(sets.number(wanted)) not in {wanted, ()}:
                wrong.append(wanted)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6)))
    assert not wrong
    assert len(sets) <= 50 + 6
    assert len(sets._numbers) <= len(sets)


def test_the_number_of_label_sets_per_window_is_limited():
    sets = LabelSets()
    counts = LabelCounts(sets, max_sets=2)
    results = [counts.find(sets.number((("n", name),))) for name in ("a", "b", "rare")]
    assert counts.find(999) == ()
    samples = [
        WindowSample(STACK, 1, "t", 0, None, tuple(range(weight)), (), one)
        for one, weight in zip([*results, ()], (5, 3, 1, 7), strict=True)
    ]
    window = counts.limit(make_window(0, 100, ({}, samples), taken=16))
    assert [sample.labels for _, sample in window.samples] == [results[0], results[1], (), ()]
    assert counts.as_dict() == {
        "samples": 8,
        "left_out": {"forgotten_set": 1, "too_many_sets": 1},
        "sets": 3,
        "forgotten_sets": 0,
    }
