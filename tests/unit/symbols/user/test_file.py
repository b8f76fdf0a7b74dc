"""The functions in a file are found by linkage name and by demangled name."""

import pytest

from otel_kprofiler.symbols.user.demangle import demangle, has_cxx_runtime
from otel_kprofiler.symbols.user.file import MAX_CANDIDATES, FileSymbols
from otel_kprofiler.symbols.user.functions import Function
from tests.unit.symbols.user.function_tables import make_table

CXX = (
    "_ZN4shop4Cart3addEi",  # shop::Cart::add(int)
    "_ZN4shop4Cart3addEd",
    "_ZNK4shop4Cart5totalEv",  # shop::Cart::total() const
    "_ZN4shop4CartD1Ev",  # shop::Cart::~Cart()
    "_ZN4shop4CartplERKS0_",  # shop::Cart::operator+(shop::Cart const&)
    "_Z3addi",  # add(int)
    "_ZN4shop4mostIiEET_S1_S1_",  # int shop::most<int>(int, int)
    "_ZNSt6vectorIiSaIiEE9push_backERKi",
    "_ZN4shop8readdersEv",  # shop::readders()
)
RUST = ("_RNvC6_123foo3bar", "_ZN3foo3bar17h05af221e174051e9E")


def symbols(*names):
    rows = [Function(16 * at, 16 * at + 9, name) for at, name in enumerate(names)]
    return FileSymbols(make_table(rows), demangle)


@pytest.mark.skipif(not has_cxx_runtime(), reason="needs libstdc++")
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shop::Cart::add", [0, 1]),
        ("shop::Cart::add(double)", [1]),
        ("shop::Cart::add(long)", []),
        ("shop::Cart::total", [2]),
        ("shop::Cart::total() const", [2]),
        ("shop::Cart::~Cart", [3]),
        ("shop::Cart::operator+", [4]),
        ("shop::Cart", []),
        ("add", [5]),
        ("Cart::add", []),
        ("shop::most<int>", [6]),
        ("int shop::most<int>(int, int)", [6]),
        ("std::vector<int, std::allocator<int> >::push_back", [7]),
        ("_Z3addi", [5]),
        ("(", []),
        ("", []),
    ],
)
def test_functions_are_found_by_demangled_or_linkage_name(name, found):
    assert [function.start // 16 for function in symbols(*CXX).find(name)] == found


def test_an_exact_linkage_name_is_matched_first():
    file = symbols("add", "_Z3addi", *RUST)
    assert [function.name for function in file.find("add")] == ["add"]
    assert [function.name for function in file.find("foo::bar")] == [RUST[1]]
    assert [function.name for function in file.find(demangle(RUST[0]))] == [RUST[0]]


def test_a_search_compares_a_limited_number_of_names():
    file = symbols(*["_RNvC1a3bar"] * (MAX_CANDIDATES + 1))
    assert len(file.find(demangle("_RNvC1a3bar"))) == MAX_CANDIDATES
