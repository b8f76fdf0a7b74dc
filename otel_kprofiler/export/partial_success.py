"""Parses partial success: rejections that an OTLP receiver reports for an accepted request."""

from typing import NamedTuple


class PartialSuccess(NamedTuple):
    """The rejected part of an accepted request (OTLP specification, "Partial Success")."""

    rejected: int = 0
    message: str = ""


def parse_partial_success(response: bytes) -> PartialSuccess:
    """Parses a serialized ``ExportProfilesServiceResponse``; raises ``ValueError`` if malformed."""
    # Avoid loading protobuf on full success, when ``partial_success`` is absent or empty.
    if response in (b"", b"\x0a\x00"):
        return PartialSuccess()
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2  # noqa: PLC0415

    try:
        parsed = profiles_service_pb2.ExportProfilesServiceResponse.FromString(response)
    except DecodeError as error:
        raise ValueError("not an ExportProfilesServiceResponse") from error
    partial = parsed.partial_success
    return PartialSuccess(partial.rejected_profiles, partial.error_message)
