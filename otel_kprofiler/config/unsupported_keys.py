"""Lists keys of related configurations that are not supported, each with an alternative.

Receiver keys come from opentelemetry-ebpf-profiler's receiver, and all other keys from the
Collector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RECEIVER: Final[Mapping[str, str]] = {
    "interpreters": "python_frames unwinds Python, and other interpreted languages are not "
    "unwound; remove this setting",
    "tracers": "python_frames unwinds Python, and other interpreted languages are not "
    "unwound; remove this setting",
    "off_cpu_threshold": "use off_cpu: {enabled: true}",
    "probes": "kernel and user probes are not supported; remove this setting, or sample a "
    "tracepoint with events",
    "include_env_vars": "from the environment of processes, only the service attributes in "
    "OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are exported, because other variables may "
    "hold secrets; put fixed attributes under resource",
    "send_error_frames": "unresolved frames are always exported, as addresses with the reason; "
    "remove this setting",
    "frame_cache_size": "resolved stacks are cached as long as their symbols are valid, without "
    "a configurable size; remove this setting",
    "max_grpc_retries": "use exporters.otlp_grpc.retry_on_failure",
    "max_rpc_msg_size": "use exporters.otlp_grpc.max_message_bytes; larger batches are split",
    "bpf_fs_root": "nothing is pinned in a BPF file system; remove this setting",
    "obi_process_ctx": "no maps are shared with OpenTelemetry eBPF instrumentation; "
    "remove this setting",
    "pid_namespace_translation": "process ids are in the host's pid namespace; run the agent in "
    "that namespace (hostPID: true in Kubernetes)",
    "pin_cpus": "use pin_cpu_ids",
    "target_cpu_ids": "use pin_cpu_ids",
    "attributes": "use resource",
    "resource_attributes": "use resource",
    "symbol_names": "kernel symbol names are never compressed, since this would save at most 2 MB; "
    "remove this setting",
}

QUEUE: Final[Mapping[str, str]] = {
    "num_consumers": "the queue of an exporter has one worker, so that batches stay in order; "
    "remove this setting",
    "block_on_overflow": "sampling never waits for a receiver: a full queue drops the oldest "
    "batch and counts that batch; remove this setting",
    "sizer": "the size of a queue is a number of batches; set queue_size in batches",
    "batch": "a batch is one reporter_interval; set reporter_interval instead",
    "wait_for_result": "sampling never waits for the result of an export; remove this setting",
}

TLS: Final[Mapping[str, str]] = {
    "ca_pem": "use ca_file",
    "cert_pem": "use cert_file",
    "key_pem": "use key_file",
    "min_version": "the TLS library's default (1.2 or newer) applies; remove this setting",
    "max_version": "the newest version that both sides support is used; remove this setting",
}
GRPC_TLS: Final[Mapping[str, str]] = {
    **TLS,
    "insecure_skip_verify": "gRPC always verifies certificates; set ca_file to the receiver's "
    "certificate, or use otlp_http",
}
HTTP_TLS: Final[Mapping[str, str]] = {
    **TLS,
    "insecure": "the scheme of endpoint decides: http:// without TLS, https:// with TLS",
}

_CLIENT: Final[Mapping[str, str]] = {
    "auth": "there are no authenticator extensions; put credentials into headers",
    "profiles_endpoint": "use endpoint; the path is /v1development/profiles",
    "batcher": "a batch is one reporter_interval of the receiver; set reporter_interval instead",
}
GRPC: Final[Mapping[str, str]] = {
    **_CLIENT,
    "keepalive": "a batch every few seconds keeps the connection alive; remove this setting",
    "balancer_name": "there is one connection per exporter; remove this setting",
    "wait_for_ready": "use retry_on_failure",
    "read_buffer_size": "gRPC sizes its buffers itself; remove this setting",
    "write_buffer_size": "gRPC sizes its buffers itself; remove this setting",
}
HTTP: Final[Mapping[str, str]] = dict(_CLIENT)

FILE: Final[Mapping[str, str]] = {
    "compression": "files are not compressed, so that they remain readable while they grow; "
    "compress them after rotation",
    "append": "batches are always appended to an existing file; remove this setting",
    "flush_interval": "each batch is written immediately; remove this setting",
    "group_by": "one exporter writes one file; remove this setting",
    "encoding": "use format: json or proto",
    "create_directory": "create the directory with the permissions it should have; "
    "remove this setting",
}
ROTATION: Final[Mapping[str, str]] = {
    "localtime": "names of rotated files use UTC; remove this setting"
}

DEBUG: Final[Mapping[str, str]] = {
    "sampling_initial": "every batch is printed; remove this setting",
    "sampling_thereafter": "every batch is printed; remove this setting",
    "use_internal_logger": "output goes to standard output; remove this setting",
    "output_paths": "output goes to standard output; remove this setting",
}

LOGS: Final[Mapping[str, str]] = {
    "output_paths": "logs go to standard error; redirect standard error",
    "error_output_paths": "logs go to standard error; redirect standard error",
    "sampling": "repeated warnings are always limited; remove this setting",
    "processors": "logs go to standard error; remove this setting",
    "development": "use level: debug",
    "initial_fields": "put attributes under receivers.kprofiler.resource",
}
METRICS: Final[Mapping[str, str]] = {
    "readers": "the agent sends metrics to the pipeline's OTLP receivers every "
    "service.telemetry.metrics.interval; remove this setting",
    "address": "metrics are pushed, not scraped; remove this setting",
    "views": "remove this setting, and filter in the Collector",
}
TELEMETRY: Final[Mapping[str, str]] = {
    "resource": "use receivers.kprofiler.resource",
    "traces": "the agent creates no spans; remove this setting",
}
SERVICE: Final[Mapping[str, str]] = {
    "extensions": "the agent has no extensions; for a health endpoint use service.health",
}
PIPELINE: Final[Mapping[str, str]] = {
    "processors": "the agent has no processors; configure them in the Collector",
}
PIPELINES: Final[Mapping[str, str]] = dict.fromkeys(
    ("traces", "metrics", "logs"), "the agent produces profiles only; remove this setting"
)

TOP: Final[Mapping[str, str]] = {
    "processors": "the agent has no processors; configure them in the Collector",
    "connectors": "the agent has no connectors; configure them in the Collector",
    "extensions": "the agent has no extensions; for a health endpoint use service.health",
    "resource": "use receivers.kprofiler.resource",
    "profiling": "put the sampler's settings under receivers.kprofiler",
}
RECEIVERS: Final[Mapping[str, str]] = {
    "profiling": "use kprofiler, which has the same keys",
}
EXPORTERS: Final[Mapping[str, str]] = {
    "otlp": "use otlp_grpc",
    "otlphttp": "use otlp_http",
    "logging": "use debug",
    "console": "use debug",
}
