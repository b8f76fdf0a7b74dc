"""OTLP files: one binary message, or the Collector's JSON lines."""

from __future__ import annotations

from collections.abc import Iterable

from otel_kprofiler.errors import ExportError
from otel_kprofiler.model import Form, Window
from otel_kprofiler.otlp import encode_window


def otlp(windows: Iterable[Window]) -> bytes:
    """A request of the profiles service, as protobuf; nothing if there are no samples.

    Raises:
        ExportError: the windows need more than one message.
    """
    return _message(windows, Form.PROTOBUF)


def otlp_lines(windows: Iterable[Window]) -> bytes:
    """The same message as one line of JSON.

    Raises:
        ExportError: the windows need more than one message.
    """
    line = _message(windows, Form.JSON)
    return line + b"\n" if line else b""


def _message(windows: Iterable[Window], form: Form) -> bytes:
    batches = [batch for window in windows for batch in encode_window(window, form=form).batches]
    if len(batches) > 1:
        raise ExportError("a recording must be one message")
    return batches[0].payload if batches else b""
