"""Serves the local page of ``view``.

Receivers are imported on first use, because they load gRPC and protobuf.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_kprofiler.serving import is_loopback
from otel_kprofiler.viewing.query import StoreAnswers
from otel_kprofiler.viewing.server import (
    DATA,
    SOURCE,
    Answer,
    NamesFile,
    PageServer,
    Query,
    QueryError,
)
from otel_kprofiler.viewing.store import DEFAULT_KEEP_S, DEFAULT_MAX_BYTES, Added, SampleStore

if TYPE_CHECKING:
    from otel_kprofiler.viewing.grpc_receiver import GrpcReceiver
    from otel_kprofiler.viewing.receiver import Counts, HttpReceiver, Intake

__all__ = [
    "DATA",
    "DEFAULT_KEEP_S",
    "DEFAULT_MAX_BYTES",
    "SOURCE",
    "Added",
    "Answer",
    "Counts",
    "GrpcReceiver",
    "HttpReceiver",
    "Intake",
    "NamesFile",
    "PageServer",
    "Query",
    "QueryError",
    "SampleStore",
    "StoreAnswers",
    "is_loopback",
]

_LATE = {
    "Counts": "receiver", "GrpcReceiver": "grpc_receiver", "HttpReceiver": "receiver",
    "Intake": "receiver",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # gRPC reads this on import. Without this setting, messages about clients could fill the
    # terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
