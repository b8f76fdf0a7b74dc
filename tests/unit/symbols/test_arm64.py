"""Symbols in arm64 kernels are correct despite mapping symbols and different section boundaries."""

from pathlib import Path

import pytest

from otel_kprofiler.symbols import KernelSymbolizer

FOLDER = Path(__file__).parents[2] / "data" / "kernel" / "6.1-arm64"
SEGMENT_BYTES = 64 << 10


@pytest.fixture(scope="module")
def lines(read_lines):
    return list(read_lines(FOLDER / "kallsyms.xz"))


@pytest.fixture(scope="module")
def kernel():
    return KernelSymbolizer.from_files(
        kallsyms=FOLDER / "kallsyms.xz", modules=FOLDER / "proc_modules"
    )


def test_kernel_code_has_names_and_addresses_relative_to_the_image_start(kernel, lines):
    places = {name: address for address, _, name, module in lines if not module}
    assert "_text" not in places
    (text,) = kernel.module("vmlinux").ranges
    assert (text.start, text.end) == (places["_stext"] - SEGMENT_BYTES, places["_etext"])
    assert not [problem for problem in kernel.snapshot.problems if "kallsyms" in problem]
    for name in ("vectors", "cpu_do_idle", "el1h_64_irq_handler"):
        frame = kernel.snapshot.frame(places[name])
        assert frame.lines[0].function == name
        assert frame.address == places[name] - places["_stext"] + SEGMENT_BYTES
    assert not kernel.snapshot.frame(places["_etext"]).lines


def test_every_function_is_named_and_mapping_symbols_are_skipped(kernel, lines):
    functions = {}
    for address, _, name, module in lines:
        if module:
            functions.setdefault(address, set()).add(name)
    assert any("$x" in names for names in functions.values())
    for address, names in functions.items():
        frame = kernel.snapshot.frame(address)
        real = {name for name in names if not name.startswith("$")}
        assert frame.lines[0].system_name or frame.lines[0].function in real, names
    assert not kernel.snapshot.find("$x")
    assert not kernel.snapshot.find("__pi_$x")


BASE = 0xFFFF_FFFF_8100_0000


def from_lines(tmp_path, *symbols):
    path = tmp_path / "kallsyms"
    path.write_text("".join(f"{BASE + at:016x} {kind} {name}\n" for at, kind, name in symbols))
    return KernelSymbolizer.from_files(kallsyms=path)


def name(kernel, offset):
    lines = kernel.snapshot.frame(BASE + offset).lines
    return lines[0].function if lines else None


def test_data_embedded_in_code_has_no_name(tmp_path):
    kernel = from_lines(
        tmp_path,
        (0, "T", "_text"), (0, "T", "f"), (0, "t", "$x"), (0x40, "t", "$d.7"), (0x60, "t", "$x.8"),
        (0x80, "t", "g"), (0x80, "t", "$x"), (0x100, "T", "$d"), (0x120, "T", "h"),
        (0x140, "D", "_etext"),
    )  # fmt: skip
    results = {at: name(kernel, at) for at in (0, 0x3F, 0x40, 0x60, 0x7F, 0x80, 0xFF, 0x100, 0x11F)}
    assert results == {
        0: "f", 0x3F: "f", 0x40: None, 0x60: None, 0x7F: None, 0x80: "g", 0xFF: "g", 0x100: None,
        0x11F: None,
    }  # fmt: skip


def test_an_address_in_a_preamble_resolves_to_the_function_that_follows(tmp_path):
    kernel = from_lines(
        tmp_path,
        (0, "T", "_text"), (0, "T", "f"), (0x30, "t", "__cfi_g"), (0x40, "t", "g"),
        (0x80, "T", "__cfi_check"), (0xA0, "T", "_etext"),
    )  # fmt: skip
    assert [name(kernel, at) for at in (0x2F, 0x30, 0x3F, 0x40)] == ["f", "g", "g", "g"]
    assert name(kernel, 0x80) == "__cfi_check"


def test_a_long_function_extends_to_the_next_function_in_its_section(tmp_path):
    kernel = from_lines(
        tmp_path,
        (0, "T", "_text"), (0, "T", "long"), (0x5_0000, "t", "next"),
        (0x20_0000, "T", "__entry_text_start"), (0x20_0000, "T", "entry"),
        (0x20_0100, "T", "_etext"),
    )  # fmt: skip
    assert name(kernel, 0x4_FFFF) == "long"
    assert name(kernel, 0x5_8000) == "next"
    assert name(kernel, 0x1F_FFFF) is None, "the hole before another part of the section"
    assert name(kernel, 0x20_0000) == "entry"
