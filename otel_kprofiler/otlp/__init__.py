"""Encodes windows as OTLP profiles, decodes OTLP profiles, and checks them against OTLP's rules.

Encoding does not require a protobuf library. Decoding and checking load ``opentelemetry-proto`` on
first use and raise ``DependencyError`` if it is missing or older than 1.43.
"""

from typing import TYPE_CHECKING, Final

from otel_kprofiler.late import late_names
from otel_kprofiler.otlp import wire
from otel_kprofiler.otlp.account import parse_account
from otel_kprofiler.otlp.conventions import (
    BOOLEAN_ATTRIBUTES,
    DEVELOPMENT_VERSION,
    DEVELOPMENT_VERSION_HEADER,
    ENDED_PROCESSES,
    KERNEL_ENTRY,
    KERNEL_THREAD,
    LOCAL_ROOT,
    PROGRAM,
    SAMPLE_ATTRIBUTES,
    SCHEMA_URL,
    STACK_STATUS,
    STREAM_ID,
    TYPED_INTEGERS,
    UNIT,
    USER_UNIT,
    WAIT_CAUSE,
    WAIT_STATE,
    WAKER_NAME,
    WAKER_PID,
    WAKER_TID,
    WINDOW_PREFIX,
    describe_request,
)
from otel_kprofiler.otlp.encode import Encoded, encode_empty, encode_window
from otel_kprofiler.otlp.process_context import (
    ProcessContext,
    decode_process_context,
    encode_process_context,
)
from otel_kprofiler.otlp.scope import Scope

if TYPE_CHECKING:
    from otel_kprofiler.otlp.check import RULES, Violation, check_file, check_payload
    from otel_kprofiler.otlp.decode import decode_windows, read_profiles
    from otel_kprofiler.otlp.decode_tables import find_profile_kind
    from otel_kprofiler.otlp.message_limit import refuse_many_messages
    from otel_kprofiler.otlp.metrics import encode_metrics
    from otel_kprofiler.otlp.nameless import Nameless, NamelessFile, Naming, name_locations
    from otel_kprofiler.otlp.negative import refuse_negative_values
    from otel_kprofiler.otlp.payloads import (
        DamagedProfilesError,
        parse_payloads,
        read_file,
        read_stream,
    )
    from otel_kprofiler.otlp.sample_attributes import SampleAttributes, read_sample_attributes
    from otel_kprofiler.otlp.split import divide_batch, encode_message

__all__ = [
    "BOOLEAN_ATTRIBUTES",
    "DEVELOPMENT_VERSION",
    "DEVELOPMENT_VERSION_HEADER",
    "ENDED_PROCESSES",
    "KERNEL_ENTRY",
    "KERNEL_THREAD",
    "LOCAL_ROOT",
    "PROGRAM",
    "RULES",
    "SAMPLE_ATTRIBUTES",
    "SCHEMA_URL",
    "STACK_STATUS",
    "STREAM_ID",
    "TYPED_INTEGERS",
    "UNIT",
    "USER_UNIT",
    "WAIT_CAUSE",
    "WAIT_STATE",
    "WAKER_NAME",
    "WAKER_PID",
    "WAKER_TID",
    "WINDOW_PREFIX",
    "DamagedProfilesError",
    "Encoded",
    "Nameless",
    "NamelessFile",
    "Naming",
    "ProcessContext",
    "SampleAttributes",
    "Scope",
    "Violation",
    "check_file",
    "check_payload",
    "decode_process_context",
    "decode_windows",
    "describe_request",
    "divide_batch",
    "encode_empty",
    "encode_message",
    "encode_metrics",
    "encode_process_context",
    "encode_window",
    "find_profile_kind",
    "name_locations",
    "parse_account",
    "parse_payloads",
    "read_file",
    "read_profiles",
    "read_sample_attributes",
    "read_stream",
    "refuse_many_messages",
    "refuse_negative_values",
    "wire",
]

_LATE: Final = {
    "check": "RULES Violation check_file check_payload",
    "decode": "decode_windows read_profiles",
    "decode_tables": "find_profile_kind",
    "message_limit": "refuse_many_messages",
    "metrics": "encode_metrics",
    "nameless": "Nameless NamelessFile Naming name_locations",
    "negative": "refuse_negative_values",
    "payloads": "DamagedProfilesError parse_payloads read_file read_stream",
    "sample_attributes": "SampleAttributes read_sample_attributes",
    "split": "divide_batch encode_message",
}

__getattr__ = late_names(__name__, _LATE)
