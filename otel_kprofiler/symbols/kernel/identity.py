"""Computes file ids: 128-bit hashes that identify a build of the kernel, a module or a BPF program.

For code with a build id, the file id is the FNV-1a-128 hash of the build id's lower-case
hexadecimal text. opentelemetry-ebpf-profiler sends this hash as kernel code's ``htlhash``, and
symbol stores use it as a key. For code without a build id, the file id is the hash of a UTF-8
string:

- vmlinux: ``vmlinux@`` and the content of ``/proc/version``, which identifies the build;
- a module: ``NAME@``, the file id of the running vmlinux, and ``@SRCVERSION`` if the module has one
  (RVAs are comparable only between identical builds of the kernel and the module);
- a BPF program or trampoline: the symbol name (a program's symbol name includes its tag).
"""

from typing import Final

from otel_kprofiler.model import BuildId, FileId

_FNV_OFFSET: Final = 0x6C62272E07BB014262B821756295C58D
_FNV_PRIME: Final = 0x0000000001000000000000000000013B
_MASK: Final = (1 << 128) - 1


def make_file_id(build_id: BuildId | None, *otherwise: str) -> FileId:
    """Hashes the build id or, if None, the non-empty ``otherwise`` strings joined with ``@``."""
    text = build_id or "@".join(part for part in otherwise if part)
    # 128-bit FNV-1a (draft-eastlake-fnv)
    value = _FNV_OFFSET
    for byte in text.encode("utf-8", "surrogateescape"):
        value = (value ^ byte) * _FNV_PRIME & _MASK
    return FileId(f"{value:032x}")
