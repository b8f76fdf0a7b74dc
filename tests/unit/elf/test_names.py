"""Versions are stripped from symbol names, and mapping symbols are recognized."""

import pytest

from otel_kprofiler.elf import cut_versions, is_mapping_symbol


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (b"puts@GLIBC_2.2.5", b"puts"),
        (b"memcpy@@GLIBC_2.14", b"memcpy"),
        (b"f@V", b"f"),
        (b"_ZNSt6vector@GLIBCXX_3.4", b"_ZNSt6vector"),
        *((name, name) for name in (b"turn@8", b"@start", b"a@b c", b"a@", b"a@@", b"plain")),
        *((name, name) for name in (b'@"a b"', b'main.@"a@b"', b'main.@"quoted@VERSION"')),
    ],
)
def test_only_a_trailing_symbol_version_is_removed(name, kept):
    table = b"\0first@V1\0" + name + b"\0last\0"
    cut = cut_versions(table)
    assert len(cut) == len(table)
    at = table.index(b"\0", 1) + 1
    assert cut[at : cut.index(b"\0", at)] == kept
    assert cut.startswith(b"\0first\0")
    assert cut.endswith(b"\0last\0")


@pytest.mark.parametrize("name", [b"$x", b"$d", b"$x.3", b"$d.realdata", b"__pi_$x", b"$a", b"$t"])
def test_mapping_symbols_are_recognized(name):
    assert is_mapping_symbol(name)


@pytest.mark.parametrize("name", [b"$s4main3runyyF", b"$xyz", b"f$x", b"$", b"$z", b"f"])
def test_names_that_merely_contain_a_dollar_sign_are_kept(name):
    """Swift symbols begin with ``$s``."""
    assert not is_mapping_symbol(name)
