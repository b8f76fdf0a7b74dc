"""Serves the web page for the ``view`` command.

Receivers are imported on first use, because they load gRPC and protobuf.
"""

import os
from typing import TYPE_CHECKING, Any

from otel_kprofiler.late import late_names
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
from otel_kprofiler.viewing.store import DEFAULT_KEEP_S, DEFAULT_MAX_BYTES, SampleStore

if TYPE_CHECKING:
    from otel_kprofiler.viewing.grpc_receiver import GrpcReceiver
    from otel_kprofiler.viewing.receiver import Counts, HttpReceiver, Intake

_MODULES = {"grpc_receiver": "GrpcReceiver", "receiver": "Counts HttpReceiver Intake"}

_load = late_names(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    # gRPC reads this variable on import. By default, gRPC's messages about clients could fill the
    # terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return _load(name)
