"""Repeats the sample and loss counts of each sample kind in every part of a split message.

In a message, only the first profile of a kind carries these counts (the kind's account), which also
apply to the following profiles. Before a message is split, the account is copied to all profiles of
that kind. Each resulting message keeps only the first copy of each kind's counts.
"""

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
    """The types and units of a profile, which identify its sample kind."""

    sample_type: str
    sample_unit: str
    period_type: str
    period_unit: str


def kind_key(profile: Any, strings: Sequence[str]) -> KindKey:
    """Returns a key that identifies a profile's kind. Absent fields yield empty strings."""
    indices = (
        profile.sample_type.type_strindex,
        profile.sample_type.unit_strindex,
        profile.period_type.type_strindex,
        profile.period_type.unit_strindex,
    )
    return KindKey(*[strings[index] if strings else "" for index in indices])


def spread_accounts(message: Any) -> None:
    """Copy each kind's last sample counts to later profiles without counts."""
    latest: dict[KindKey, list[int]] = {}
    for profile, key, account in _accounts(message):
        if account:
            latest[key] = account
        elif key in latest:
            profile.attribute_indices.extend(latest[key])


def thin_accounts(message: Any) -> None:
    """Undo :func:`spread_accounts`: remove counts that repeat the previous counts of their kind."""
    latest: dict[KindKey, list[int]] = {}
    for profile, key, account in _accounts(message):
        if account and latest.get(key) == account:
            kept = [index for index in profile.attribute_indices if index not in account]
            profile.attribute_indices[:] = kept
        elif account:
            latest[key] = account


def _accounts(message: Any) -> Iterable[tuple[Any, KindKey, list[int]]]:
    """Yields each profile, in order, with its kind and the indices of its count attributes."""
    dictionary = message.dictionary
    strings = dictionary.string_table
    names = [
        strings[attribute.key_strindex] if strings else ""
        for attribute in dictionary.attribute_table
    ]
    is_account = [name.startswith(_PREFIXES) or name == WAIT_THRESHOLD for name in names]
    for resource in message.resource_profiles:
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                indices = profile.attribute_indices
                account = sorted(index for index in indices if is_account[index])
                yield profile, kind_key(profile, strings), account
