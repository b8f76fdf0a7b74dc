"""Loads the message classes of ``opentelemetry-proto``, and rejects old versions.

Releases before 1.43 define a different ``Sample`` under the same package and service name, so they
would misread or miswrite data without an error.
"""

from collections.abc import Mapping
from typing import Any, Final

from otel_kprofiler.errors import DependencyError

_HINT: Final = "pip install 'opentelemetry-proto>=1.43'"

try:
    from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
        ExportProfilesServiceRequest,
    )
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.profiles.v1development.profiles_pb2 import Sample
except ImportError as error:
    raise DependencyError(
        f"opentelemetry-proto with profiles is not installed: {error}", hint=_HINT
    ) from error

_SAMPLE_FIELDS: Final = {
    "stack_index": 1,
    "attribute_indices": 2,
    "link_index": 3,
    "values": 4,
    "timestamps_unix_nano": 5,
}


def require_current_layout(
    sample_fields: Mapping[str, Any], key_value_fields: Mapping[str, Any]
) -> None:
    """Raise ``DependencyError`` unless the fields match opentelemetry-proto 1.43 or later."""
    numbers = {name: field.number for name, field in sample_fields.items()}
    if numbers != _SAMPLE_FIELDS or "key_strindex" not in key_value_fields:
        raise DependencyError(
            f"the installed opentelemetry-proto is older than 1.43 (fields of Sample: {numbers})",
            hint=_HINT,
        )


require_current_layout(
    Sample.DESCRIPTOR.fields_by_name,
    KeyValue.DESCRIPTOR.fields_by_name,
)

__all__ = ["ExportProfilesServiceRequest", "require_current_layout"]
