"""Publishes this process's Resource for profilers in other processes (OTEP 4719).

Readers locate the context's page by the name of its memory mapping. The page points to the payload;
see :mod:`otel_kprofiler.processes.published_context`. Publishing requires no privileges, and a
published context costs nothing until it changes.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Final

from otel_kprofiler import forks
from otel_kprofiler.errors import HostError, describe_error
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from otel_kprofiler.host import create_memfd
from otel_kprofiler.model import Attributes, AttributeScalar, AttributeValue
from otel_kprofiler.otlp import ProcessContext, encode_process_context
from otel_kprofiler.processes import CONTEXT_HEADER, CONTEXT_SIGNATURE, CONTEXT_VERSION, TARGET

_NAME: Final = "OTEL_CTX"
_MFD_CLOEXEC: Final = 1  # include/uapi/linux/memfd.h
_MFD_ALLOW_SEALING: Final = 2
_MFD_NOEXEC_SEAL: Final = 8
_PR_SET_VMA: Final = 0x53564D41  # include/uapi/linux/prctl.h
_PR_SET_VMA_ANON_NAME: Final = 0
_PUBLISHED_AT: Final = 2  # index in 64-bit words
_INSTANCE_ID: Final = "service.instance.id"

_log = logging.getLogger(__name__)


class _Mapping:
    """The mapping that contains the header; one per process, and absent in forked children."""

    def __init__(self) -> None:
        self._memory, named = _map()
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._words = memoryview(self._memory).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._payloads: list[ctypes.Array[ctypes.c_char]] = []
        # Never unmap the memory: in a forked child, a different mapping may occupy its address.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self._named = named
        self._fence = threading.Lock()

    def publish(self, payload: bytes) -> None:
        """Write or update the header (its time field last), then name the mapping."""
        words = self._words
        last = words[_PUBLISHED_AT]
        kept = ctypes.create_string_buffer(payload, len(payload))
        # A reader may still be copying the previous payload.
        self._payloads = [*self._payloads[-1:], kept]
        words[_PUBLISHED_AT] = 0
        self._order()
        header = CONTEXT_HEADER.pack(
            CONTEXT_SIGNATURE, CONTEXT_VERSION, len(payload), 0, ctypes.addressof(kept)
        )
        self._memory[: len(header)] = header
        self._order()
        # Assignment to an item of a cast memoryview writes a whole machine word at once.
        words[_PUBLISHED_AT] = max(time.clock_gettime_ns(time.CLOCK_BOOTTIME), last + 1)
        named = _name_mapping(self._address)
        if not (named or self._named):
            words[_PUBLISHED_AT] = 0
            raise HostError(
                "the process context cannot be published: the kernel permits neither a memfd nor "
                "a name for anonymous memory",
                hint="allow memfd_create in the seccomp profile of the container",
            )

    def withdraw(self) -> None:
        """Mark the context as unpublished. The page remains mapped until the process exits."""
        self._words[_PUBLISHED_AT] = 0

    def _order(self) -> None:
        """Issue a full memory barrier, which only a lock provides in Python."""
        with self._fence:
            pass


def _map() -> tuple[mmap.mmap, bool]:
    """Returns a mapped page, and whether the mapping has the name that readers search for."""
    for extra in (_MFD_NOEXEC_SEAL, 0):  # kernels before 6.3 reject the flag
        try:
            fd = create_memfd(_NAME, _MFD_CLOEXEC | _MFD_ALLOW_SEALING | extra)
        except OSError:
            continue
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            return mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE), True
        finally:
            os.close(fd)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, mmap.PAGESIZE, flags=flags), False


def _name_mapping(address: int) -> bool:
    """Return False if the kernel cannot name mappings (CONFIG_ANON_VMA_NAME, Linux 5.17)."""
    libc = ctypes.CDLL(None)
    word = ctypes.c_ulong
    status: int = libc.prctl(
        _PR_SET_VMA, word(_PR_SET_VMA_ANON_NAME), word(address), word(mmap.PAGESIZE),
        ctypes.c_char_p(_NAME.encode()),
    )  # fmt: skip
    return status == 0


class _Publisher(ForkAware):
    def __init__(self) -> None:
        self.lock = ProcessLock()
        self.mapping: _Mapping | None = None
        self.context: ProcessContext | None = None
        self.in_children: Callable[[], Attributes] | None = None
        self.thread_keys: Attributes = {}

    def publish(
        self, context: ProcessContext, in_children: Callable[[], Attributes] | None
    ) -> None:
        with self.lock:
            if self.mapping is None:
                self.mapping = _Mapping()
                forks.register(ForkStep.RESTART, self)
            extra = {**context.extra, **_publishable(self.thread_keys)}
            self.mapping.publish(encode_process_context(ProcessContext(context.resource, extra)))
            self.context, self.in_children = context, in_children

    def withdraw(self) -> None:
        with self.lock:
            self.context = None
            if self.mapping is not None:
                self.mapping.withdraw()

    def after_fork_in_child(self) -> None:
        """Publish again in a new page, because the parent's page is not mapped in the child."""
        self.mapping = None
        if self.context is None:
            return
        resource, extra = dict(self.context.resource), self.context.extra
        if self.in_children:
            resource, extra = dict(self.in_children()), {}
        elif _INSTANCE_ID in resource:
            resource[_INSTANCE_ID] = str(uuid.uuid4())
        try:
            publish_process_context(resource, extra, in_children=self.in_children)
        except HostError as error:
            _log.warning("%s", error.with_fix())


_publisher = _Publisher()


def publish_process_context(
    resource: Attributes,
    extra: Attributes | None = None,
    *,
    in_children: Callable[[], Attributes] | None = None,
) -> None:
    """Publish or replace the Resource of this process. Thread-safe.

    Forked children do not inherit the published memory, so they publish again. A child forked by C
    code republishes its Resource at its next call into this package.

    Args:
        resource: the Resource's attributes, such as ``tracer_provider.resource.attributes``. Values
            of unsupported types are skipped.
        extra: attributes that are not part of the Resource.
        in_children: returns the Resource to publish in a forked child, without ``extra``. By
            default, a child publishes the same attributes, with a new ``service.instance.id`` if
            the parent has this attribute.

    Raises:
        HostError: the kernel refuses to create the mapping, or to assign the name that readers
            search for.
    """
    forks.catch_up()
    context = ProcessContext(_publishable(resource), _publishable(extra or {}))
    try:
        _publisher.publish(context, in_children)
    except OSError as error:
        raise HostError(
            f"the process context cannot be published: {describe_error(error)}"
        ) from error


def publish_profiled(resource: Callable[[], Attributes], target: str) -> None:
    """Publish the profiles' Resource and the sampling target, and log any failure.

    ``resource`` is also called in forked children. ``target`` is empty if sampling is off.
    """
    try:
        publish_process_context(
            resource(), {TARGET: target} if target else None, in_children=resource
        )
    except HostError as error:
        _log.warning("%s", error.with_fix())


def publish_thread_keys(keys: Attributes | None, resource: Attributes | None = None) -> None:
    """Announce thread contexts in the current and later process contexts. Thread-safe.

    If ``keys`` is None, an earlier announcement is withdrawn. If no process context exists, one
    with the ``resource`` attributes is published, unless ``resource`` is None. Raises ``HostError``
    if publishing fails.
    """
    forks.catch_up()
    with _publisher.lock:
        _publisher.thread_keys = keys or {}
        context, in_children = _publisher.context, _publisher.in_children
        if context is not None:
            publish_process_context(context.resource, context.extra, in_children=in_children)
        elif resource is not None:
            publish_process_context(resource)


def withdraw_process_context() -> None:
    """Stop publishing, in this process and in later children."""
    forks.catch_up()
    _publisher.withdraw()


_LISTS: Final[tuple[set[type], ...]] = ({str}, {bool}, {int}, {float}, set())  # allowed item types


def _publishable(attributes: Attributes) -> dict[str, AttributeValue]:
    kept: dict[str, AttributeValue] = {}
    for key, value in attributes.items():
        if isinstance(value, AttributeScalar):
            kept[key] = value
        elif {type(item) for item in value} in _LISTS:
            kept[key] = tuple(value)
    return kept
