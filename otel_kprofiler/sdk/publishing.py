"""Publishes a service's Resource and its threads' spans for profilers outside the process."""

from collections.abc import Callable

from opentelemetry.sdk.resources import Resource

from otel_kprofiler.model import AttributeValue
from otel_kprofiler.sdk.plan import Plan
from otel_kprofiler.sdk.process_context import publish_profiled
from otel_kprofiler.sdk.resource import plain_attributes
from otel_kprofiler.sdk.thread_contexts import publish_threads


def publish_service(plan: Plan, find_resource: Callable[[], Resource], *, sampling: bool) -> None:
    """Publish the Resource and the threads' spans as the plan specifies, and log failures.

    ``find_resource`` is also called in forked children.
    """
    publish_context(plan, find_resource, sampling=sampling)
    if plan.publish_context and plan.publish_thread_contexts:
        publish_threads(endpoints=plan.local_root_names)


def publish_context(plan: Plan, find_resource: Callable[[], Resource], *, sampling: bool) -> None:
    """Publish the Resource like :func:`publish_service`, but not the threads' spans."""

    def describe() -> dict[str, AttributeValue]:
        return {**plain_attributes(find_resource().attributes), **plan.attributes}

    if plan.publish_context:
        publish_profiled(describe, plan.target if sampling else "")
