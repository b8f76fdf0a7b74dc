"""The agent's configuration: schema, YAML parser with positions, durations.

Submodules are imported on first use, because pydantic and ruamel.yaml are slow to import.
"""

from typing import TYPE_CHECKING

from otel_kprofiler.late import late_names

if TYPE_CHECKING:
    from otel_kprofiler.config.config import Config
    from otel_kprofiler.config.dump import dump_config
    from otel_kprofiler.config.durations import Duration, parse_duration
    from otel_kprofiler.config.exporter_types import EXPORTERS
    from otel_kprofiler.config.exposure import find_exposure
    from otel_kprofiler.config.load import load_config, parse_config
    from otel_kprofiler.config.load_in_child import PendingConfig
    from otel_kprofiler.config.receiver import Receiver, ServiceName
    from otel_kprofiler.config.section import Exporter

_LATE = {
    "config": "Config",
    "dump": "dump_config",
    "durations": "Duration parse_duration",
    "exporter_types": "EXPORTERS",
    "exposure": "find_exposure",
    "load": "load_config parse_config",
    "load_in_child": "PendingConfig",
    "receiver": "Receiver ServiceName",
    "section": "Exporter",
}

__getattr__ = late_names(__name__, _LATE)
