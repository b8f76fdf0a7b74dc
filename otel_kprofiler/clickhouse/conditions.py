"""Translates filters to SQL conditions.

Conditions merely reduce the number of rows read. The caller must still apply the filter to the
samples that were read. A condition may therefore match more rows than the filter, but never fewer.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from otel_kprofiler.analysis import CONTAINER, Filter
from otel_kprofiler.formats import plain_module
from otel_kprofiler.otlp import LOCAL_ROOT, PROGRAM

_WILD: Final = "*?["
_LIKE_ESCAPES: Final = str.maketrans({"\\": r"\\", "%": r"\%", "_": r"\_"})
_ESCAPES: Final = str.maketrans({"\\": r"\\", "'": r"\'", "\0": r"\0"})


def literal(text: str) -> str:
    """Quotes a string as an SQL literal."""
    return f"'{text.translate(_ESCAPES)}'"


def identifier(name: str) -> str:
    """Quotes the name of a table or database."""
    escaped = name.replace("\\", r"\\").replace("`", r"\`")
    return f"`{escaped}`"


def literals(texts: Iterable[str]) -> str:
    """Quotes strings, and joins them into a sorted list for SQL's ``IN``."""
    return ", ".join(map(literal, sorted(texts)))


def filter_conditions(chosen: Filter, rows: str) -> Iterator[str]:
    """Yields SQL conditions that hold for every row matching a filter. Sample kinds are ignored.

    ``rows`` is the result of :func:`queries.rows_between`, for use in subqueries.
    """
    if chosen.processes:
        pid, file = _resource("process.pid"), _resource("process.executable.name")
        program = _resource(PROGRAM)
        named = _matches(_sample("thread.name"), chosen.processes)
        yield _any(
            _matches(file, chosen.processes),
            _matches(program, chosen.processes),
            _matches(f"concat({program}, ' (', {file}, ')')", chosen.processes),
            _matches(pid, chosen.processes),
            f"{pid} IN (SELECT {pid} FROM {rows} AND {named})",  # noqa: S608 - literals
        )
    if chosen.threads:
        yield _any(
            *(_matches(_sample(f"thread.{field}"), chosen.threads) for field in ("name", "id"))
        )
    if chosen.services:
        yield _any(
            _matches("ServiceName", chosen.services),
            _matches(_sample("service.name"), chosen.services),
        )
    if chosen.containers:
        names = [*chosen.containers, *(f"{name}*" for name in chosen.containers)]
        yield _any(*(_matches(column(name), names) for name in CONTAINER for column in _COLUMNS))
    for pair in chosen.attributes:
        name, _, value = pair.partition("=")
        yield _any(*(_matches(column(name), [value]) for column in _COLUMNS))
    if chosen.cpus:
        yield f"{_sample('cpu.logical_number')} IN ({literals(map(str, chosen.cpus))})"
    if chosen.modules:
        is_one = _matches(
            "replaceAll(one, '-', '_')", [plain_module(module) for module in chosen.modules]
        )
        yield f"arrayExists(one -> {is_one}, MappingFileNames)"
    if chosen.functions and all(map(_is_function, chosen.functions)):
        yield f"arrayExists(one -> {_matches('one', chosen.functions)}, FunctionNames)"
    if chosen.spans:
        ids = [f"{span.lower()}*" for span in chosen.spans]
        yield _any(_matches("TraceId", ids), _matches("SpanId", ids))
    if chosen.endpoints:
        named = _matches(_sample(LOCAL_ROOT), chosen.endpoints)
        yield f"SpanId IN (SELECT SpanId FROM {rows} AND {named})"  # noqa: S608 - literals


def _resource(name: str) -> str:
    return f"ResourceAttributes[{literal(name)}]"


def _sample(name: str) -> str:
    return f"SampleAttributes[{literal(name)}]"


_COLUMNS: Final = (_resource, _sample)


def _is_function(pattern: str) -> bool:
    """Returns whether a pattern matches only functions. Placeholder names start with ``[``."""
    return pattern[:1] not in {"", *_WILD}


def _any(*conditions: str) -> str:
    return f"({' OR '.join(conditions)})"


def _matches(text: str, patterns: Sequence[str]) -> str:
    """Returns SQL that tests whether ``text`` matches a pattern, within the limits of ``LIKE``."""
    terms = [f"{text} IN ({literals(patterns)})"]  # names may contain wildcard characters
    terms += [
        f"{text} LIKE {literal(_like(pattern))}"
        for pattern in patterns
        if not set(_WILD).isdisjoint(pattern)
    ]
    return _any(*terms)


def _like(pattern: str) -> str:
    """Returns a ``LIKE`` pattern that matches every string that ``pattern`` matches."""
    begin, bracket, rest = pattern.partition("[")
    end = rest.rpartition("]")[2] if "]" in rest else ""
    words = (begin + "*" + end if bracket else begin).replace("?", "*")
    return "%".join(word.translate(_LIKE_ESCAPES) for word in words.split("*"))
