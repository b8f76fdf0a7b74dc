"""Demangled C++ and Rust names match those from other demanglers."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from otel_kprofiler.symbols.user import demangle as module
from otel_kprofiler.symbols.user.demangle import demangle, demangle_in_go, has_cxx_runtime
from tests.unit.symbols.user.elf_programs import tool

pytestmark = pytest.mark.system

ROWS = Path(__file__).parents[3] / "data" / "symbols" / "rust_names.tsv"
"""Names in a program built by rustc 1.95: mangled, and as demangled by rustc-demangle."""


def names_of(library):
    """Returns the names of the C++ functions that a library exports, without versions."""
    lines = tool("nm", "-D", "--format=posix", library).splitlines()
    return sorted({line.split()[0].partition("@")[0] for line in lines if line.startswith("_Z")})


def test_cxx_names_match_cxxfilt():
    names = names_of(tool("gcc", "-print-file-name=libstdc++.so.6").strip())
    assert len(names) > 3000
    expected = tool("c++filt", "--no-verbose", input="\n".join(names)).splitlines()
    assert [demangle(name) for name in names] == expected
    assert has_cxx_runtime()


@pytest.mark.parametrize("row", ROWS.read_text().splitlines())
def test_rust_names_match_rustc_demangle(row):
    mangled, expected = row.split("\t")
    assert demangle(mangled) == expected
    assert demangle(f"{mangled}.llvm.13034508541273513475") == expected


@pytest.mark.parametrize(
    ("mangled", "expected"),
    [
        ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
        ("_RNvC6_123foo3bar", "123foo::bar"),
        ("_RNqCs4fqI2P2rA04_11utf8_identsu30____7hkackfecea1cbdathfdh9hlq6y",
         "utf8_idents::საჭმელად_გემრიელი_სადილი"),
        (("_RNCINkXs25_NgCsbmNqQUJIY6D_4core5sliceINyB9_4IterhENuNgNoBb_4iter8iterator8Iterator"
         "9rpositionNCNgNpB9_6memchr7memrchrs_0E0Bb_"),
         ("<core::slice::Iter<u8> as core::iter::iterator::Iterator>::rposition"
         "::<core::slice::memchr::memrchr::{closure#1}>::{closure#0}")),
        (("_RINbNbCskIICzLVDPPb_5alloc5alloc8box_freeDINbNiB4_5boxed5FnBoxuEp6OutputuEL_ECs1iopQbuBiw2"
         "_3std"),
         "alloc::alloc::box_free::<dyn alloc::boxed::FnBox<(), Output = ()>>"),
        ("_RMCs4fqI2P2rA04_13const_genericINtB0_8UnsignedKhb_E",
         "<const_generic::Unsigned<11>>"),
        ("_RMCs4fqI2P2rA04_13const_genericINtB0_6SignedKs98_E",
         "<const_generic::Signed<152>>"),
        ("_RMCs4fqI2P2rA04_13const_genericINtB0_6SignedKan80_E",
         "<const_generic::Signed<-128>>"),
        ("_RMCs4fqI2P2rA04_13const_genericINtB0_4BoolKb1_E", "<const_generic::Bool<true>>"),
        ("_RMCs4fqI2P2rA04_13const_genericINtB0_4CharKc27_E", r"<const_generic::Char<'\''>>"),
        ("_RIC0Kj123456789abcdef01_E", "::<0x123456789abcdef01>"),
        ("_RIC0KRe616263_E", '::<"abc">'),
        ("_RIC0KRe22275c0a1b_E", r"""::<"\"'\\\n\u{1b}">"""),
        ("_RIC0KRAh1_h2_EE", "::<{&[1, 2]}>"),
        ("_RIC0KTTbb1_EEE", None),
        ("_RIC0KTb1_h2_EE", "::<{(true, 2)}>"),
        ("_RIC0KVNtNtC4core6option4NoneUE", "::<{core::option::None}>"),
        ("_RIC0KVNvC1a1STh1_EE", "::<{a::S(1)}>"),
        ("_RIC0KVNvC1a1SS1xh1_1yb0_EE", "::<{a::S { x: 1, y: false }}>"),
        ("_RMC0FUKCRL0_hEu", None),
        ("_RMC0FG_UKCRL0_hEu", """<for<'a> unsafe extern "C" fn(&'a u8)>"""),
        ("_RMC0DG_INtC1a1FRL0_hEp6OutputzEL_", "<dyn for<'a> a::F<&'a u8, Output = !>>"),
        ("_RMC0TReOhPhQuTuEE", "<(&str, *mut u8, *const u8, &mut (), ((),))>"),
        ("_RNSC1a4vtbl", "a::{shim:vtbl#0}"),
        ("_ZN3foo17h05af221e174051e9E", "foo"),
        ("_ZN39_$LT$A$u20$as$u20$a..B$LT$$BP$C$GT$$GT$3foo17h05af221e174051e9E.cold",
         "<A as a::B<*C>>::foo"),
        ("_ZN3foo17h05af221e174051eE", None),  # 15 digits: C++
        ("_Z3fooi.isra.0.cold", "foo(int)"),
        ("_Z3fooi.part.0", "foo(int)"),
        ("_ZN1AC2Ev", "A::A()"),
        ("main", "main"),
        ("memcpy.constprop.0", "memcpy"),
        (".cold", ".cold"),
        ("i", "i"),  # a function name that __cxa_demangle would parse as a type
        ("", ""),
    ],
)  # fmt: skip
def test_names_are_demangled(mangled, expected):
    assert demangle(mangled) == (expected or mangled)


def nested(count):
    """Returns a name in which each type is a pair of the previous type, doubling the length."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "_Z1f1A1XIS_S_E" + "".join(f"S0_IS{d}_S{d}_E" for d in digits[1 : count + 1])


@pytest.mark.parametrize(
    "name",
    [
        nested(12),
        nested(30),
        "_Z1f1XIJ" + "i" * 400 + "EE" + "DpDpDpDpT_",
        "_Z1f" + "P" * 800 + "i",
        "_Z" + "N" * 8000,
        "_RMC0" + "T" + "TB4_B4_E" * 200 + "E",
        "_RMC0T" + "".join(f"TB{'' if not at else at - 1}_E" for at in range(50)) + "E",
        "_RMC0" + "R" * 4000 + "h",
        "_RNvC0" + "B_" * 10,
        "_RMC0B2_",
        "_RMC0FG" + "Z" * 10 + "_Eu",
        "_RMC0FGzz_Eu",
        "_ZN" + "3foo" * 1500 + "17h05af221e174051e9E",
        "a.cold" * 1300 + "x",
        "_R" + "I" * 4000,
        "_RNvC9999993foo",
        "_RNvCu3a_\udc803foo",
        "_Z3\udc80oo",
    ],
)
def test_adversarial_names_are_demangled_in_bounded_time(name):
    started = time.thread_time()
    assert len(demangle(name)) <= 1 << 14
    assert time.thread_time() - started < 5


def test_a_name_that_expands_to_a_length_within_the_limit_is_demangled():
    assert demangle(nested(6)).startswith("f(A, X<A, A>, X<X<A, A>, X<A, A> >")


def test_cxx_names_remain_mangled_without_a_cxx_runtime(monkeypatch):
    monkeypatch.setattr(module, "_RUNTIMES", ("libnone.so.1",))
    module._find_runtime.cache_clear()
    try:
        assert not has_cxx_runtime()
        assert demangle("_Z3fooi.cold") == "_Z3fooi"
        assert demangle("_RNvC1a3foo") == "a::foo"
    finally:
        module._find_runtime.cache_clear()


def test_concurrent_threads_receive_the_same_demangled_names():
    names = names_of(tool("gcc", "-print-file-name=libstdc++.so.6").strip())[:500]
    expected = [demangle(name) for name in names]
    with ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: [demangle(name) for name in names], range(8)):
            assert result == expected


def test_stubs_are_demangled_like_the_functions_that_they_call():
    plain = demangle("_ZN5TableILi3EE3sumEl")
    assert demangle("_ZN5TableILi3EE3sumEl@plt") == f"{plain}@plt"
    assert demangle("memcpy@plt") == "memcpy@plt"


def test_names_in_go_programs_keep_ends_that_resemble_those_of_clones():
    assert demangle_in_go("main.part") == "main.part"
    assert demangle_in_go("main.(*T).cold") == "main.(*T).cold"
    assert demangle_in_go("_ZN5TableILi3EE3sumEl.cold") == demangle("_ZN5TableILi3EE3sumEl")
