"""Fills the BPF maps that select which processes are sampled (targets.bpf.h)."""

from collections.abc import Callable
from typing import Final

from otel_kprofiler.bpf import COMM_BYTES, delete_from_map, update_map
from otel_kprofiler.errors import KernelFeatureError
from otel_kprofiler.host import HostFiles, read_release
from otel_kprofiler.sampling.loading import require_libbpf
from otel_kprofiler.sampling.sampler import SamplerConfig

INITIAL_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
SLOTS: Final = 1024
"""Minimum number of entries in each target map, so that targets can be added and replaced later."""
_CGROUPS_SINCE: Final = (5, 15)  # bpf_get_current_ancestor_cgroup_id for tracing programs
_PRESENT: Final = b"\1"


class TargetMaps:
    """Fills the BPF maps that select the sampled processes; not thread-safe."""

    def __init__(self, map_fd: Callable[[str], int]) -> None:
        self._map_fd = map_fd
        self._present: frozenset[tuple[str, bytes]] = frozenset()

    def change(self, config: SamplerConfig, between: Callable[[], None] = lambda: None) -> None:
        """Replace the targets in the maps with those from a configuration. Raises ``OSError``.

        ``between`` is called while both new and old targets are in the maps.
        """
        pids = [pid.to_bytes(4, "little") for pid in config.target_pids]
        keys = {("targets", pid) for pid in pids}
        namespace = config.target_namespace
        if config.target_descendants and (namespace is None or namespace[1] == INITIAL_NAMESPACE):
            keys |= {("roots", pid) for pid in pids}
        keys |= {
            ("comms", comm[: COMM_BYTES - 1].ljust(COMM_BYTES, b"\0"))
            for comm in config.target_comms
        }
        keys |= {("cgroups", inode.to_bytes(8, "little")) for _, inode in config.target_cgroups}
        wanted = frozenset(keys)
        for name, key in wanted - self._present:
            update_map(self._map_fd(name), key, _PRESENT)
        between()
        for name, key in self._present - wanted:
            delete_from_map(self._map_fd(name), key)
        self._present = wanted


def target_map_entries(config: SamplerConfig) -> dict[str, int]:
    """Returns the number of entries in each target map, by map name."""
    pids = max(SLOTS, 2 * len(config.target_pids))
    return {
        "targets": pids,
        "roots": pids,
        "comms": max(SLOTS, len(config.target_comms)),
        "cgroups": max(SLOTS, len(config.target_cgroups)),
    }


def check_cgroups(files: HostFiles, loader: str) -> None:
    """Raise ``HostError`` if the loader or the kernel does not support filters by cgroup."""
    require_libbpf(loader, f"the loader {loader} cannot filter by cgroup")
    release = read_release(files)
    if release[:2] < _CGROUPS_SINCE:
        raise KernelFeatureError(
            f"kernel {release.text} cannot filter by cgroup",
            hint="use Linux 5.15 or later, or filter by process or name",
        )
