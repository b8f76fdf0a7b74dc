"""Finds the service's Resource, which profiles share with the service's other signals."""

from collections.abc import Mapping
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from otel_kprofiler.model import AttributeScalar, AttributeValue


def find_resource() -> Resource | None:
    """Returns the global TracerProvider's or MeterProvider's Resource; None if neither has one."""
    candidates: tuple[Any, ...] = (
        getattr(trace.get_tracer_provider(), "resource", None),
        # The SDK's MeterProvider has no public attribute for its Resource.
        getattr(getattr(metrics.get_meter_provider(), "_sdk_config", None), "resource", None),
    )
    return next((candidate for candidate in candidates if isinstance(candidate, Resource)), None)


class ServiceResource:
    """Tracks the current Resource of the service's other signals.

    The other signals' providers may be set later. In a forked child, the SDK changes the
    ``service.instance.id`` of these providers, and profiles adopt the new id.

    Args:
        given: an explicit Resource. By default, the other signals' Resource, or
            ``Resource.create()`` until that Resource is set.
    """

    def __init__(self, given: Resource | None) -> None:
        self._given = given
        self._created: Resource | None = None
        self._parents_id: object = None
        self._forked = False

    def get(self) -> Resource:
        """Returns the current Resource; the same object until it changes."""
        resource = find_resource()
        if self._given is None:
            if resource is None:
                resource = self._created = self._created or Resource.create()
            return resource
        if self._forked and resource is not None:
            instance_id = resource.attributes.get(SERVICE_INSTANCE_ID)
            shared = self._given.attributes.get(SERVICE_INSTANCE_ID) == self._parents_id
            if shared and instance_id is not None and instance_id != self._parents_id:
                self._given = self._given.merge(Resource({SERVICE_INSTANCE_ID: instance_id}))
        return self._given

    def before_fork(self) -> None:
        """Record the ``service.instance.id`` that the parent's other signals use."""
        resource = find_resource()
        self._parents_id = resource and resource.attributes.get(SERVICE_INSTANCE_ID)

    def after_fork_in_child(self) -> None:
        """Discard the Resource that was looked up in the parent."""
        self._created = None
        self._forked = self._parents_id is not None


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Convert the SDK's attributes, turning values of unsupported types into strings."""
    return {
        key: tuple(map(_plain, value)) if isinstance(value, list | tuple) else _plain(value)
        for key, value in attributes.items()
    }


def _plain(value: Any) -> AttributeScalar:
    return value if isinstance(value, AttributeScalar) else str(value)
