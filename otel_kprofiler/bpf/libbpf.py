"""The default loader: loads a compiled object with libbpf.so.1 through ctypes.

Uses the API of libbpf 1.0 and later, which returns NULL and sets ``errno`` on failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from typing import Any, Final, Self

from otel_kprofiler.bpf.loader import LoadedObject, ObjectSpec, check_object, without_signals
from otel_kprofiler.errors import DependencyError, SamplerError
from otel_kprofiler.forks import ProcessLock

_LIBRARY: Final = "libbpf.so.1"
# int print(enum libbpf_print_level level, const char *format, va_list arguments)
_PRINT_TYPE: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_LOG_BYTES: Final = 1 << 20
_LOADING: Final = "loading"
_VERIFIER_LOG_BYTES: Final = (1 << 24) - 1  # the maximum log size before Linux 5.11

_log = logging.getLogger(__name__)


class LibbpfLoader:
    """Loads objects with libbpf, one at a time. Thread-safe."""

    name = "libbpf"

    @staticmethod
    def is_installed() -> bool:
        """Returns whether libbpf.so.1 is installed."""
        return bool(LibbpfLoader.find_version())

    @staticmethod
    def find_version() -> str:
        """Returns the version of the library, such as ``1.1.0``; empty if it is not installed."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return ""
        library.libbpf_version_string.restype = ctypes.c_char_p  # since 0.6
        version: bytes = library.libbpf_version_string()
        return version.decode("ascii", "replace").removeprefix("v")

    def load(self, spec: ObjectSpec) -> LoadedObject:
        """Load programs; see :class:`otel_kprofiler.bpf.loader.Loader`."""
        library = _open_library()
        with _Messages(library) as messages:
            if spec.log_level:
                with contextlib.suppress(OSError, SamplerError):  # the log may exceed the buffer
                    _load(library, spec, messages).close()
            return _load(library, spec._replace(log_level=0), messages)


def _load(library: Any, spec: ObjectSpec, messages: _Messages) -> _LibbpfObject:
    loaded = _LibbpfObject(library, spec, messages)
    try:
        loaded.load()
    except BaseException:
        loaded.close()
        raise
    return loaded


class _LibbpfObject:
    """Owns a libbpf ``struct bpf_object``."""

    def __init__(self, library: Any, spec: ObjectSpec, messages: _Messages) -> None:
        self._library = library
        self._spec = spec
        self._messages = messages
        check_object(spec.object)
        self._object: int | None = self._checked(
            library.bpf_object__open_file(os.fsencode(spec.object), None), "opening"
        )
        self._program_fds: dict[str, int] = {}

    def load(self) -> None:
        """Size and fill the maps, load the programs, and collect the descriptors."""
        library, spec = self._library, self._spec
        if spec.maps_of is None:
            for name, entries in spec.map_entries.items():
                if library.bpf_map__set_max_entries(self._find_map(name), entries):
                    raise self._failure(f"setting max_entries of map {name} in", ctypes.get_errno())
        else:
            self._share_maps(spec.maps_of)
        for name, data in spec.constants.items():
            if library.bpf_map__set_initial_value(self._find_map(name), data, len(data)):
                raise self._failure(f"setting the constants {name} in", ctypes.get_errno())
        programs = {name: self._find_program(name) for name in spec.programs}
        for program in self._programs():
            library.bpf_program__set_autoload(program, program in programs.values())
        logs = [self._request_log(program) for program in programs.values() if spec.log_level]
        with without_signals():
            status = library.bpf_object__load(self._object)
        for log in logs:
            if log.value:
                _log.info("verifier log:\n%s", log.value.decode(errors="replace"))
        if status:
            raise self._failure(_LOADING, -status)
        self._program_fds = {
            name: library.bpf_program__fd(program) for name, program in programs.items()
        }

    def program_fd(self, name: str) -> int:
        return self._program_fds[name]

    def _find_map(self, name: str) -> int:
        bpf_map = self._library.bpf_object__find_map_by_name(self._object, name.encode())
        return self._checked(bpf_map, f"finding map {name} of")

    def _find_program(self, name: str) -> int:
        program = self._library.bpf_object__find_program_by_name(self._object, name.encode())
        return self._checked(program, f"finding program {name} of")

    def _programs(self) -> Iterator[int]:
        program = None
        while program := self._library.bpf_object__next_program(self._object, program):
            yield program

    def _share_maps(self, other: LoadedObject) -> None:
        library, bpf_map = self._library, None
        while bpf_map := library.bpf_object__next_map(self._object, bpf_map):
            if library.bpf_map__is_internal(bpf_map):  # contains constants
                continue
            name = library.bpf_map__name(bpf_map).decode()
            if library.bpf_map__reuse_fd(bpf_map, other.map_fd(name)):
                raise self._failure(f"sharing map {name} with", ctypes.get_errno())

    def _request_log(self, program: int) -> ctypes.Array[ctypes.c_char]:
        buffer = ctypes.create_string_buffer(_VERIFIER_LOG_BYTES)
        self._library.bpf_program__set_log_level(program, self._spec.log_level)
        self._library.bpf_program__set_log_buf(program, buffer, len(buffer))
        return buffer

    def map_fd(self, name: str) -> int:
        bpf_map = self._library.bpf_object__find_map_by_name(self._object, name.encode())
        if not bpf_map:
            raise KeyError(name)
        fd: int = self._library.bpf_map__fd(bpf_map)
        return fd

    def close(self) -> None:
        if self._object is not None:
            self._library.bpf_object__close(self._object)
            self._object = None

    def _checked(self, pointer: int | None, what: str) -> int:
        if not pointer:
            raise self._failure(what, ctypes.get_errno())
        return pointer

    def _failure(self, what: str, code: int) -> Exception:
        """Converts a failure to an exception. A verifier log means that a program was rejected."""
        log = self._messages.text()
        if code == errno.EBADF:  # libbpf ignores an EMFILE error from open(2)
            code = errno.EMFILE
        reason = f"{what} {self._spec.object.name} failed: {os.strerror(code)}"
        rejected = what != _LOADING or "BEGIN PROG LOAD LOG" in log
        if not rejected or code in {errno.EMFILE, errno.ENFILE}:
            return OSError(code, f"{reason} ({' '.join(log.split())})")
        return SamplerError(
            reason,
            log=log,
            hint="report the log: the BPF program has a bug, or does not support this kernel",
        )


class _Messages:
    """Collects libbpf's messages during a load; holds the lock for the process-wide callback."""

    _lock = ProcessLock()

    def __init__(self, library: Any) -> None:
        self._library = library
        self._parts: list[bytes] = []
        # This reference keeps the callback alive while libbpf may call it.
        self._callback = _PRINT_TYPE(self._print)

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._library.libbpf_set_print(self._callback)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.libbpf_set_print(_PRINT_TYPE())
        self._lock.release()

    def text(self) -> str:
        """Returns the messages so far: warnings and the verifier's log."""
        return b"".join(self._parts).decode(errors="replace")

    def _print(self, level: int, text: bytes, arguments: int) -> int:
        if level <= 1:  # LIBBPF_WARN and LIBBPF_INFO, but not LIBBPF_DEBUG
            buffer = ctypes.create_string_buffer(_LOG_BYTES)
            size, va_list = ctypes.c_size_t(_LOG_BYTES), ctypes.c_void_p(arguments)
            ctypes.CDLL(None).vsnprintf(buffer, size, text, va_list)
            self._parts.append(buffer.value)
        return 0


def _open_library() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError as error:
        raise DependencyError(
            f"the library {_LIBRARY} is missing ({error})",
            hint="install it: apt-get install libbpf1 (Fedora, openSUSE: libbpf)",
        ) from error
    pointer, text, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
        ("libbpf_set_print", pointer, [_PRINT_TYPE]),
        ("bpf_object__open_file", pointer, [text, pointer]),
        ("bpf_object__find_map_by_name", pointer, [pointer, text]),
        ("bpf_map__set_max_entries", integer, [pointer, ctypes.c_uint32]),
        ("bpf_map__set_initial_value", integer, [pointer, text, ctypes.c_size_t]),
        ("bpf_map__fd", integer, [pointer]),
        ("bpf_map__is_internal", ctypes.c_bool, [pointer]),
        ("bpf_map__name", text, [pointer]),
        ("bpf_map__reuse_fd", integer, [pointer, integer]),
        ("bpf_object__next_map", pointer, [pointer, pointer]),
        ("bpf_object__load", integer, [pointer]),
        ("bpf_object__find_program_by_name", pointer, [pointer, text]),
        ("bpf_object__next_program", pointer, [pointer, pointer]),
        ("bpf_program__set_autoload", integer, [pointer, ctypes.c_bool]),
        ("bpf_program__fd", integer, [pointer]),
        ("bpf_program__set_log_level", integer, [pointer, ctypes.c_uint32]),
        ("bpf_program__set_log_buf", integer, [pointer, text, ctypes.c_size_t]),
        ("bpf_object__close", None, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
