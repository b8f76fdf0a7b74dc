"""Describes the agent's state for ``/status``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from otel_kprofiler.agent.cpu_time import CpuTime
from otel_kprofiler.export import ExportQueue
from otel_kprofiler.model import Account
from otel_kprofiler.pipeline import Pipeline
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.symbols import SymbolLoader

if TYPE_CHECKING:
    from otel_kprofiler.agent.health import HealthServer, Probe


def describe_agent(
    *,
    status: str,
    account: Account,
    queues: Mapping[str, ExportQueue],
    leftovers: Mapping[str, str],
    pipeline: Pipeline[EbpfSampler] | None,
    user_names: SymbolLoader | None,
    stalls: int,
    cpu_time: CpuTime,
) -> dict[str, object]:
    """Returns the body of ``/status``. Thread-safe.

    ``leftovers`` describes spools that no exporter delivers, by the id of the exporter that wrote
    them. ``pipeline`` is None if sampling could not start, ``user_names`` if user symbols are
    disabled.
    """
    sampler = pipeline.sampler if pipeline else None
    tables = sampler.tables if sampler else None
    python = pipeline.python if pipeline else None
    outages = {name: queue.exporter.find_outage() for name, queue in queues.items()}
    errors = {name: queue.find_storage_error() for name, queue in queues.items()}
    return {
        "status": status,
        "account": account.as_dict(),
        "unreachable": {name: outage for name, outage in outages.items() if outage},
        "storage": {name: error for name, error in errors.items() if error} | dict(leftovers),
        "samples_per_second": sampler.config.samples_per_second if sampler else 0,
        "coarse_samples": dict(pipeline.budgets.coarse) if pipeline else {},
        "python_frames": python.describe() if python else None,
        "unwind_tables": tables.as_dict() if tables else None,
        "user_symbols": user_names.counts()._asdict() if user_names else None,
        "unread_contexts": pipeline.resources.count_unread() if pipeline else {},
        "stalls_of_the_loop": stalls,
        "cpu_seconds": cpu_time._asdict(),
    }


def open_health(
    endpoint: str,
    probes: dict[str, Probe],
    describe: Callable[[], dict[str, object]],
    *,
    waits: bool,
) -> HealthServer | None:
    """Serve the probes and ``/status``, unless ``endpoint`` is empty."""
    if not endpoint:
        return None
    # This import loads http.server, which uses 2 MB and is not needed by most agents.
    from otel_kprofiler.agent.health import HealthServer  # noqa: PLC0415

    return HealthServer(endpoint, probes, describe, waits=waits)
