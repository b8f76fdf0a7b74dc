"""Adapts the settings of an embedded profiler to the process that it runs in."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from opentelemetry.sdk.resources import Resource

from otel_kprofiler import model
from otel_kprofiler.bpf import SpanPath
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import LOCK_EVENT, Access, LockSpec
from otel_kprofiler.model import MAX_LABELS, AttributeValue
from otel_kprofiler.otlp import SCHEMA_URL
from otel_kprofiler.pipeline import WindowSchedule
from otel_kprofiler.processes import ProcessContexts, ProcessResources, read_host_attributes
from otel_kprofiler.sampling import INITIAL_NAMESPACE, SamplerConfig
from otel_kprofiler.sdk.label_sets import check_name
from otel_kprofiler.sdk.object_layout import find_span_layout
from otel_kprofiler.sdk.resource import plain_attributes
from otel_kprofiler.sdk.span_path import UnprovenError, find_span_path
from otel_kprofiler.symbols import UserSymbolSettings

Target = Literal["self", "children", "host"]

_LONGEST_DRAIN_S: Final = 1.0
_SAMPLES_PER_DRAIN: Final = 100
_SHORTEST_DRAIN_S: Final = 0.02
_MAX_PRELOAD_S: Final = 1.0
"""Time limit, in seconds, for preloading unwind tables; short, because the service is waiting."""
_OF_ONE_PROCESS: Final = ("process.", "service.instance.id", "thread.")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The embedded profiler's settings; see :class:`KernelProfiler` for those not listed here.

    Attributes:
        sampler: the sampler's settings, such as the rate and the captured stacks. The target and
            the drain interval are set when sampling starts.
        user_symbols: how to name the functions and lines of user frames.
        loader: the library that loads the BPF program.
        service_sources: name sources for other processes that do not publish a service name.
    """

    target: Target = "self"
    sampler: SamplerConfig
    schedule: WindowSchedule
    user_symbols: UserSymbolSettings = field(
        default_factory=lambda: UserSymbolSettings(detail="names")
    )
    loader: str = "auto"
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    service_sources: tuple[str, ...] = ("container", "unit", "executable")
    span_links: bool = True
    link_unsampled_spans: bool = False
    local_root_names: bool = True
    baggage_keys: tuple[str, ...] = ()
    publish_context: bool = True
    publish_thread_contexts: bool = True
    restart_in_children: bool = True
    export_on_sigterm: bool = False

    def __post_init__(self) -> None:
        if (count := len(self.baggage_keys)) > MAX_LABELS:
            raise ValueError(f"too many baggage_keys: {count} (at most {MAX_LABELS})")
        for key in self.baggage_keys:
            check_name(key)


def complete_sampler_config(plan: Plan) -> SamplerConfig:
    """Returns the sampler's settings, including the target, drain interval and span layout.

    Unless the target is the host, pids in the settings and in samples are those of this process's
    pid namespace. Raises ``HostError`` if the target is the host but this process is in a pid
    namespace, or if the process would sample its own lock waits.
    """
    config = plan.sampler
    if plan.target == "self" and any(isinstance(event, LockSpec) for event in config.events):
        raise HostError(
            f"a service cannot sample {LOCK_EVENT} in its own process",
            hint="use the agent or `otel-kprofiler record -p PID`; an embedded profiler leaves out "
            "its own process, which may be waiting for locks of the profiler's buffers",
        )
    # Python mostly uses one CPU. If it uses more, the ring fills up sooner and wakes the drain
    # thread.
    cpus = 1 if plan.target == "self" else len(config.pin_cpu_ids) or os.cpu_count() or 1
    interval_s = _SAMPLES_PER_DRAIN / (config.samples_per_second * cpus)
    config = replace(
        config,
        drain_interval_s=min(max(interval_s, _SHORTEST_DRAIN_S), _LONGEST_DRAIN_S),
        span_layout=(
            find_span_layout(unsampled=plan.link_unsampled_spans) if plan.span_links else None
        ),
        span_path=_find_span_path() if plan.span_links else None,
        max_preload_s=_MAX_PRELOAD_S,
        off_cpu=config.off_cpu and replace(config.off_cpu, leaves_out="threads"),
    )
    namespace = os.stat("/proc/self/ns/pid")
    if plan.target == "host":
        if namespace.st_ino != INITIAL_NAMESPACE:
            raise HostError(
                "the host cannot be profiled from inside a pid namespace",
                hint="run the container in the host's pid namespace (--pid=host, hostPID: true), "
                "or set the target to self or children",
            )
        return config
    return replace(
        config,
        target_pids=(os.getpid(),),
        target_namespace=(namespace.st_dev, namespace.st_ino),
        target_descendants=plan.target == "children",
    )


def _find_span_path() -> SpanPath | None:
    try:
        return find_span_path()
    except UnprovenError as error:
        _log.info("spans are read from thread contexts, not from the interpreter: %s", error)
        return None


def make_resources(plan: Plan, access: Access, clock: Clock) -> ProcessResources:
    """Returns the Resources of profiled processes, which :func:`set_service` later completes."""
    contexts = None if plan.target == "self" else ProcessContexts(access)
    return ProcessResources(
        access,
        clock,
        {},
        contexts=contexts,
        reads_threads=plan.span_links,
        links_unsampled=plan.link_unsampled_spans,
    )


def set_service(resources: ProcessResources, plan: Plan, service: Resource, access: Access) -> None:
    """Set this process's Resource, and add the service's attributes to all Resources."""
    attributes = {**plain_attributes(service.attributes), **plan.attributes}
    if plan.target == "host":
        base = {**read_host_attributes(access), **plan.attributes}
    else:
        base = {
            key: value for key, value in attributes.items() if not key.startswith(_OF_ONE_PROCESS)
        }
    resources.rebase(base, plan.service_sources)
    merged = {**resources.describe(os.getpid()), **attributes}
    resources.fix(os.getpid(), model.Resource(merged, service.schema_url or SCHEMA_URL))
