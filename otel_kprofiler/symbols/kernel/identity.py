"""File ids: 128 bits that name a build of the kernel, of a module or of a BPF program.

With a build id it is FNV-1a-128 of the build id's lower-case hexadecimal text: what
opentelemetry-ebpf-profiler sends as ``htlhash`` for kernel code and what symbol stores key on.

Without one, opentelemetry-ebpf-profiler sends one constant for all; here each build keeps an id
of its own, FNV-1a-128 of one of these texts (UTF-8):

- vmlinux: ``vmlinux@`` and the content of ``/proc/version``, which names the build;
- a module: ``NAME@`` and the file id of the running vmlinux, and ``@SRCVERSION`` if the module
  has one (an RVA in a module means the same only for the same build of kernel and module);
- a BPF program or trampoline: the symbol's name, which has the program's tag in it.
"""

from __future__ import annotations

from typing import Final

from otel_kprofiler.model import BuildId, FileId

_FNV_OFFSET: Final = 0x6C62272E07BB014262B821756295C58D
_FNV_PRIME: Final = 0x0000000001000000000000000000013B
_MASK: Final = (1 << 128) - 1


def fnv1a_128(data: bytes) -> int:
    """FNV-1a hash of 128 bits (draft-eastlake-fnv)."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _MASK
    return value


def make_file_id(build_id: BuildId | None, *otherwise: str) -> FileId:
    """File id of a build id, or of the other texts joined by ``@`` when there is none."""
    text = build_id or "@".join(part for part in otherwise if part)
    return FileId(f"{fnv1a_128(text.encode('utf-8', 'surrogateescape')):032x}")
