"""Parses CPU lists such as ``0-3,8``, and lists the CPUs on this host."""

from otel_kprofiler.host.access import HostFiles

_MAX_CPU = 8191  # NR_CPUS is at most 8192 (arch/x86/Kconfig)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parses a CPU list such as ``0-3,8`` into sorted numbers. Raises ``ValueError``."""
    cpus: set[int] = set()
    for part in filter(None, text.replace(" ", "").strip().split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"should be a list of CPUs such as 0-3,8, but contains {part!r}")
        low, high = int(first), int(last or first)
        if not low <= high <= _MAX_CPU:
            raise ValueError(f"{part!r} is not a range of CPUs (0 to {_MAX_CPU})")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def read_online_cpus(files: HostFiles) -> frozenset[int]:
    """Returns the online CPUs. Raises ``OSError``."""
    return frozenset(parse_cpu_list(files.read_bytes("/sys/devices/system/cpu/online").decode()))


def read_possible_cpus(files: HostFiles) -> int:
    """Returns the highest possible CPU number in this boot, plus 1. Raises ``OSError``."""
    text = files.read_bytes("/sys/devices/system/cpu/possible").decode()
    return parse_cpu_list(text)[-1] + 1
