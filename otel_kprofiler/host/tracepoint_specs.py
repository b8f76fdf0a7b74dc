"""Defines the events for tracepoints: their names, settings and values.

Events are named as in ``perf list``, with or without the subsystem.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from otel_kprofiler.host.system_calls import number_calls
from otel_kprofiler.model import ProfileKind

_SYS_ENTER: Final = "sys_enter"
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MAX_PERIOD: Final = 1 << 62


class ValueSource(NamedTuple):
    """The tracepoint argument, or struct member, that contains an event's value in bytes.

    Attributes:
        type: C type of the argument: a typedef, an integer type, or the struct that a pointer
            argument points to.
        place: index of the argument among the arguments of this type.
        member: path of a 32-bit member of the struct; empty if the argument itself is the value.
        is_order: whether the argument is an allocation order, so that the value is the size of
            2^order pages.
    """

    type: str
    place: int = 0
    member: str = ""
    is_order: bool = False


_BLOCK: Final = ValueSource("request", member="__data_len")
_PACKET: Final = ValueSource("sk_buff", member="len")
_PAGES: Final = ValueSource("unsigned int", is_order=True)
VALUES: Final[Mapping[str, ValueSource]] = {
    "block_bio_queue": ValueSource("bio", member="bi_iter.bi_size"),
    "block_rq_insert": _BLOCK,
    "block_rq_issue": _BLOCK,
    "block_rq_complete": ValueSource("unsigned int"),
    "consume_skb": _PACKET,
    "kfree_skb": _PACKET,
    "net_dev_queue": _PACKET,
    "netif_receive_skb": _PACKET,
    "netif_rx": _PACKET,
    "kmalloc": ValueSource("size_t", place=1),  # the first size_t is the requested size
    "mm_page_alloc": _PAGES,
    "mm_page_free": _PAGES,
}
"""The source of each tracepoint's value (include/trace/events in Linux 5.10 to 6.18)."""


class TracepointSpec(NamedTuple):
    """A raw tracepoint to sample, once every ``period`` events on each CPU.

    If ``call`` is not None, only system calls with this number are counted.
    """

    name: str
    period: int
    tracepoint: str
    call: int | None = None

    @property
    def rate(self) -> int:
        """Returns 0, because a tracepoint has no target rate."""
        return 0

    @property
    def value(self) -> ValueSource | None:
        """Returns the location of an event's value; None if each event counts as 1."""
        return VALUES.get(self.tracepoint)

    @property
    def kind(self) -> ProfileKind:
        """Returns the kind of the event's samples."""
        return ProfileKind(self.name, self.name, "bytes" if self.value else "count")

    def __str__(self) -> str:
        return f"{self.name}:period={self.period}"


def parse_tracepoint(text: str, period: int) -> TracepointSpec | None:
    """Parses ``[SUBSYSTEM:]NAME[:period=N]``; None if the text cannot name a tracepoint.

    ``sys_enter:CALL``, or ``sys_enter_CALL`` as in perf, selects a system call by name or number.
    ``period`` is the default period; 0 means 1. Raises ``ValueError``, which lists the valid
    values, if a setting is invalid or the system call does not exist.
    """
    *parts, last = text.strip().split(":")
    setting = last if "=" in last else ""
    parts += [] if setting else [last]
    call = ""
    if len(parts) > 1 and parts[-2] == _SYS_ENTER:
        call = parts.pop()
    if not 1 <= len(parts) <= 2 or not all(map(_NAME.fullmatch, parts)):
        return None
    name = tracepoint = parts[-1]
    if name.startswith(f"{_SYS_ENTER}_"):
        call = name.removeprefix(f"{_SYS_ENTER}_")
    if call:
        name, tracepoint = f"{_SYS_ENTER}_{call}", _SYS_ENTER
    if setting:
        key, _, number = setting.partition("=")
        if key != "period" or not number.isdecimal() or not 1 <= int(number) <= MAX_PERIOD:
            raise ValueError(
                f"{text} has an invalid setting: write {name}:period=N (N events per sample)"
            )
        period = int(number)
    return TracepointSpec(name, period or 1, tracepoint, _find_call(call) if call else None)


def _find_call(name: str) -> int:
    numbers = number_calls()
    if name.isdecimal():
        return int(name)
    if name not in numbers:
        near = difflib.get_close_matches(name, numbers, 3)
        suggestion = f"did you mean {' or '.join(near)}?" if near else "a number is also possible"
        raise ValueError(f"this machine has no system call {name!r}; {suggestion}")
    return numbers[name]
