"""The service's Resource: that of its other signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.resources import Resource

from otel_kprofiler.model import AttributeScalar, AttributeValue


def find_resource() -> Resource:
    """The Resource of the global TracerProvider, else MeterProvider, else ``Resource.create()``."""
    candidates: tuple[Any, ...] = (
        getattr(trace.get_tracer_provider(), "resource", None),
        # The MeterProvider of the SDK has no public way to it.
        getattr(getattr(metrics.get_meter_provider(), "_sdk_config", None), "resource", None),
    )
    found = next((one for one in candidates if isinstance(one, Resource)), None)
    return found or Resource.create()


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Attributes of the SDK as ours; what attributes cannot hold here becomes text."""
    return {
        key: tuple(map(_plain, value)) if isinstance(value, list | tuple) else _plain(value)
        for key, value in attributes.items()
    }


def _plain(value: Any) -> AttributeScalar:
    return value if isinstance(value, AttributeScalar) else str(value)
