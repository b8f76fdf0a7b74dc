"""Code object descriptions are parsed, and Python and the BPF program agree on struct layouts."""

import os
import struct

import pytest

from otel_kprofiler.bpf import KernelTypes, ProcessSeen, PythonLayout, PythonOffsets
from otel_kprofiler.bpf.python_codes import _DESCRIPTION, _HEAD, CodeParser
from otel_kprofiler.bpf.python_maps import _LINE_BYTES, _PROCESS, PYTHON_OUTCOMES
from otel_kprofiler.model import PythonCode
from tests.bpf_object import check_adjacent, object_btf
from tests.records import in_ring

ID = 1 << 27 | 5  # an id from the first CPU
WORDS = {
    "python_layout": PythonLayout._fields,
    "python_config": ("max_frames", *PythonOffsets._fields),
    "python_process": (
        "layout", "tag", "runtime_at", "code_type", "eval_start", "eval_bytes", "image",
    ),
}  # fmt: skip


def piece(content, code_id=ID):
    return in_ring(struct.pack("<QII", code_id, 0, len(content)) + content)


def description(file=b"f.py", name=b"f", *, code_id=ID, table=0, widths=(1, 1), extra=b""):
    head = struct.pack(
        "<QIIQQIIIHHBB6x", code_id, 1, 77, 0xC0DE, 0x1, 40, 2, table, len(file), len(name), *widths
    )
    return in_ring(head + file + name + extra)


def aligned(*records):
    return b"".join(record + bytes(-len(record) % 8) for record in records)


def parse(*records):
    return list(CodeParser().parse(aligned(*records)))


def test_a_line_table_is_reassembled_from_its_fragments():
    assert parse(piece(b"abc"), piece(b"de"), description(table=5)) == [
        PythonCode(ID, 77, 0xC0DE, 0x1, "f.py", "f", 40, 2, b"abcde")
    ]


def test_line_table_fragments_are_kept_until_the_description_arrives_in_a_later_chunk():
    parser = CodeParser()
    assert not list(parser.parse(aligned(piece(b"abc"))))
    (code,) = parser.parse(aligned(description(table=3)))
    assert code.line_table == b"abc"


def test_fragments_of_an_incomplete_description_are_dropped():
    (code,) = parse(piece(b"old", ID + 1), piece(b"new"), description(table=3))
    assert code.line_table == b"new"


def test_descriptions_from_several_cpus_may_interleave():
    other = 2 << 27 | 5
    first, second = parse(
        piece(b"aa"), piece(b"bb", other), description(table=2), description(code_id=other, table=2)
    )
    assert (first.line_table, second.line_table) == (b"aa", b"bb")


def test_an_incomplete_line_table_is_dropped():
    (code,) = parse(piece(b"abc"), description(table=4))
    assert code.line_table == b""
    assert parse(description(table=4))[0].line_table == b""


@pytest.mark.parametrize(
    ("encoding", "width"), [("latin-1", 1), ("utf-16-le", 2), ("utf-32-le", 4)]
)
def test_strings_are_decoded_at_the_interpreters_character_width(encoding, width):
    (code,) = parse(description(name="ä.f".encode(encoding), widths=(1, width)))
    assert (code.file, code.function) == ("f.py", "ä.f")


def test_bytes_in_file_names_that_are_not_utf8_are_escaped():
    name = os.fsdecode(b"/\xff\xe9.py")  # Python stores two bytes per character
    (code,) = parse(description(name=name.encode("utf-16-le", "surrogatepass"), widths=(1, 2)))
    assert code.function == r"/\xff\xe9.py"


@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 7])
def test_arbitrary_bytes_decode_to_a_string(width):
    (code,) = parse(description(name=bytes(range(256)) * 2, widths=(width, width)))
    assert isinstance(code.function, str)


def test_process_records_between_code_object_records_are_parsed():
    seen = in_ring(struct.pack("<QII3Q", 7, 2, 5, 11, 12, 13))
    first, second, third = parse(description(), seen, description())
    assert second == ProcessSeen(tgid=5, image=7, program=(11, 12, 13))
    assert first == third


@pytest.mark.parametrize(
    "record",
    [
        in_ring(bytes(8)),
        in_ring(struct.pack("<QII", ID, 0, 9) + b"short"),
        in_ring(struct.pack("<QII", ID, 3, 0)),
        in_ring(struct.pack("<QII", ID, 1, 0)),
        description(extra=b"more"),
    ],
    ids=["short", "piece cut off", "unknown kind", "description cut off", "too long"],
)
def test_an_inconsistent_record_is_rejected(record):
    with pytest.raises(ValueError, match="byte"):
        parse(record)


def test_python_and_the_bpf_object_agree_on_every_struct_layout():
    types = KernelTypes(object_btf())
    for name, fields in WORDS.items():
        check_adjacent(types, name, fields)
        assert types.size(name) == 8 * len(fields)
    assert _PROCESS.size == types.size("python_process")
    assert types.size("python_line") == _LINE_BYTES >= 8 * len(PYTHON_OUTCOMES)
    assert types.offset("code_piece", "data") == _HEAD.size
    assert types.offset("code_description", "text") == _DESCRIPTION.size
    assert types.offset("code_description", "image") == 24
    assert types.offset("code_description", "name_width") == 49
