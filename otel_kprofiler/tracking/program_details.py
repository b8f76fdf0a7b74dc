"""Reads a BPF program's type, load time, attachment and source lines.

Formats: include/uapi/linux/bpf.h (``struct bpf_link_info``, ``enum bpf_prog_type``).
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.bpf import bpf_call
from otel_kprofiler.model import BpfProgram, Ksymbol, KsymbolDetails
from otel_kprofiler.tracking.ksymbol_records import PROGRAM_PREFIX
from otel_kprofiler.tracking.programs import find_facts, iterate_ids, read_info, read_source_lines

_LINK_GET_FD_BY_ID: Final = 30
_LINK_GET_NEXT_ID: Final = 31
_RAW_TRACEPOINT: Final = 1  # enum bpf_link_type
_PERF_EVENT: Final = 7
_PROBES: Final = (3, 4, 5)  # enum bpf_perf_event_type: kprobe, kretprobe, tracepoint
_LINK_INFO: Final = struct.Struct("=IIII4Q")  # type, id, program, padding; then fields by type
_NAME_BYTES: Final = 256
_TAG_DIGITS: Final = 16

_TYPES: Final = (
    "unspecified", "socket_filter", "kprobe", "sched_cls", "sched_act", "tracepoint", "xdp",
    "perf_event", "cgroup_skb", "cgroup_sock", "lwt_in", "lwt_out", "lwt_xmit", "sock_ops",
    "sk_skb", "cgroup_device", "sk_msg", "raw_tracepoint", "cgroup_sock_addr", "lwt_seg6local",
    "lirc_mode2", "sk_reuseport", "flow_dissector", "cgroup_sysctl", "raw_tracepoint_writable",
    "cgroup_sockopt", "tracing", "struct_ops", "ext", "lsm", "sk_lookup", "syscall", "netfilter",
)  # fmt: skip


def describe(symbol: Ksymbol) -> KsymbolDetails | None:
    """Returns details about a function in a BPF program; None for other symbols. Thread-safe.

    The type, the attachment and the source lines require CAP_SYS_ADMIN, and are available only
    while the program is loaded.
    """
    if not symbol.name.startswith(PROGRAM_PREFIX):
        return None
    number = symbol.program_id
    tag = symbol.name[len(PROGRAM_PREFIX) :][:_TAG_DIGITS]
    program = BpfProgram(number, "", tag, symbol.since_ns)
    if not number:
        return KsymbolDetails(program)
    try:
        facts = find_facts(number)
        if facts is None or symbol.start not in facts.starts:
            return KsymbolDetails(program)
        kind = _TYPES[facts.type] if facts.type < len(_TYPES) else str(facts.type)
        program = BpfProgram(number, kind, facts.tag, facts.load_time_ns, _find_place(number))
        return KsymbolDetails(program, read_source_lines(number, symbol.start, symbol.length))
    except OSError:  # not permitted, or the program has been unloaded
        return KsymbolDetails(program)


def _find_place(program: int) -> str:
    """Returns the tracepoint or function to which a program is attached; empty if unknown."""
    for info in _links():
        kind, _, owner, _, *words = _LINK_INFO.unpack(info[: _LINK_INFO.size])
        if owner != program:
            continue
        if kind == _RAW_TRACEPOINT or (kind == _PERF_EVENT and words[0] & 0xFFFFFFFF in _PROBES):
            return info[_LINK_INFO.size :].partition(b"\0")[0].decode("utf-8", "backslashreplace")
    return ""


def _links() -> Iterator[bytes]:
    """Yields each link's ``struct bpf_link_info``, followed by the name of the link's target."""
    for number in iterate_ids(_LINK_GET_NEXT_ID):
        try:
            fd = bpf_call(_LINK_GET_FD_BY_ID, (ctypes.c_uint32 * 3)(number))
        except FileNotFoundError:
            continue
        try:
            info = (ctypes.c_uint64 * (_LINK_INFO.size // 8))()
            read_info(fd, info)
            name = ctypes.create_string_buffer(_NAME_BYTES)
            at = {_RAW_TRACEPOINT: 2, _PERF_EVENT: 3}.get(info[0] & 0xFFFFFFFF)
            if at is not None:
                info[at], info[at + 1] = ctypes.addressof(name), _NAME_BYTES
                read_info(fd, info)
            yield bytes(info) + name.raw
        finally:
            os.close(fd)
