"""Parses the sample counts that the agent prints on exit, for comparison in tests."""

import json
from collections.abc import Iterable


def parse_account(line):
    """Parses the agent's sample counts in a log line: the sums, and each kind under ``kinds``."""
    record = json.loads(line)
    assert record.keys() >= {"time", "level", "logger", "message", "account"}
    kinds = record["account"]
    return {**_add(kinds.values()), "kinds": kinds}


def _add(values: Iterable):
    values = list(values)
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _add(value[key] for value in values if key in value) for key in keys}
    return sum(values[1:], values[0])
