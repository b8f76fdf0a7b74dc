"""Functions from several sources match those that a byte-by-byte search finds."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.symbols.user import build as module
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.static_symbols import find_outside
from otel_kprofiler.symbols.user.symbol_tables import STB_GLOBAL, STT_FUNC, Symbols

BASE, LIMIT = 0x1000, 64
BUDGET = ReadingBudget()
SOURCES = st.lists(
    st.dictionaries(st.integers(0, LIMIT - 9), st.integers(1, 8), max_size=6),
    min_size=1,
    max_size=4,
)


def make_symbols(number, functions):
    names, names_at = b"", array("I")
    for start in functions:
        names_at.append(len(names))
        names += b"f%d_%d\0" % (number, start)
    starts = [BASE + start for start in functions]
    kinds = bytes([STB_GLOBAL << 4 | STT_FUNC]) * len(starts)
    return Symbols(array("Q", starts), array("Q", functions.values()), kinds, names_at, names)


class Oracle:
    """Finds the name of each byte by brute force. Earlier sources take precedence."""

    def __init__(self, sources):
        self.kept = []
        for number, functions in enumerate(sources):
            taken = {at for start, size, _ in self.kept for at in range(start, start + size)}
            self.kept += [
                (start, size, f"f{number}_{start}")
                for start, size in functions.items()
                if start not in taken
            ]

    def name(self, at):
        around = [one for one in self.kept if one[0] <= at < one[0] + one[1]]
        # the innermost function, because no two functions have the same start
        return max(around)[2] if around else None


@settings(max_examples=300, deadline=None)
@given(SOURCES)
def test_earlier_sources_take_precedence_and_later_sources_fill_gaps(sources):
    tables = []
    for number, functions in enumerate(sources):
        tables.append(find_outside(tables, make_symbols(number, functions), BUDGET))
    table = module._Columns(tables, BUDGET).make_table(1 << 30, [], module.NO_BOUNDS)
    oracle = Oracle(sources)
    for at in range(LIMIT):
        result = table.lookup(BASE + at)
        assert (result and result.name) == oracle.name(at), at
