"""Embedding in a service."""

from otel_kprofiler.sdk.process_context import publish_process_context, withdraw_process_context

__all__ = ["publish_process_context", "withdraw_process_context"]
