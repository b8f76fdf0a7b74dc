"""Hostile function names: any string is demangled or returned unchanged, in bounded time."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.symbols.user.demangle import demangle

pytestmark = pytest.mark.fuzz
ROWS = Path(__file__).parents[1] / "data" / "symbols" / "rust_names.tsv"
SEEDS = [row.split("\t")[0] for row in ROWS.read_text().splitlines()]
SEEDS += [
    "_ZNSt6vectorISt4pairIKSsiESaIS2_EE17_M_realloc_insertIJS2_EEEvN9__gnu_cxx17__normal_iteratorIPS2_S4_EEDpOT_",
    "_ZZN4node9inspector11InspectorIoC4ESt10shared_ptrINS0_16MainThreadHandleEEENKUlvE_clEv",
    "_ZN5boost6spirit2qi6detail14alternative_orIXsr3mplE5valueEEENS_9enable_ifIT_E4typeERKS5_",
]
TOKENS = sorted({name[at : at + 3] for name in SEEDS for at in range(0, len(name), 7)})


@st.composite
def damaged(draw):
    name = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(name)))
        end = draw(st.integers(start, min(len(name), start + 40)))
        part = draw(st.sampled_from(TOKENS) | st.just(name[start:end] * 20) | st.text(max_size=3))
        name = name[:start] + part + name[end:]
    return name


GRAMMAR = st.text("BCDEFGIKLMNOPQRSTUVXYabcehjlpstuvz0123456789_", max_size=200)


@settings(max_examples=500, deadline=10_000)
@given(damaged() | GRAMMAR.map("_RMC0{}".format) | GRAMMAR.map("_Z1f{}".format) | st.text())
def test_arbitrary_names_are_demangled_or_left_unchanged(name):
    started = time.thread_time()
    assert isinstance(demangle(name), str)
    assert time.thread_time() - started < 5
