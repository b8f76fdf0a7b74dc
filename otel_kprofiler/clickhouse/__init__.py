"""Reads profiles that the Collector's ClickHouse exporter has written."""

from otel_kprofiler.clickhouse.address import SCHEME, parse_address
from otel_kprofiler.clickhouse.need import ALL, PAGE, Need, need_of
from otel_kprofiler.clickhouse.queries import Range
from otel_kprofiler.clickhouse.store import ProfileStore, Selection
