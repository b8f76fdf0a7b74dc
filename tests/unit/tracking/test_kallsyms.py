"""The BPF iterator ksym lists each symbol once, and omits the iterator's program."""

import pytest

from otel_kprofiler.tracking.kallsyms import clean_symbols

CORE = b"ffffffff81000000 T _text\nffffffff81000000 T startup_64\n"
PROGRAM = b"ffffffffc0001000 t bpf_prog_0011223344556677_x\t[bpf]\n"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"", b""),
        (CORE, CORE),
        (CORE + CORE[-30:], CORE),
        (CORE + PROGRAM + PROGRAM.replace(b"[bpf]", b"[__builtin__kprobes]"), CORE + PROGRAM),
        (CORE + b"ffffffffc0001000 t bpf_prog_0_list_symbols\t[bpf]\n", CORE),
    ],
)
def test_a_repeated_last_symbol_and_the_iterator_program_are_omitted(given, kept):
    assert clean_symbols(given) == kept
