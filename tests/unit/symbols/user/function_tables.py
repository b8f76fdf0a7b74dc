"""Builds function tables for tests."""

from array import array
from itertools import accumulate

from otel_kprofiler.symbols.user.columns import NamedCode
from otel_kprofiler.symbols.user.functions import Bounds, FunctionTable


def make_table(functions):
    """Returns a function table. Unnamed functions are added only to the bounds."""
    ordered = sorted(functions, key=lambda function: (function.start, -function.end))
    base = ordered[0].start if ordered else 0

    def columns(rows):
        return (
            array("I", [row.start - base for row in rows]),
            array("I", [row.end - row.start for row in rows]),
        )

    named = [row for row in ordered if row.name]
    names = [row.name.encode() + b"\0" for row in named]
    places = array("I", list(accumulate(map(len, names), initial=0))[:-1])
    code = NamedCode(*columns(named), places, b"".join(names), bytes(len(named)))
    bounds = Bounds(base, *columns([row for row in ordered if not row.name]))
    return FunctionTable(base, code, bounds)
