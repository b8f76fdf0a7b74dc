"""Compressed names against the plain ones."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.symbols import CapturedFiles, Symbolizer
from otel_kprofiler.symbols.kernel.packed import BLOCK_BYTES, NamesPacker

DATA = Path(__file__).parents[1] / "data" / "kernel" / "6.12-modules"
PIECES = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([b"ext4_", b"x" * 900, b"abc" * 1000])),
    max_size=40,
)


@given(PIECES, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_packed_names_are_cut_and_found_like_bytes(pieces, rng):
    plain = b"".join(pieces)
    packer = NamesPacker()
    for piece in pieces:
        packer.write(piece)
    packed = packer.getvalue()
    assert len(packed) == len(plain)
    for _ in range(20):
        start = rng.randrange(len(plain) + 1)
        span = slice(start, start + rng.choice([0, 1, 30, BLOCK_BYTES, 3 * BLOCK_BYTES]))
        assert packed[span] == plain[span]
        sought = plain[start : start + rng.randrange(1, 50)] if rng.random() < 0.8 else b"zz\0"
        at = rng.choice([0, start, start + 1, len(plain)])
        assert packed.find(sought, at) == plain.find(sought, at) or not sought


def test_a_packed_snapshot_answers_like_a_plain_one():
    files = CapturedFiles({
        "/proc/kallsyms": DATA / "kallsyms.xz",
        "/proc/modules": DATA / "proc_modules",
        "/sys/module": DATA / "sys_module.tar.xz",
    })  # fmt: skip
    plain, packed = (Symbolizer.live(files, packed=flag) for flag in (False, True))
    assert packed.snapshot.size_bytes() < plain.snapshot.size_bytes() * 0.75
    compared = 0
    for module in plain.snapshot.modules:
        table = plain.snapshot._by_name[module.name].table
        for index in range(len(table) if table else 0):
            address = table.address(index)
            before, after = plain.explain(address), packed.explain(address)
            assert (before.names, before.frame.lines) == (after.names, after.frame.lines)
            compared += 1
    assert compared > 1_500
    for name in ("vfs_read", "ext4_file_write_iter", "init_module", "no_such_symbol"):
        first, second = ([m[:3] for m in s.find(name)] for s in (plain, packed))
        assert first == second
    packed.reload(1)
    assert packed.snapshot.size_bytes() < plain.snapshot.size_bytes() * 0.75
