"""Log messages about what the agent samples, and about its final sample counts."""

import logging
from collections.abc import Iterable
from typing import Final

from otel_kprofiler.export import ProfileExporter
from otel_kprofiler.host import HostFiles, read_capabilities
from otel_kprofiler.model import Account, Losses
from otel_kprofiler.pipeline import OF_OTHERS, describe_left_out, describe_sampling
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.text import describe_count

_USUAL_MISSED_SHARE: Final = 0.05
"""Fraction of missed ticks that is normal in a virtual machine."""
_MISSED: Final = (
    "the kernel skips a tick if the CPU runs another BPF program, has interrupts off or is not "
    "scheduled by its hypervisor, or if kernel.perf_event_max_sample_rate throttles the sampler"
)


def describe_start(
    sampler: EbpfSampler, exporters: Iterable[ProfileExporter], user_symbols: str, files: HostFiles
) -> str:
    """Describes what the agent samples, where the samples go, and which data is omitted."""
    missing = read_capabilities(files).missing(OF_OTHERS)
    left_out = describe_left_out(sampler.config, user_symbols, missing)
    places = ", ".join(
        f"{exporter.name} ({exporter.destination})" if exporter.destination else exporter.name
        for exporter in exporters
    )
    cpus = describe_count(len(sampler.cpus), "CPU")
    what = describe_sampling(sampler.config)
    return f"sampling {cpus}: {what}; exporters: {places or 'none'}{left_out}"


def make_account_record(account: Account, *, as_json: bool) -> logging.LogRecord:
    """Returns the sample counts as a log record that contains each number only once.

    If ``as_json`` is true, the record's ``account`` attribute contains the counts, by kind;
    otherwise, the record's message contains the counts.
    """
    missed = [
        kind for kind, kind_account in account.kinds.items() if _is_missed_unusual(kind_account)
    ]
    message = "account of all samples"
    if as_json and missed:
        message += f"; many ticks were missed: {_MISSED}"
    elif not as_json:
        message = "; ".join(
            _describe_kind(kind, kind_account) for kind, kind_account in account.kinds.items()
        ) or "no samples"  # fmt: skip
    record = logging.LogRecord(__name__, logging.INFO, "", 0, message, None, None)
    if as_json:
        record.account = {
            kind: _plain(kind_account) for kind, kind_account in account.kinds.items()
        }
    return record


def _plain(account: Account) -> dict[str, object]:
    values = account.as_dict()
    if not _is_missed_unusual(account):
        del values["missed"]
    return values


def _is_missed_unusual(account: Account) -> bool:
    return account.missed > _USUAL_MISSED_SHARE * account.taken


def _describe_kind(kind: str, account: Account) -> str:
    parts = [describe_count(account.taken, "sample") + " taken"]
    parts += _describe_losses(account.lost)
    if account.waiting:
        parts.append(f"{account.waiting} in a window that is still open")
    for exporter in account.exporters:
        of_one = [f"{exporter.exported} exported", *_describe_losses(exporter.lost)]
        for count, what in (
            (exporter.pending, "pending"),
            (exporter.not_offered, "not offered"),
            (exporter.carried, "carried over from earlier runs"),
        ):
            of_one += [f"{count} {what}"] if count else []
        parts.append(f"{exporter.name}: {', '.join(of_one)}")
    parts += account.gaps()
    if _is_missed_unusual(account):
        parts.append(f"{account.missed} ticks missed ({_MISSED})")
    return f"{kind}: {'; '.join(parts)}"


def _describe_losses(lost: Losses) -> list[str]:
    return [f"{count} lost ({cause.value})" for cause, count in lost.items() if count]
