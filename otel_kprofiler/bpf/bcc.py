"""The alternative loader: compiles the source with bcc (Debian's and Ubuntu's python3-bpfcc).

bcc runs in a child process with the distribution's Python. In this process, bcc would occupy more
than 60 MB permanently, write compiler messages to our standard error, and require its package in
our Python environment. The child runs without environment variables, and includes only headers from
``stubs`` and from the source's directory.
"""

import contextlib
import ctypes
import errno
import logging
import os
import resource
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from otel_kprofiler.bpf import bcc_compile
from otel_kprofiler.bpf.call import bpf_call
from otel_kprofiler.bpf.layout import MAPS
from otel_kprofiler.bpf.loader import LoadedObject, ObjectSpec, without_signals
from otel_kprofiler.bpf.map_calls import MapShape, create_map
from otel_kprofiler.errors import DependencyError, SamplerError, describe_status

_PYTHON: Final = "/usr/bin/python3"
_PACKAGE: Final = "/usr/lib/python3/dist-packages/bcc"
_STUBS: Final = Path(__file__).with_name("stubs")
# bcc's helper declarations lack const and use structs whose headers are not included.
_FLAGS: Final = ("-DKPROFILER_BCC", "-Wno-incompatible-pointer-types")
_COMPILE_TIMEOUT_S: Final = 120
_TYPES: Final = {"kprofiler_sample": 7}  # enum bpf_prog_type; programs of other types need libbpf

_PROG_LOAD: Final = 5
_NAME_BYTES: Final = 15
_INSTRUCTION_BYTES: Final = 8
_LOG_BYTES: Final = (1 << 24) - 1  # the maximum log size before Linux 5.11
_LICENSE: Final = b"Dual BSD/GPL"

_log = logging.getLogger(__name__)


class BccLoader:
    """Compiles programs with bcc and loads them. Thread-safe.

    Loading takes half a second and uses 125 MB of memory in a child process.
    """

    name = "bcc"

    @staticmethod
    def is_installed() -> bool:
        """Returns whether python3-bpfcc is installed. The ``bcc`` package on PyPI is unrelated."""
        return os.path.exists(f"{_PACKAGE}/__init__.py") and os.path.exists(_PYTHON)

    def load(self, spec: ObjectSpec) -> LoadedObject:
        """Load programs; see :class:`otel_kprofiler.bpf.loader.Loader`."""
        for name in spec.programs:
            if name not in _TYPES:
                raise DependencyError(
                    f"{name} in {spec.source.name} cannot be loaded with bcc",
                    hint="install libbpf1",
                )
        if not self.is_installed():
            raise _missing(f"there is no {_PACKAGE}")
        with contextlib.ExitStack() as undo:
            maps = {}
            for name, shape in MAPS.items():
                maps[name] = _create_map(name, shape, spec.map_entries.get(name, 1))
                undo.callback(os.close, maps[name])
            programs = {}
            for name, code in compile_programs(spec, maps).items():
                programs[name] = _load_program(spec, name, code)
                undo.callback(os.close, programs[name])
            undo.pop_all()
        return _BccObject(programs, maps)


class _BccObject:
    def __init__(self, programs: dict[str, int], maps: dict[str, int]) -> None:
        self._programs = programs
        self._maps = maps

    def program_fd(self, name: str) -> int:
        return self._programs[name]

    def map_fd(self, name: str) -> int:
        return self._maps[name]

    def close(self) -> None:
        for fd in (*self._programs.values(), *self._maps.values()):
            os.close(fd)
        self._programs, self._maps = {}, {}


def _missing(why: str) -> DependencyError:
    return DependencyError(
        f"bcc cannot be used: {why}",
        hint="install it: apt-get install python3-bpfcc (the bcc package on PyPI is "
        "unrelated), or use the libbpf loader",
    )


def compile_programs(spec: ObjectSpec, maps: Mapping[str, int]) -> dict[str, bytes]:
    """Compile a source file in a child process, and return the programs' instructions by name."""
    descriptors = (f"-DKPROFILER_FD_{name}={fd}" for name, fd in maps.items())
    flags = [*_FLAGS, f"-I{spec.source.parent}", *descriptors]
    try:
        done = subprocess.run(  # -I and -S: no imports from site directories
            [_PYTHON, "-ISB", bcc_compile.__file__, _PACKAGE, ",".join(spec.programs), *flags],
            input=spec.source.read_bytes(),
            capture_output=True,
            env={"BCC_KERNEL_SOURCE": str(_STUBS)},
            cwd="/",
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
    except (
        OSError,
        subprocess.TimeoutExpired,
    ) as error:  # not started, or killed after the timeout
        raise SamplerError(f"compiling {spec.source.name} with bcc failed: {error}") from error
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == bcc_compile.NO_BCC:
        raise _missing(said)
    if done.returncode or not done.stdout:
        raise SamplerError(
            f"compiling {spec.source.name} with bcc failed ({describe_status(done.returncode)})",
            log=said,
            hint="report the log and the version of python3-bpfcc, or use the libbpf loader",
        )
    if said:
        _log.debug("bcc's compiler:\n%s", said)
    codes = map(bytes.fromhex, done.stdout.decode().split())
    return dict(zip(spec.programs, codes, strict=True))


def _create_map(name: str, shape: MapShape, entries: int) -> int:
    try:
        return create_map(name, shape, entries)
    except PermissionError:  # kernels before 5.11 count maps as locked memory
        _raise_memory_lock()
        return create_map(name, shape, entries)


def _raise_memory_lock() -> None:
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    for limit in (resource.RLIM_INFINITY, most):
        with contextlib.suppress(ValueError, OSError):  # without CAP_SYS_RESOURCE
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            return


class _ProgramAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_PROG_LOAD."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("instructions", ctypes.c_uint32),
        ("code", ctypes.c_char_p),
        ("license", ctypes.c_char_p),
        ("log_level", ctypes.c_uint32),
        ("log_bytes", ctypes.c_uint32),
        ("log", ctypes.c_void_p),
        ("kernel_version", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("name", ctypes.c_char * (_NAME_BYTES + 1)),
    )


def _load_program(spec: ObjectSpec, name: str, code: bytes) -> int:
    if spec.log_level:
        _log.info("verifier log:\n%s", _verify(name, code, spec.log_level))
    try:
        return _call_load(name, code)
    except OSError as error:
        unread = error.errno in {errno.EPERM, errno.EMFILE, errno.ENFILE}
        log = "" if unread else _verify(name, code, 1)
        if not log:
            raise
        raise SamplerError(
            f"loading {spec.source.name} failed: {os.strerror(error.errno or 0)}",
            log=log,
            hint="report the log: the BPF program has a bug, or does not support this kernel",
        ) from error


def _verify(name: str, code: bytes, log_level: int) -> str:
    """Returns the verifier's log for a program, truncated to the size of the buffer."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    with contextlib.suppress(OSError):  # the log, if any, states why loading failed
        os.close(_call_load(name, code, log_level, len(log), ctypes.addressof(log)))
    return log.value.decode(errors="replace")


def _call_load(name: str, code: bytes, *log: int) -> int:
    attributes = _ProgramAttributes(
        _TYPES[name], len(code) // _INSTRUCTION_BYTES, code, _LICENSE, *(log or (0, 0, 0)),
        0, 0, name.encode()[:_NAME_BYTES],
    )  # fmt: skip
    with without_signals():
        return bpf_call(_PROG_LOAD, attributes)
