"""Loads BPF programs, and reports which features the host or the loader lacks."""

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from otel_kprofiler.bpf import VMLINUX_BTF, KernelTypes, LoadedObject, Loader, ObjectSpec
from otel_kprofiler.errors import HostError, KernelFeatureError, ShortageError
from otel_kprofiler.host import HostFiles, find_open_files_error, get_privilege_error

_T = TypeVar("_T")


def load_spec(spec: ObjectSpec, files: HostFiles, loader: Loader) -> LoadedObject:
    """Load programs. Raises ``HostError`` or ``SamplerError`` if the kernel does not load them."""
    try:
        return loader.load(spec)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise get_privilege_error("loading the BPF program", files) from error
        if error.errno == errno.ENOMEM:
            raise ShortageError(
                f"the kernel cannot allocate a ring buffer of {spec.map_entries['ring']} bytes",
                hint="lower samples_per_second or map_scale_factor, or raise the memory limit",
            ) from error
        raise find_open_files_error("loading the BPF program", error) or KernelFeatureError(
            f"the kernel cannot load BPF programs: {error}",
            hint="use a kernel built with CONFIG_BPF_SYSCALL and CONFIG_BPF_EVENTS",
        ) from error


def require_libbpf(loader: str, message: str) -> None:
    """Raise ``HostError`` with the message if ``loader`` is not libbpf."""
    if loader != "libbpf":
        raise HostError(message, hint="apt-get install libbpf1, and use the loader libbpf")


def find_offsets(
    find: Callable[[KernelTypes], _T | None], read_types: Callable[[], KernelTypes]
) -> _T | None:
    """Returns the result of ``find`` for the kernel's BTF types; None if the kernel lacks BTF."""
    try:
        return find(read_types())
    except (OSError, ValueError):
        return None


def get_offsets(
    find: Callable[[KernelTypes], _T | None],
    read_types: Callable[[], KernelTypes],
    message: str,
    alternative: str,
) -> _T:
    """Returns the result of ``find`` for the kernel's types.

    Raises ``KernelFeatureError`` with ``message`` if the kernel lacks BTF. The error's hint
    suggests another kernel, or the ``alternative``.
    """
    offsets = find_offsets(find, read_types)
    if offsets is None:
        raise KernelFeatureError(
            message,
            hint=f"use a kernel built with CONFIG_DEBUG_INFO_BTF, or {alternative}",
        )
    return offsets


def has_btf(files: HostFiles) -> bool:
    """Returns whether the kernel has BTF that this process can read."""
    try:
        os.close(files.open_fd(VMLINUX_BTF))
    except OSError:
        return False
    return True
