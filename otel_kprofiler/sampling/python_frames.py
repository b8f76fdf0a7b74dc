"""Checks whether this host supports Python frames, and opens the BPF maps for Python frames."""

import logging
from collections.abc import Callable
from typing import Final

from otel_kprofiler.bpf import (
    KernelTypes,
    LoadedObject,
    PythonMaps,
    PythonOffsets,
    find_python_offsets,
)
from otel_kprofiler.model import KnownCodes
from otel_kprofiler.sampling.loading import find_offsets
from otel_kprofiler.sampling.sampler import SamplerConfig

PYTHON_SUFFIX: Final = "_python"
"""Name suffix of the programs that also read Python frames."""
_RING_BYTES: Final = 256 * 1024

_log = logging.getLogger(__name__)


def plan_python(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> tuple[PythonOffsets | None, str | None]:
    """Returns the kernel offsets that the program requires, or why it cannot read Python frames."""
    if not config.python_frames:
        return None, None
    if loader != "libbpf":
        return None, f"the loader {loader} cannot load the program"
    offsets = find_offsets(find_python_offsets, read_types)
    return offsets, None if offsets else "the kernel has no BTF, or an unsupported struct layout"


def describe_problem(
    planned: PythonOffsets | None, loaded: PythonOffsets | None, problem: str | None
) -> str | None:
    """Returns and logs why configured Python frames are missing; None if there is no problem."""
    if planned and not loaded:
        problem = "this kernel does not accept the program"
    if problem:
        _log.warning("stacks will have no Python frames: %s", problem)
    return problem


def open_python(
    offsets: PythonOffsets,
    config: SamplerConfig,
    program: LoadedObject,
    cpus: int,
    codes: KnownCodes,
) -> PythonMaps:
    """Open the maps for Python frames. No frames are read until :meth:`PythonMaps.limit` is called.

    Raises ``OSError``.
    """
    return PythonMaps(program.map_fd, offsets, cpus, python_ring_bytes(config), codes)


def python_ring_bytes(config: SamplerConfig) -> int:
    """Returns the size of the code description ring (about 350 descriptions by default)."""
    return min(_RING_BYTES << config.map_scale_factor, config.max_ring_bytes)
