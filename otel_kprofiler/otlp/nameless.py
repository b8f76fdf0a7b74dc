"""Finds locations without function names in OTLP profiles, and adds the names.

Accepts payloads from any producer, and leaves all else unchanged, including unknown fields.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from otel_kprofiler.model import BuildId, FileId, Line
from otel_kprofiler.otlp import conventions as names
from otel_kprofiler.otlp.nameless_edit import add_lines
from otel_kprofiler.otlp.payloads import Payload, detect_framing, parse_payloads
from otel_kprofiler.otlp.references import check_indices
from otel_kprofiler.otlp.values import Values, as_text

_NATIVE: Final = frozenset({"go", "kernel", "native", "rust", None})
"""Frame types of machine code; None stands for frames without a type."""


class NamelessFile(NamedTuple):
    """The file that a code mapping refers to. An id is empty if the mapping does not contain it.

    ``name`` is the last path component; for kernel code, ``vmlinux`` or the module name.
    """

    name: str
    build_id: BuildId
    file_id: FileId
    is_kernel: bool


class Nameless(NamedTuple):
    """A location without function names.

    ``address`` is an SVMA for user code, and an RVA for kernel code. ``file_offset`` is None if the
    address is outside the mapping's range.
    """

    location: int
    file: NamelessFile
    address: int
    file_offset: int | None


FindNames = Callable[[Sequence[Nameless]], Mapping[int, Sequence[Line]]]
"""Function that returns the functions at each location, innermost inlined function first."""


class Naming(NamedTuple):
    """OTLP data with added names, and the counts of nameless and newly named locations."""

    data: bytes
    nameless: int
    named: int


def name_locations(data: bytes, find: FindNames) -> Naming:
    """Add names to unnamed locations in native and kernel code.

    ``data`` contains requests in any supported encoding. ``find`` is called once per message.
    Raises ``PayloadError`` if the data is not OTLP profiles, or an index is out of range.
    """
    written: list[bytes] = []
    nameless = named = 0
    for payload in parse_payloads(data):
        check_indices(payload.message)
        wanted = list(_find_nameless(payload.message.dictionary))
        lines = {index: functions for index, functions in find(wanted).items() if functions}
        add_lines(payload.message, payload.tree, lines)
        written.append(_serialize(payload))
        nameless += len(wanted)
        named += len(lines)
    return Naming(detect_framing(data).join(written), nameless, named)


def _serialize(payload: Payload) -> bytes:
    if payload.tree is None:
        message: bytes = payload.message.SerializeToString(deterministic=True)
        return message
    return json.dumps(payload.tree, separators=(",", ":")).encode()


def _find_nameless(dictionary: Any) -> Iterator[Nameless]:
    strings = list(dictionary.string_table) or [""]
    values = Values(strings)
    attributes = [
        (strings[entry.key_strindex], as_text(values.read(entry.value)))
        for entry in dictionary.attribute_table
    ] or [("", "")]
    for index, location in enumerate(dictionary.location_table):
        if not location.mapping_index or location.lines:
            continue
        frame_type = dict(attributes[at] for at in location.attribute_indices).get(names.FRAME_TYPE)
        if frame_type not in _NATIVE:
            continue
        mapping = dictionary.mapping_table[location.mapping_index]
        by_key = dict(attributes[at] for at in mapping.attribute_indices)
        if names.MODULE_KIND in by_key:
            continue  # kernel code that is not backed by a file
        file = NamelessFile(
            strings[mapping.filename_strindex].rpartition("/")[2],
            BuildId(by_key.get(names.BUILD_ID_GNU, "")),
            FileId(by_key.get(names.BUILD_ID_HTLHASH, "")),
            frame_type == "kernel",
        )
        offset = None
        if mapping.memory_start <= location.address < mapping.memory_limit:
            offset = location.address - mapping.memory_start + mapping.file_offset
        yield Nameless(index, file, location.address, offset)
