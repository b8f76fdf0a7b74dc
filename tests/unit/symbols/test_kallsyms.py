"""Kallsyms is parsed into tables that contain exactly the names in the file."""

import lzma

import pytest

from otel_kprofiler.symbols.kernel.kallsyms import parse_kallsyms
from otel_kprofiler.symbols.kernel.names import is_marker, make_line

BASE = 0xFFFF_FFFF_8100_0000


def text(*symbols, module=""):
    tail = f"\t[{module}]" if module else ""
    return "".join(
        f"{BASE + offset:016x} {kind} {name}{tail}\n" for offset, kind, name in symbols
    ).encode()


def core(*symbols):
    return parse_kallsyms([text(*symbols)]).core


def named(table, offset):
    result = table.lookup(BASE + offset)
    return result and (result[0].decode(), result[1] - BASE)


def test_padding_before_a_function_belongs_to_it_and_ends_the_previous_function():
    table = core(
        (0x00, "t", "f"), (0x20, "t", "__pfx_g"), (0x30, "t", "g"), (0x40, "t", "h")
    )  # fmt: skip
    assert named(table, 0x1F) == ("f", 0)
    assert named(table, 0x20) == named(table, 0x2F) == named(table, 0x30) == ("g", 0x30)
    assert table.symbol(0).end == BASE + 0x20
    assert named(table, 0x3F) == ("g", 0x30), "h has no padding, so g reaches up to it"


def test_padding_whose_function_is_missing_has_no_name():
    table = core((0, "t", "f"), (0x20, "t", "__pfx_g"), (0x30, "d", "data"), (0x40, "t", "h"))
    assert named(table, 0x1F) == ("f", 0)
    assert named(table, 0x25) is None
    assert named(table, 0x35) is None


@pytest.mark.parametrize(
    ("symbols", "shown"),
    [
        ([("t", "a"), ("T", "longer_name"), ("W", "b")], "longer_name"),
        ([("t", "a"), ("W", "weak")], "weak"),
        ([("T", "__x64_sys_fork"), ("T", "__ia32_sys_fork")], "__x64_sys_fork"),
        ([("T", "bbb"), ("T", "aaa")], "aaa"),
        ([("T", "init_module"), ("t", "virtio_blk_init")], "virtio_blk_init"),
        ([("T", "cleanup_module"), ("t", "exit_one")], "exit_one"),
        ([("T", "_stext"), ("T", "_text"), ("t", "startup_64")], "startup_64"),
        ([("T", "__irqentry_text_start"), ("t", "irq_entries_start")], "irq_entries_start"),
    ],
)
def test_the_preferred_alias_is_displayed_and_every_alias_can_be_found(symbols, shown):
    for order in (symbols, symbols[::-1]):
        table = core(*((0, kind, name) for kind, name in order), (16, "t", "next"))
        assert named(table, 0) == (shown, 0)
        assert {name.decode() for name in table.names_at(BASE)} == {name for _, name in symbols}
        assert table.names_at(BASE)[0].decode() == shown
        for _, name in symbols:
            assert table.find_address(name.encode()) == BASE, "no name is lost"


def test_a_symbol_covers_at_most_64_kib():
    table = core((0, "t", "f"), (0x20_0000, "t", "g"))
    assert named(table, 0xFFFF) == ("f", 0)
    assert named(table, 0x1_0000) is None


def test_names_of_any_length_are_preserved():
    names = ["x" * length for length in (1, 127, 254, 255, 256, 511, 3000)]
    table = core(*((at * 16, "t", name + "_" * at) for at, name in enumerate(names)))
    for at, name in enumerate(names):
        assert named(table, at * 16 + 3) == (name + "_" * at, at * 16)
        assert list(table.find((name + "_" * at).encode())) == [at]


def test_ftrace_clones_listed_right_after_their_module_are_recognized_as_freed():
    live = text((0x2000, "t", "live"), (0x2100, "d", "x"), (0x2F00, "T", "exported"), module="a")
    clones = text((0x4010, "T", "a_init"), (0x4100, "T", "a_early"), module="a")
    others = text((0x3000, "T", "b_init"), module="b")
    first = text((0, "T", "_text")) + text((0x1000, "t", "b_live"), module="b")
    for rest in (b"", others, text((0x9000, "t", "bpf_prog_1"), module="bpf")):
        result = parse_kallsyms([first + live + clones + rest])
        assert {clone.name for clone in result.freed} >= {"a_init", "a_early"}
        assert named(result.blocks["a"], 0x2F01) == ("exported", 0x2F00)
        assert named(result.blocks["a"], 0x4010) is None
    result = parse_kallsyms([first + live + clones + text((0x7000, "t", "c_live"), module="c")])
    assert result.freed == (), "clones come behind all modules"


@pytest.mark.parametrize("alone", ["xxhash_generic", "bridge"])
def test_ftrace_clones_in_kallsyms_are_distinguished_from_module_symbols(clones_lines, alone):
    """Only the lines of one module and its clones are parsed, as if no other module were loaded."""
    mine = [line for line in clones_lines if line[3] == alone]
    data = "".join(f"{a:016x} {k} {n}\t[{m}]\n" for a, k, n, m in mine).encode()
    kallsyms = parse_kallsyms([data])
    whole = parse_kallsyms(
        ["".join(f"{a:016x} {k} {n}\t[{m or 'core'}]\n" for a, k, n, m in clones_lines).encode()]
    )
    assert kallsyms.freed == tuple(clone for clone in whole.freed if clone.module == alone)
    assert kallsyms.freed


def test_symbols_in_a_modules_second_block_of_kallsyms_lines_are_treated_as_freed():
    data = (
        text((0, "T", "_text"))
        + text((0x2000, "t", "live"), module="a")
        + text((0x3000, "t", "other"), module="b")
        + text((0x3000, "T", "a_init"), module="a")
    )
    kallsyms = parse_kallsyms([data])
    assert [(clone.name, clone.module) for clone in kallsyms.freed] == [("a_init", "a")]
    assert named(kallsyms.blocks["b"], 0x3000) == ("other", 0x3000)
    assert kallsyms.blocks["a"].find_address(b"a_init") is None


@pytest.mark.parametrize(
    "bad",
    [
        b"zz\n", b"ffffffff81000000 T\n", b"ffffffff81000000 T a b c d\n",
        b"fffffffg81000004 T notanumber\n", b"ffffffffffffffffff T wide\n",
        b"ffffffff81000004 TT two\n", b"ffffffff80000000 T below_the_last_line\n", b"\0\xff\n",
        b"ffffffff81000004\tT\tx\t[m\n", b"x T y\t[m]\n",
    ],
)  # fmt: skip
def test_a_malformed_line_is_counted_and_skipped(bad):
    good = text((0, "T", "f"), (0x10, "t", "g"))
    kallsyms = parse_kallsyms([good + bad + text((0x20, "t", "h"), (0x30, "T", "_etext"))])
    assert kallsyms.bad_lines == 1
    assert kallsyms.lines == 5
    assert named(kallsyms.core, 0x25) == ("h", 0x20)
    assert named(kallsyms.core, 3) == ("f", 0)
    assert named(kallsyms.core, 0x10) == ("g", 0x10)


@pytest.mark.parametrize(
    ("bad", "ends"),
    [
        (b"%016x tt b\n" % (BASE + 0x100), 0x100),
        (b"%016x t\n" % (BASE + 0x100), 0x100),
        (b"%015x t b\n" % (BASE >> 4), 1),
        (b"?\n", 1),
    ],
)
def test_a_malformed_line_ends_the_preceding_function(bad, ends):
    """The function ends at the bad line's address, or after one byte if the address is unknown."""
    table = parse_kallsyms([text((0, "t", "a")) + bad + text((0x200, "t", "c"))]).core
    assert named(table, 0) == named(table, ends - 1) == ("a", 0)
    assert named(table, ends) is named(table, 0x1FF) is None
    assert named(table, 0x200) == ("c", 0x200)


def test_a_module_whose_last_kallsyms_line_is_truncated_is_omitted():
    data = text((0x2000, "t", "a"), module="m")
    data += text((0x3000, "t", "b"), (0x3100, "t", "c"), module="n")
    assert parse_kallsyms([data]).blocks.keys() == {"m", "n"}
    assert parse_kallsyms([data[:-1]]).blocks.keys() == {"m"}


def test_symbol_tables_do_not_depend_on_the_chunk_size(clones_folder):
    data = lzma.decompress((clones_folder / "kallsyms.xz").read_bytes())
    whole = parse_kallsyms([data])
    for size in (1000, 4071, 65_536):
        cut = parse_kallsyms(data[at : at + size] for at in range(0, len(data), size))
        assert cut.lines == whole.lines
        assert cut.freed == whole.freed
        tables = [(cut.core, whole.core)] + [
            (cut.blocks[name], table) for name, table in whole.blocks.items()
        ]
        for one, other in tables:
            assert [one.symbol(i) for i in range(len(one))] == [
                other.symbol(i) for i in range(len(other))
            ]


def test_hidden_addresses_are_detected_in_the_first_chunk():
    piece = b"0000000000000000 A percpu\n" + b"0000000000000000 T f\n" * 1000
    pieces = iter([piece, b"never read\n"])
    assert parse_kallsyms(pieces).hidden
    assert next(pieces) == b"never read\n"


def test_addresses_may_cross_a_4_gib_boundary():
    low = 0xFFFF_8000_FFFF_FF00
    data = b"".join(b"%016x t f%d\n" % (low + at * 0x40, at) for at in range(8))
    table = parse_kallsyms([data]).core
    for at in range(8):
        assert table.lookup(low + at * 0x40 + 5) == (b"f%d" % at, low + at * 0x40)


def test_symbols_4_gib_below_other_symbols_are_counted_and_dropped():
    data = b"0000000000001000 T " + b"x" * 300 + b"\n" + text((0, "T", "f"), (16, "T", "_etext"))
    kallsyms = parse_kallsyms([data])
    assert kallsyms.bad_lines == 1
    assert named(kallsyms.core, 1) == ("f", 0)


@pytest.mark.parametrize(
    ("name", "function", "system_name"),
    [
        ("vfs_read", "vfs_read", ""),
        ("foo.isra.0", "foo", "foo.isra.0"),
        ("foo.constprop.0.isra.0.cold", "foo", "foo.constprop.0.isra.0.cold"),
        ("foo.part.12", "foo", "foo.part.12"),
        ("foo.llvm.123456789", "foo", "foo.llvm.123456789"),
        ("foo.slowpath", "foo.slowpath", ""),
        (".cold", ".cold", ""),
    ],
)
def test_compiler_suffixes_are_removed_from_names(name, function, system_name):
    line = make_line(name.encode())
    assert (line.function, line.system_name) == (function, system_name)


def test_no_function_is_mistaken_for_a_boundary_marker(clones_lines):
    functions = {name[6:] for _, _, name, _ in clones_lines if name.startswith("__pfx_")}
    functions |= {"__unwind_start", "text_poke", "get_text", "__stop_tty", "__key_link_begin"}
    assert len(functions) > 1000
    assert [name for name in functions if is_marker(name.encode())] == []


def test_code_is_never_named_after_a_boundary_marker(boundaries):
    """The code is named after the function at the boundary, even if that name is longer."""
    assert len(boundaries) > 50
    for marker in boundaries:
        table = core(
            (0, "T", marker.decode()), (0, "T", "x" * 99), (0x20, "t", marker.decode()),
            (0x40, "t", "f"), (0x50, "T", "_etext"),
        )  # fmt: skip
        assert named(table, 0x10) == ("x" * 99, 0)
        assert named(table, 0x20) is named(table, 0x3F) is None
        assert named(table, 0x40) == ("f", 0x40)
