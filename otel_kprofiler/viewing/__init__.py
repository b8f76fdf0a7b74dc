"""The local page of ``view``: what serves it, and what it shows."""

from otel_kprofiler.viewing.server import DATA, Answer, PageServer, Query, QueryError

__all__ = ["DATA", "Answer", "PageServer", "Query", "QueryError"]
