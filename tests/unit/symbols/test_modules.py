"""Modules have the correct memory ranges, identities and relative addresses."""

import lzma
from itertools import pairwise

import pytest

from otel_kprofiler.elf.notes import find_build_id, parse_notes
from otel_kprofiler.model import ModuleKind, RangeSource, Unresolved
from otel_kprofiler.symbols import KernelSymbolizer, make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import NO_MODULES, parse_kallsyms
from otel_kprofiler.symbols.kernel.load import make_module
from otel_kprofiler.symbols.kernel.modules import ModuleFiles, ProcModule, parse_modules
from otel_kprofiler.symbols.kernel.names import is_marker

BASE = 0xFFFF_FFFF_C000_0000


def test_every_function_has_the_expected_relative_address_and_name(clones, clones_folder):
    checked = 0
    for line in (
        lzma.decompress((clones_folder / "functions.xz").read_bytes()).decode().splitlines()
    ):
        name, rva, size, function = line.split()
        module = clones.module(name)
        address = module.base + int(rva, 16)
        (frame,) = clones.resolve_addresses([address])
        assert frame.module is module
        assert frame.address == int(rva, 16)
        if not int(size, 16):
            continue  # a label inside other code
        explained = clones.explain(address)
        assert function in explained.names
        assert frame.offset == 0
        assert explained.end >= address + int(size, 16)
        (last,) = clones.resolve_addresses([address + int(size, 16) - 1])
        assert last.lines == frame.lines
        checked += 1
    assert checked > 900


def test_the_address_of_every_text_symbol_in_kallsyms_resolves_to_the_symbol(clones, clones_lines):
    """A simple parser finds the live functions of modules and vmlinux, except init text."""
    init = [
        next(a for a, _, name, _ in clones_lines if name == marker) for marker in ("_etext", "_end")
    ]
    freed = {(clone.address, clone.name) for clone in clones.snapshot.freed}
    checked = 0
    for address, kind, name, module in clones_lines:
        is_code = kind in "tTwW" and not name.startswith("__pfx_")
        if not is_code or (address, name) in freed or init[0] <= address < init[1]:
            continue
        if is_marker(name.encode()):
            continue
        explained = clones.explain(address)
        if module.startswith("__builtin__"):
            assert explained.frame.function == name
            assert explained.frame.module.kind is ModuleKind.OUT_OF_LINE
        else:
            assert name in explained.names
            assert explained.frame.offset == 0
            assert explained.frame.module.name == (module or "vmlinux")
        checked += 1
    assert checked > 1800


def test_no_frame_is_named_after_a_freed_init_function(clones, clones_lines):
    """The address of a freed clone resolves to a live symbol, or to no symbol."""
    freed = clones.snapshot.freed
    assert len(freed) == 26
    collisions = 0
    for clone in freed:
        explained = clones.explain(clone.address)
        live = {
            name
            for address, kind, name, module in clones_lines
            if address == clone.address and (module, name) != (clone.module, clone.name)
        }
        assert clone in explained.freed
        if explained.frame.lines:
            assert explained.frame.offset > 0 or set(explained.names) <= live
        collisions += bool(live)
    assert collisions >= 4
    assert clones.explain(0xFFFFFFFFC0615010).frame.function == "sound_devnode"


def test_addresses_in_freed_kernel_init_text_are_not_resolved_to_functions(clones, clones_lines):
    at = {name: a for a, _, name, _ in clones_lines}
    start, end = at["_sinittext"], at["_einittext"]
    for address, kind, name, module in clones_lines:
        if start < address < end and kind in "tT" and not module:
            (frame,) = clones.resolve_addresses([address])
            assert frame.unresolved is Unresolved.FREED_INIT, name
            assert frame.address == address - frame.module.base


def test_module_ranges_do_not_overlap_although_those_in_proc_modules_do(modules, modules_files):
    listed, bad = parse_modules(modules_files.read_bytes("/proc/modules"))
    assert (len(listed), bad) == (126, 0)
    extents = sorted((m.address, m.address + m.size) for m in listed)
    assert sum(a[1] > b[0] for a, b in pairwise(extents)) == 15
    results = [m for m in modules.snapshot.modules if m.kind is ModuleKind.LOADED]
    assert len(results) == 126
    ranges = sorted(part for module in results for part in module.ranges)
    assert all(a.end <= b.start for a, b in pairwise(ranges))
    assert {m.range_source for m in results} == {RangeSource.SECTIONS}
    assert all(m.base == m.ranges[0].start for m in results)
    assert not any(part.name.startswith(".init") for part in ranges)


@pytest.fixture(scope="module")
def pages(modules_folder):
    """Returns (address, type, module) of the first and last symbols on each page of all modules."""
    data = lzma.decompress((modules_folder / "pages.xz").read_bytes()).decode()
    rows = [line.split() for line in data.splitlines() if "\t" in line]
    return [(int(address, 16), kind, module[1:-1]) for address, kind, _, module in rows]


@pytest.mark.parametrize("sysfs", [True, False])
def test_modules_cover_only_pages_that_hold_their_functions(pages, modules_folder, sysfs):
    """Modules cover neither data nor memory after the guard page at the end of the text."""
    symbolizer = KernelSymbolizer.from_files(
        kallsyms=modules_folder / "pages.xz",
        modules=modules_folder / "proc_modules",
        sys_module=modules_folder / "sys_module.tar.xz" if sysfs else None,
    )
    snapshot = symbolizer.snapshot
    texts = {(a >> 12, module) for a, kind, module in pages if kind in "tT"}
    for name in {module for _, _, module in pages} - set(NO_MODULES):
        for address, kind, module in pages:
            if module == name and kind in "tT":
                assert snapshot.frame(address).module.name == name
        end = (max(page for page, module in texts if module == name) + 1) << 12
        for behind in (end, end + 4096, end + 2 * 4096):
            owner = snapshot.frame(behind).module
            assert owner is None or owner.name != name, f"{name}+{behind - end:#x}"
    wrong = []
    for address, kind, module in pages:
        owner = snapshot.frame(address).module
        if kind not in "tT" and owner is not None:
            wrong.append((hex(address), module, owner.name))
    assert wrong == []


@pytest.mark.parametrize("sections", [{".text": 0, ".exit.text": BASE + 0x1000}, {".text": 0}])
def test_the_range_of_a_module_with_a_zero_text_address_is_derived_from_symbols(sections):
    table = parse_kallsyms([b"%016x t f\t[m]\n" % (BASE + 0x40)]).blocks["m"]
    listed = ProcModule("m", 0x4000, "Live", BASE)
    files = ModuleFiles(sections, None, "", "")
    module = make_module(listed, files, table, [BASE], make_file_id(None, "m"))
    assert module.base == BASE
    assert module.ranges == ((BASE, BASE + 0x1000, ".text"),)
    assert module.range_source is RangeSource.SYMBOLS
    hidden = make_module(listed._replace(address=0), files, None, [], make_file_id(None, "m"))
    assert hidden.ranges == ()


def test_a_module_without_symbols_ends_at_the_next_allocation():
    listed = ProcModule("m", 0x9000, "Live", BASE)
    files = ModuleFiles({".text": BASE, ".data": BASE - 0x5000}, None, "", "")
    for taken, end in ([BASE, BASE + 0x3000], 0x3000), ([BASE, BASE - 0x2000], 0x9000):
        module = make_module(listed, files, None, taken, make_file_id(None, "m"))
        assert module.ranges == ((BASE, BASE + end, ".text"),)


def test_ext4s_freed_init_text_belongs_to_the_module_that_reused_it(modules, modules_files):
    init = int(modules_files.read_bytes("/sys/module/ext4/sections/.init.text"), 16)
    (frame,) = modules.resolve_addresses([init])
    assert frame.module is None or frame.module.name != "ext4"


def test_every_module_has_a_build_id_and_a_file_id(modules):
    ext4 = modules.module("ext4")
    assert ext4.build_id == "f1ab2d8253a14b1b2b385ab80ee913c0f136ecac"
    assert ext4.file_id == make_file_id(ext4.build_id)
    assert modules.module("vmlinux").build_id == "764949bbe8b7a9241512fbf3b0d66d0ba34686a8"
    assert modules.snapshot.vmlinux_build_id == modules.module("vmlinux").build_id
    assert all(module.build_id for module in modules.snapshot.modules)
    assert len({module.file_id for module in modules.snapshot.modules}) == 127
    assert len({module.generation for module in modules.snapshot.modules}) == 127


def test_file_ids_match_the_keys_in_symbol_stores():
    assert make_file_id("f8e1cf0f60558098edaec164ac7749df") == "026a2d6a60ee6b4eb8ec85adf2e76f4d"


def test_file_ids_of_modules_without_build_ids_depend_on_name_kernel_and_srcversion():
    ids = {
        make_file_id(None, "m", "kernel1", ""),
        make_file_id(None, "m", "kernel2", ""),
        make_file_id(None, "n", "kernel1", ""),
        make_file_id(None, "m", "kernel1", "SRCVERSION"),
    }
    assert len(ids) == 4
    assert all(len(value) == 32 for value in ids)


def test_all_elf_notes_are_parsed(modules_files):
    data = modules_files.read_bytes("/sys/kernel/notes")
    notes = parse_notes(data)
    assert [note.name for note in notes].index(b"GNU") == len(notes) - 1
    assert {note.name for note in notes} == {b"Linux", b"Xen", b"GNU"}
    assert find_build_id(data) == "764949bbe8b7a9241512fbf3b0d66d0ba34686a8"
    for end in range(len(data)):
        assert find_build_id(data[:end]) is None, "a truncated note is not a build id"


def test_malformed_lines_in_proc_modules_are_counted():
    data = b"a 1 0 - Live 0x10\nb\n\nc x 0 - Live 0x20\nd 1 0 - Live 0x30 (OE)\n\xff\xff\n"
    listed, bad = parse_modules(data)
    assert [m.name for m in listed] == ["a", "d"]
    assert bad == 4


def test_module_ranges_are_derived_from_symbols_if_sysfs_is_unreadable(clones, clones_folder):
    """Without sysfs, the base is read from /proc/modules, and the size from text symbols."""
    bare = KernelSymbolizer.from_files(
        kallsyms=clones_folder / "kallsyms.xz", modules=clones_folder / "proc_modules"
    )
    for module in clones.snapshot.modules[1:]:
        other = bare.module(module.name)
        assert other.base == module.base
        assert other.range_source is RangeSource.SYMBOLS
        (part,) = other.ranges
        assert part.start == module.ranges[0].start
        assert part.end >= module.ranges[-1].start
    parts = sorted(part for module in bare.snapshot.modules for part in module.ranges)
    assert all(a.end <= b.start for a, b in pairwise(parts))
    assert any("sections" in problem for problem in bare.problems)
    assert bare.find("br_dev_xmit")[0].rva == clones.find("br_dev_xmit")[0].rva


def test_module_bases_are_derived_from_first_symbols_without_a_module_list(clones, clones_folder):
    bare = KernelSymbolizer.from_files(kallsyms=clones_folder / "kallsyms.xz")
    assert {m.name for m in bare.snapshot.modules} == {m.name for m in clones.snapshot.modules}
    for module in clones.snapshot.modules[1:]:
        assert bare.module(module.name).base == module.base
