"""Lists unsupported receiver and Collector keys, each with an alternative.

Receiver keys are opentelemetry-ebpf-profiler's; all other keys are the Collector's.
"""

from collections.abc import Mapping
from typing import Final

RECEIVER: Final[Mapping[str, str]] = {
    "interpreters": "Python frames are unwound (python_frames), but other interpreted frames are "
    "not; remove this setting",
    "tracers": "Python frames are unwound (python_frames), but other interpreted frames are not; "
    "remove this setting",
    "off_cpu_threshold": "use off_cpu: {enabled: true}",
    "probes": "kernel and user probes are not supported; remove this setting, or sample a "
    "tracepoint with events",
    "include_env_vars": "only service attributes from OTEL_SERVICE_NAME and "
    "OTEL_RESOURCE_ATTRIBUTES are exported, because other variables may hold secrets; set fixed "
    "attributes with the resource key",
    "send_error_frames": "unresolved frames are always exported, as addresses with the reason why "
    "they have no name; remove this setting",
    "frame_cache_size": "resolved stacks are cached as long as their symbols are valid, and the "
    "size of the cache is not configurable; remove this setting",
    "max_grpc_retries": "use exporters.otlp_grpc.retry_on_failure",
    "max_rpc_msg_size": "the exporter splits large batches; use "
    "exporters.otlp_grpc.max_message_bytes",
    "bpf_fs_root": "nothing is pinned in a BPF file system; remove this setting",
    "obi_process_ctx": "no BPF maps are shared with OpenTelemetry eBPF instrumentation; "
    "remove this setting",
    "pid_namespace_translation": "process IDs are those of the host's pid namespace; run the agent "
    "in the host's pid namespace (hostPID: true in Kubernetes)",
    "pin_cpus": "use pin_cpu_ids",
    "target_cpu_ids": "use pin_cpu_ids",
    "attributes": "use resource",
    "resource_attributes": "use resource",
    "symbol_names": "kernel symbol names are never compressed, because this would save at most 2 "
    "MB; remove this setting",
}

QUEUE: Final[Mapping[str, str]] = {
    "num_consumers": "an exporter's queue has only one worker, so that batches remain in order; "
    "remove this setting",
    "block_on_overflow": "sampling never waits for a receiver, and a full queue drops the oldest "
    "batch and counts it as lost; remove this setting",
    "sizer": "queue sizes are measured in batches; set queue_size instead",
    "batch": "a batch contains the samples of one reporter_interval; set reporter_interval instead",
    "wait_for_result": "sampling never waits for the result of an export; remove this setting",
}

TLS: Final[Mapping[str, str]] = {
    "ca_pem": "use ca_file",
    "cert_pem": "use cert_file",
    "key_pem": "use key_file",
    "min_version": "the TLS library's default (1.2 or newer) applies; remove this setting",
    "max_version": "the newest TLS version that both client and server support is used; remove "
    "this setting",
}
HTTP_TLS: Final[Mapping[str, str]] = {
    **TLS,
    "insecure": "the scheme of the endpoint determines whether TLS is used; use http:// for "
    "connections without TLS",
}

_CLIENT: Final[Mapping[str, str]] = {
    "auth": "authenticator extensions are not supported; put credentials into headers",
    "profiles_endpoint": "the URL path is always /v1development/profiles; use endpoint",
    "batcher": "a batch contains the samples of one reporter_interval of the receiver; set "
    "reporter_interval instead",
}
GRPC: Final[Mapping[str, str]] = {
    **_CLIENT,
    "keepalive": "the batches, which are sent every few seconds, keep the connection alive; remove "
    "this setting",
    "balancer_name": "there is one connection per exporter; remove this setting",
    "wait_for_ready": "use retry_on_failure",
    "read_buffer_size": "the size of buffers is fixed; remove this setting",
    "write_buffer_size": "the size of buffers is fixed; remove this setting",
}
HTTP: Final[Mapping[str, str]] = dict(_CLIENT)

FILE: Final[Mapping[str, str]] = {
    "compression": "files are not compressed, so that they remain readable while they grow; "
    "compress them after rotation",
    "append": "batches are always appended to an existing file; remove this setting",
    "flush_interval": "each batch is written immediately; remove this setting",
    "group_by": "each exporter writes only one file; remove this setting",
    "encoding": "use format: json or proto",
    "create_directory": "the exporter does not create directories; create the directory with "
    "suitable permissions, and remove this setting",
}
ROTATION: Final[Mapping[str, str]] = {
    "localtime": "names of rotated files use UTC; remove this setting"
}

DEBUG: Final[Mapping[str, str]] = {
    "sampling_initial": "every batch is printed; remove this setting",
    "sampling_thereafter": "every batch is printed; remove this setting",
    "use_internal_logger": "summaries are always written to standard output; remove this setting",
    "output_paths": "summaries are always written to standard output; remove this setting",
}

LOGS: Final[Mapping[str, str]] = {
    "output_paths": "logs are written to standard error; redirect standard error",
    "error_output_paths": "logs are written to standard error; redirect standard error",
    "sampling": "the agent always limits repeated warnings; remove this setting",
    "processors": "logs go to standard error; remove this setting",
    "development": "use level: debug",
    "initial_fields": "set attributes under receivers.kprofiler.resource",
}
METRICS: Final[Mapping[str, str]] = {
    "readers": "the agent sends metrics to the pipeline's OTLP receivers at intervals of "
    "service.telemetry.metrics.interval; remove this setting",
    "address": "the agent pushes its metrics, and has no endpoint to scrape; remove this setting",
    "views": "remove this setting, and filter in the Collector",
}
TELEMETRY: Final[Mapping[str, str]] = {
    "resource": "use receivers.kprofiler.resource",
    "traces": "the agent creates no spans; remove this setting",
}
SERVICE: Final[Mapping[str, str]] = {
    "extensions": "the agent has no extensions; use service.health for a health endpoint",
}
PIPELINE: Final[Mapping[str, str]] = {
    "processors": "the agent has no processors; configure processors in the Collector",
}
PIPELINES: Final[Mapping[str, str]] = dict.fromkeys(
    ("traces", "metrics", "logs"), "the agent produces profiles only; remove this setting"
)

TOP: Final[Mapping[str, str]] = {
    "processors": "the agent has no processors; configure processors in the Collector",
    "connectors": "the agent has no connectors; configure connectors in the Collector",
    "extensions": "the agent has no extensions; use service.health for a health endpoint",
    "resource": "use receivers.kprofiler.resource",
    "profiling": "move the sampler's settings to receivers.kprofiler",
}
RECEIVERS: Final[Mapping[str, str]] = {"profiling": "use kprofiler, which has the same keys"}
EXPORTERS: Final[Mapping[str, str]] = {
    "otlp": "use otlp_grpc",
    "otlphttp": "use otlp_http",
    "logging": "use debug",
    "console": "use debug",
}
