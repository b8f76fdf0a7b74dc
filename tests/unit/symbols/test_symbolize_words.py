"""``symbolize`` accepts names with offsets, patterns, and its own output."""

import io
import json

import pytest

from otel_kprofiler.cli.symbolize_words import Place, get_fixed_prefix, parse_place, read_words

KALLSYMS = """\
ffffffff81000000 T _stext
ffffffff81000000 T _text
ffffffff81000100 T vfs_read
ffffffff81000200 T vfs_readv
ffffffff81000300 t part.isra.0
ffffffff81000380 t part.cold
ffffffff81000400 t twice
ffffffff81000410 t ksys_read
ffffffff81000500 t twice
ffffffff81000600 T _etext
ffffffffc0002000 t module_function\t[ext4]
ffffffffc0002100 t module_other\t[ext4]
"""
MODULES = "ext4 16384 0 - Live 0xffffffffc0002000\n"


@pytest.fixture
def symbolize(symbolize, monkeypatch, tmp_path):
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    (tmp_path / "modules").write_text(MODULES)
    copies = ["--kallsyms", str(tmp_path / "kallsyms"), "--modules", str(tmp_path / "modules")]

    def run(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status, output, errors = symbolize(*copies, *words)
        return status, output.splitlines(), errors.splitlines()

    return run


def addresses(lines):
    return [line.split()[0] for line in lines]


def test_a_symbol_plus_offset_resolves_to_an_address(symbolize):
    status, (line,), _ = symbolize("vfs_read+0x10")
    assert status == 0
    assert line.startswith("0xffffffff81000110  vfs_read+0x10  vmlinux+0x110  ")
    assert symbolize("vfs_read+0x10/0x100")[1] == [line], "as traces of the kernel have it"
    assert symbolize("vmlinux+0x110")[1] == [line]
    assert symbolize("ext4+0x104")[1][0].split()[1] == "module_other+0x4"
    status, (text,), _ = symbolize("--json", "vfs_read+0x10")
    assert json.loads(text)["address"] == "0xffffffff81000110"


def test_functions_with_the_same_name_are_distinguished_by_offset_and_size(symbolize):
    both = ["0xffffffff81000404", "0xffffffff81000504"]
    assert addresses(symbolize("twice+0x4")[1]) == both
    assert addresses(symbolize("twice+0x4/0x10")[1]) == both[:1]
    assert addresses(symbolize("twice+0x20")[1]) == ["0xffffffff81000520"]


def test_functions_with_compiler_suffixes_are_found_by_the_name_without_the_suffix(symbolize):
    status, lines, _ = symbolize("part")
    assert status == 0
    assert [line.split()[1] for line in lines] == ["part.isra.0", "part.cold"]
    assert addresses(symbolize("part+0x8")[1]) == ["0xffffffff81000308", "0xffffffff81000388"]
    assert symbolize("part.cold")[1] == lines[1:]


def test_an_offset_beyond_the_end_of_a_function_is_reported(symbolize):
    status, lines, errors = symbolize("vfs_read+0x300")
    assert (status, addresses(lines)) == (0, ["0xffffffff81000400"])
    assert "note: vfs_read has only 0x100 bytes" in errors


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("vfs_*", ["vfs_read", "vfs_readv"]),
        ("*_read", ["vfs_read", "ksys_read"]),
        ("vfs_rea?", ["vfs_read"]),
        ("[vk]*s_read", ["vfs_read", "ksys_read"]),
        ("VFS_*", []),
    ],
)
def test_a_pattern_lists_all_matching_symbols(symbolize, pattern, names):
    status, lines, errors = symbolize(pattern)
    assert [line.split()[1] for line in lines] == names
    assert status == (not names)
    assert (f"{pattern}: no such symbol" in errors) is (not names)


def test_a_match_all_pattern_lists_each_symbol_once(symbolize):
    lines = symbolize("*")[1]
    assert len(lines) == len(set(lines)) == len(KALLSYMS.splitlines())


def test_names_that_match_no_symbol_are_reported(symbolize):
    status, lines, errors = symbolize("nothing+0x10", "vfs_read+10", "+0x10")
    assert (status, lines) == (1, [])
    assert errors[-3:] == [
        "nothing+0x10: no such symbol", "vfs_read+10: no such symbol", "+0x10: no such symbol"
    ]  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--explain"], ["--json"]])
def test_symbolize_output_can_be_used_as_its_input(symbolize, options):
    _, names, _ = symbolize(*options, "*")
    _, printed, _ = symbolize(*options, "-", stdin="\n".join(names) + "\n")
    assert len(printed) >= len(names)
    _, again, _ = symbolize(*options, "-", stdin="\n".join(printed) + "\n")
    assert again == printed
    if not options:
        assert addresses(printed) == addresses(names)
        named = [line for line in printed if "[" not in line]
        assert len(named) == len(printed) - 3, "the markers are not functions"
        for column in (1, 2):  # names, locations
            assert set(symbolize(*[line.split()[column] for line in named])[1]) == set(named)


def test_kernel_stack_traces_are_parsed():
    trace = """\
 vfs_read+0x10/0x360
 ? twice+0x4/0x10
 ext4_file_read_iter+0x55/0x140 [ext4]
"""
    assert list(read_words(trace.splitlines(keepends=True))) == [
        "vfs_read+0x10/0x360", "twice+0x4/0x10", "ext4_file_read_iter+0x55/0x140"
    ]  # fmt: skip


def test_unrecognized_lines_are_split_into_words(symbolize):
    lines = ["ffffffff81000100 vfs_*\n", "  0x10\n", "\n", "{not json\n", '{"address": 5}\n']
    assert list(read_words(lines)) == [
        "ffffffff81000100", "vfs_*", "0x10", "{not", "json", '{"address":', "5}"
    ]  # fmt: skip


def test_names_with_offsets_are_parsed():
    assert parse_place("a+0x10") == Place("a", 16)
    assert parse_place("operator+=(int)+0Xff/0x100") == Place("operator+=(int)", 255, 256)
    for word in ("a", "a+", "a+10", "a+0x", "+0x1", "a+0xg"):
        assert parse_place(word) is None
    assert get_fixed_prefix("vfs_*x") == "vfs_"
    assert get_fixed_prefix("*") == ""
    assert get_fixed_prefix("vfs_read") is None
