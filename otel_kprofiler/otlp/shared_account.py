"""The account in parts of a message: the first profile of each kind in each part carries it.

A message has it on the first profile of a kind; those behind it have the same. Before a message is
divided, all get it; each part then keeps it where it is first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from otel_kprofiler.otlp.conventions import (
    EARLIER_PREFIX,
    STREAM_PREFIX,
    WAIT_THRESHOLD,
    WINDOW_PREFIX,
)

_PREFIXES: Final = (WINDOW_PREFIX, STREAM_PREFIX, EARLIER_PREFIX)


class KindKey(NamedTuple):
    """Types and units of a profile, which are those of its kind of samples."""

    sample_type: str
    sample_unit: str
    period_type: str
    period_unit: str


def kind_key(profile: Any, strings: Sequence[str]) -> KindKey:
    """The kind of the samples of a profile; empty texts for what is not there."""
    indices = (
        profile.sample_type.type_strindex,
        profile.sample_type.unit_strindex,
        profile.period_type.type_strindex,
        profile.period_type.unit_strindex,
    )
    return KindKey(*[strings[index] if strings else "" for index in indices])


def spread_accounts(message: Any) -> None:
    """Give each profile the account of the one before it that has its kind."""
    latest: dict[KindKey, list[int]] = {}
    for profile, key, account in _accounts(message):
        if account:
            latest[key] = account
        elif key in latest:
            profile.attribute_indices.extend(latest[key])


def thin_accounts(message: Any) -> None:
    """Undo :func:`spread_accounts`: remove accounts that repeat the one before."""
    latest: dict[KindKey, list[int]] = {}
    for profile, key, account in _accounts(message):
        if account and latest.get(key) == account:
            kept = [index for index in profile.attribute_indices if index not in account]
            profile.attribute_indices[:] = kept
        elif account:
            latest[key] = account


def _accounts(message: Any) -> Iterable[tuple[Any, KindKey, list[int]]]:
    """Profiles in order, with their kinds and the indices of their account's attributes."""
    dictionary = message.dictionary
    strings = dictionary.string_table
    names = [strings[one.key_strindex] if strings else "" for one in dictionary.attribute_table]
    is_account = [name.startswith(_PREFIXES) or name == WAIT_THRESHOLD for name in names]
    for resource in message.resource_profiles:
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                indices = profile.attribute_indices
                account = sorted(index for index in indices if is_account[index])
                yield profile, kind_key(profile, strings), account
