"""Stores code objects in recordings, so that replays show Python functions and lines."""

import json
from typing import Any, Final

from otel_kprofiler.checked import checked_number, checked_text
from otel_kprofiler.model import PythonCode

STREAM: Final = "python_codes"
"""Stream of code objects. Each block has the fields of one :class:`PythonCode`, as a JSON list."""


def pack_python_code(code: PythonCode) -> bytes:
    """Packs the description of a code object as JSON."""
    return json.dumps([*code[:-1], code.line_table.hex()]).encode()


def parse_python_code(row: Any) -> PythonCode:
    """Unpacks the JSON row for a code object.

    Raises ``TypeError`` or ``ValueError`` if the row is malformed.
    """
    number, process, address, image, file, function, first, traceable, table = row
    return PythonCode(
        checked_number(number),
        checked_number(process),
        checked_number(address),
        checked_number(image),
        checked_text(file),
        checked_text(function),
        checked_number(first),
        checked_number(traceable),
        bytes.fromhex(checked_text(table)),
    )
