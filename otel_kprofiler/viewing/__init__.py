"""The local page of ``view``: what serves it, and what it shows."""

from otel_kprofiler.viewing.query import StoreAnswers
from otel_kprofiler.viewing.server import DATA, Answer, PageServer, Query, QueryError
from otel_kprofiler.viewing.store import (
    DEFAULT_KEEP_S,
    DEFAULT_MAX_BYTES,
    Added,
    SampleStore,
)

__all__ = [
    "DATA",
    "DEFAULT_KEEP_S",
    "DEFAULT_MAX_BYTES",
    "Added",
    "Answer",
    "PageServer",
    "Query",
    "QueryError",
    "SampleStore",
    "StoreAnswers",
]
