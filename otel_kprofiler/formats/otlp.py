"""Writes OTLP files, as binary messages or as the Collector's JSON lines."""

from collections.abc import Iterable
from typing import Final

from otel_kprofiler.model import Form, Window
from otel_kprofiler.otlp import encode_window

_LENGTH_BYTES: Final = 4


def otlp(windows: Iterable[Window]) -> bytes:
    """Returns a request to the profiles service as protobuf; empty if there are no samples.

    If there are several windows, returns a length-prefixed request per window, in the format of the
    Collector's file exporter.
    """
    messages = _messages(windows, Form.PROTOBUF)
    if len(messages) == 1:
        return messages[0]
    return b"".join([len(message).to_bytes(_LENGTH_BYTES, "big") + message for message in messages])


def otlp_lines(windows: Iterable[Window]) -> bytes:
    """Returns the same requests as :func:`otlp`, as lines of JSON."""
    return b"".join([line + b"\n" for line in _messages(windows, Form.JSON)])


def _messages(windows: Iterable[Window], form: Form) -> list[bytes]:
    return [
        batch.payload for window in windows for batch in encode_window(window, form=form).batches
    ]
