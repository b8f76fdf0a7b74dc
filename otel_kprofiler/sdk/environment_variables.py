"""Defines the environment variables that ``environment.py`` reads.

Each variable is also an option of ``opentelemetry-instrument`` (``--kprofiler_target`` and so on).
``OTEL_SDK_DISABLED``, ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES`` and
``OTEL_EXPORTER_OTLP_[PROFILES_]*`` have the same meaning as for other signals.
"""

from collections.abc import Mapping

PREFIX = "OTEL_KPROFILER_"

OTEL_PROFILES_EXPORTER = "OTEL_PROFILES_EXPORTER"
"""Comma-separated exporters: ``otlp`` (default), ``otlp_proto_grpc``, ``otlp_proto_http``,
``otlp_json_file``, ``console``, entry points from other packages, or ``none``."""

OTEL_KPROFILER_FILE = "OTEL_KPROFILER_FILE"
"""File to which ``otlp_json_file`` appends; standard output by default."""

OTEL_KPROFILER_TARGET = "OTEL_KPROFILER_TARGET"
"""The target to profile: ``self`` (default), ``children`` or ``host``."""

OTEL_KPROFILER_SAMPLES_PER_SECOND = "OTEL_KPROFILER_SAMPLES_PER_SECOND"
"""Samples per second on each CPU, 1 to 10000; 19 by default."""

OTEL_KPROFILER_STACKS = "OTEL_KPROFILER_STACKS"
"""Stacks to collect: ``both`` (default), ``user``, or ``kernel``. With ``kernel``, time in user
mode is not sampled."""

OTEL_KPROFILER_USER_SYMBOLS = "OTEL_KPROFILER_USER_SYMBOLS"
"""User frame detail beyond file and address: ``names`` (default), ``lines`` or ``off``."""

OTEL_KPROFILER_MAX_FRAMES = "OTEL_KPROFILER_MAX_FRAMES"
"""Maximum number of kernel frames and of user frames per stack, 1 to 127."""

OTEL_KPROFILER_PYTHON_FRAMES = "OTEL_KPROFILER_PYTHON_FRAMES"
"""Maximum number of Python frames per stack, 1 to 127 (default 64), or ``off`` for no Python
frames. Each frame names a function and a line."""

OTEL_KPROFILER_OFF_CPU = "OTEL_KPROFILER_OFF_CPU"
"""``true`` to also sample off-CPU waits: where threads wait, and for what."""

OTEL_KPROFILER_REPORTER_INTERVAL = "OTEL_KPROFILER_REPORTER_INTERVAL"
"""Window length, such as ``5s`` (default)."""

OTEL_KPROFILER_SPAN_LINKS = "OTEL_KPROFILER_SPAN_LINKS"
"""``true`` (default) to link samples to the span that was active."""

OTEL_KPROFILER_LINK_UNSAMPLED_SPANS = "OTEL_KPROFILER_LINK_UNSAMPLED_SPANS"
"""``true`` to also link samples to spans that are not sampled."""

OTEL_KPROFILER_LOCAL_ROOT_NAMES = "OTEL_KPROFILER_LOCAL_ROOT_NAMES"
"""``true`` (default) to name linked samples after the process's topmost span in their trace."""

OTEL_KPROFILER_BAGGAGE_KEYS = "OTEL_KPROFILER_BAGGAGE_KEYS"
"""Comma-separated keys of the baggage entries that become sample labels, with the values at the
start of the local root span."""

OTEL_KPROFILER_PUBLISH_CONTEXT = "OTEL_KPROFILER_PUBLISH_CONTEXT"
"""``true`` (default) to publish the Resource for profilers outside the process."""

OTEL_KPROFILER_PUBLISH_THREAD_CONTEXTS = "OTEL_KPROFILER_PUBLISH_THREAD_CONTEXTS"
"""``true`` (default) to also publish each thread's current span."""

OTEL_KPROFILER_RESTART_IN_CHILDREN = "OTEL_KPROFILER_RESTART_IN_CHILDREN"
"""``true`` (default) to start a profiler in each forked child."""

OTEL_KPROFILER_EXPORT_ON_SIGTERM = "OTEL_KPROFILER_EXPORT_ON_SIGTERM"
"""``true`` to export pending samples before SIGTERM terminates the process."""


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the ``OTEL_KPROFILER_*`` settings by key; an empty value is treated as unset."""
    return {
        name.removeprefix(PREFIX).lower(): text.strip()
        for name, text in environ.items()
        if name.startswith(PREFIX) and name != OTEL_KPROFILER_FILE and text.strip()
    }
