"""Configuration of the agent: schema, YAML parser with positions, durations, generated files.

Names load on first use, because pydantic and ruamel.yaml are slow to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from otel_kprofiler.config.config import Config
    from otel_kprofiler.config.dump import dump_config
    from otel_kprofiler.config.durations import Duration, parse_duration
    from otel_kprofiler.config.exporter_types import EXPORTERS
    from otel_kprofiler.config.exposure import find_exposure
    from otel_kprofiler.config.generate import json_schema, sample
    from otel_kprofiler.config.load import LoadedConfig, load_config, parse_config
    from otel_kprofiler.config.load_in_child import PendingConfig
    from otel_kprofiler.config.receiver import OffCpu, Receiver, ServiceName
    from otel_kprofiler.config.section import Exporter
    from otel_kprofiler.config.service import Service

__all__ = [
    "EXPORTERS",
    "Config",
    "Duration",
    "Exporter",
    "LoadedConfig",
    "OffCpu",
    "PendingConfig",
    "Receiver",
    "Service",
    "ServiceName",
    "dump_config",
    "find_exposure",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_duration",
    "sample",
]

_MODULES = {
    "load_in_child": {"PendingConfig"},
    "config": {"Config"},
    "dump": {"dump_config"},
    "durations": {"Duration", "parse_duration"},
    "generate": {"json_schema", "sample"},
    "exporter_types": {"EXPORTERS"},
    "exposure": {"find_exposure"},
    "load": {"LoadedConfig", "load_config", "parse_config"},
    "receiver": {"OffCpu", "Receiver", "ServiceName"},
    "section": {"Exporter"},
    "service": {"Service"},
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(name)
