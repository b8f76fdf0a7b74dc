"""Finding struct members in BTF."""

import struct

import pytest

from otel_kprofiler.bpf import find_member_offsets

STRUCT, UNION, FORWARD = 4, 5, 7


class Btf:
    """Builds BTF (Documentation/bpf/btf.rst)."""

    def __init__(self) -> None:
        self.text = b"\0"
        self.types = b""

    def name(self, text: str) -> int:
        if not text:
            return 0
        at = self.text.find(b"\0" + text.encode() + b"\0")
        if at < 0:
            at = len(self.text) - 1
            self.text += text.encode() + b"\0"
        return at + 1

    def struct(self, tag, members, *, size=4096, kind=STRUCT, bit_fields=False):
        self.types += struct.pack(
            "=III", self.name(tag), bit_fields << 31 | kind << 24 | len(members), size
        )
        for name, bits in members:
            self.types += struct.pack("=III", self.name(name), 1, bits)
        return self

    def build(self) -> bytes:
        return (
            struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(self.types),
                        len(self.types), len(self.text))
            + self.types + self.text
        )  # fmt: skip


TASK = [("state", 0), ("group_leader", 640), ("start_boottime", 1280)]
WANTED = ("group_leader", "start_boottime")


def test_offsets_are_in_bytes():
    btf = Btf().struct("other", [("state", 0)]).struct("task_struct", TASK).build()
    assert find_member_offsets(btf, "task_struct", WANTED) == (80, 160)


def test_forward_declarations_and_members_with_the_same_name_are_skipped():
    made = Btf().struct("holder", [("task_struct", 0)]).struct("task_struct", [], kind=FORWARD)
    made.struct("task_struct", TASK, kind=UNION).struct("task_struct", TASK)
    assert find_member_offsets(made.build(), "task_struct", WANTED) == (80, 160)


def test_another_struct_with_the_same_name_is_skipped():
    made = Btf().struct("task_struct", [("state", 0)]).struct("task_struct", TASK)
    assert find_member_offsets(made.build(), "task_struct", WANTED) == (80, 160)


def test_in_structs_with_bit_fields_only_plain_members_have_offsets():
    """With kind_flag, the upper byte of an offset is the width of a bit field."""
    made = Btf().struct("task_struct", [*TASK, ("flag", 3 << 24 | 1300)], bit_fields=True)
    assert find_member_offsets(made.build(), "task_struct", WANTED) == (80, 160)
    assert find_member_offsets(made.build(), "task_struct", ("flag",)) is None


@pytest.mark.parametrize(
    "btf",
    [
        b"",
        b"\x9f\xeb",
        bytes(64),
        Btf().struct("task_struct", TASK[:2]).build(),
        Btf().struct("task_struct", TASK, size=100).build(),
        Btf().struct("task_struct_x", TASK).build(),
        Btf().struct("task_struct", TASK).build()[:50],
    ],
    ids=["empty", "short", "no magic", "no member", "outside", "other name", "truncated"],
)
def test_missing_members_are_not_found(btf):
    assert find_member_offsets(btf, "task_struct", WANTED) is None
