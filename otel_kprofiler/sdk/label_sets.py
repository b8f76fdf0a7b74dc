"""Allows a service to label the samples taken in a context: ``with labels(tenant="acme"): …``.

OpenTelemetry's context holds the number of the current label set, which the sampler reads in the
same way as the current span. The profiler looks up the label set when it adds the sample to a
window.
"""

import contextlib
import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import Token
from typing import Any, Final, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from otel_kprofiler import forks
from otel_kprofiler.model import (
    MAX_LABEL_NAME_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    LabelSet,
    Window,
)
from otel_kprofiler.otlp import SAMPLE_ATTRIBUTES
from otel_kprofiler.sdk.pacing import Pacer, paced

F = TypeVar("F", bound=Callable[..., Any])

MAX_SETS: Final = 8192
MAX_SETS_IN_WINDOW: Final = 128
"""Maximum number of label sets in a window. The sets with the fewest samples are omitted."""

KEY: Final = otel_context.create_key("otel-kprofiler-labels")
"""OpenTelemetry context key for the number of the label set; compared by identity."""


class LabelSets:
    """Maps numbers to label sets. Thread-safe, without locks.

    If there are more than ``limit`` sets, the least recently entered set is dropped.
    """

    def __init__(self, limit: int = MAX_SETS) -> None:
        self._limit = limit
        self._numbers: dict[LabelSet, int] = {}
        self._sets: OrderedDict[int, LabelSet] = OrderedDict()
        self._next = itertools.count(1)
        self.forgotten = 0
        self._encode: Callable[[LabelSet], bytes] | None = None
        self._encoded: dict[int, bytes] = {}

    def follow(self, encode: Callable[[LabelSet], bytes], encoded: dict[int, bytes]) -> None:
        """Encode all existing and future label sets into ``encoded``, by number."""
        self._encode, self._encoded = encode, encoded
        for number, labels in tuple(self._sets.items()):
            encoded[number] = encode(labels)

    def __len__(self) -> int:
        return len(self._sets)

    def number(self, labels: LabelSet) -> int:
        """Returns a label set's number, assigning one if the set is new or was evicted."""
        number = self._numbers.get(labels)
        if number is not None:
            try:
                self._sets.move_to_end(number)
            except KeyError:  # another thread has just evicted the set
                pass
            else:
                return number
        number = next(self._next)
        self._sets[number] = labels
        if self._encode:
            self._encoded[number] = self._encode(labels)
        self._numbers[labels] = number
        if len(self._sets) > self._limit:
            oldest, of_oldest = self._sets.popitem(last=False)
            self._encoded.pop(oldest, None)
            if self._numbers.get(of_oldest) == oldest:
                self._numbers.pop(of_oldest, None)
            self.forgotten += 1
        return number

    def find(self, number: int) -> LabelSet:
        """Returns the label set with the given number; empty if the set was evicted."""
        return self._sets.get(number, ())


process_labels: Final = LabelSets()


class Labels(contextlib.AbstractContextManager[None]):
    """A ``with`` block or decorator that labels samples; returned by :func:`labels`.

    As a decorator, thread-safe.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._pairs = pairs
        self._tokens: list[Token[Context]] = []

    def __enter__(self) -> None:
        forks.catch_up()
        number = otel_context.get_value(KEY)
        outside = dict(process_labels.find(number)) if isinstance(number, int) else {}
        kept = {name: value for name, value in outside.items() if name not in self._pairs}
        room = MAX_LABELS - len(self._pairs)
        merged = sorted([*list(kept.items())[:room], *self._pairs.items()])
        number = process_labels.number(tuple(merged))
        self._tokens.append(otel_context.attach(otel_context.set_value(KEY, number)))

    def __exit__(self, *_: object) -> None:
        otel_context.detach(self._tokens.pop())

    def __call__(self, function: F) -> F:
        """Label the samples taken in each call of a function or coroutine function.

        Raises ``TypeError`` for a generator function, whose body runs after the call.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"labels cannot decorate the generator function {function.__qualname__}: put the "
                "loop that iterates over the generator in a with block"
            )
        if inspect.iscoroutinefunction(function):

            async def call_async(*arguments: Any, **named: Any) -> Any:
                with Labels(self._pairs):
                    return await function(*arguments, **named)

            return cast("F", functools.wraps(function)(call_async))

        def call(*arguments: Any, **named: Any) -> Any:
            with Labels(self._pairs):
                return function(*arguments, **named)

        return cast("F", functools.wraps(function)(call))


def labels(given: Mapping[str, object] | None = None, /, **more: object) -> Labels:
    """Label the samples taken inside the ``with`` block in the current context.

    The labels are added to the labels of enclosing blocks, and override labels with the same name.
    Asyncio tasks that are started inside the block inherit the labels, as do threads that run in a
    copy of this context. ``labels`` also works as a decorator for functions and coroutine
    functions. The profiler reads labels only where it can read spans from the interpreter; see
    ``labels`` in ``profiler.stats()``.

    ::

        with labels(tenant="acme"):
            ...
        with labels({"tenant.id": 7}, region="eu"):
            ...

    Args:
        given: the labels, by name (1 to 100 characters). Values are converted to strings and
            truncated to 200 characters.
        more: labels whose names are identifiers, which override those in ``given``.

    Raises:
        ValueError: a name is not a string, empty, too long, or reserved; or there are more than 16
            labels. If nested blocks have more than 16 labels in total, labels from outer blocks are
            omitted.
    """
    pairs = {**(given or {}), **more}
    if len(pairs) > MAX_LABELS:
        raise ValueError(f"too many labels: {len(pairs)} (at most {MAX_LABELS})")
    for name in pairs:
        check_name(name)
    return Labels({name: str(value)[:MAX_LABEL_VALUE_CHARS] for name, value in pairs.items()})


def check_name(name: Any) -> None:
    """Raise ``ValueError`` if ``name`` is not a valid label name."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_LABEL_NAME_CHARS:
        raise ValueError(f"a label name must be a string of 1 to 100 characters: {name!r}")
    if name in SAMPLE_ATTRIBUTES or name.startswith("otel_kprofiler."):
        raise ValueError(f"samples already have an attribute {name}: rename the label")


class LabelCounts:
    """Looks up and counts sample labels during a profiler run, in the profiler's thread."""

    def __init__(
        self, sets: LabelSets = process_labels, max_sets: int = MAX_SETS_IN_WINDOW
    ) -> None:
        self._sets = sets
        self._max_sets = max_sets
        self._labelled = self._forgotten = self._too_many = 0

    def find(self, number: int) -> LabelSet:
        """Returns the labels of a sample, given the number of its label set."""
        label_set = self._sets.find(number)
        if not label_set:
            self._forgotten += 1
        return label_set

    def limit(self, window: Window) -> Window:
        """Returns the window with at most ``max_sets`` distinct label sets."""
        weights: dict[LabelSet, int] = {}
        for _, sample in paced(window.samples):
            if sample.labels:
                count = len(sample.timestamps_unix_ns)
                weights[sample.labels] = weights.get(sample.labels, 0) + count
        self._labelled += sum(weights.values())
        if len(weights) <= self._max_sets:
            return window
        by_weight = sorted(weights, key=weights.__getitem__, reverse=True)
        dropped = set(by_weight[self._max_sets :])
        count = sum(weights[label_set] for label_set in dropped)
        self._too_many += count
        self._labelled -= count
        return window.change_samples(
            lambda sample: sample._replace(labels=()) if sample.labels in dropped else sample,
            Pacer(),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the sample and set counts as plain values."""
        return {
            "samples": self._labelled,
            "left_out": {"forgotten_set": self._forgotten, "too_many_sets": self._too_many},
            "sets": len(self._sets),
            "forgotten_sets": self._sets.forgotten,
        }
