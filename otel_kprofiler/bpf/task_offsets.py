"""The offsets of the ``task_struct`` fields that the sampler reads."""

from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes


class ProgramOffsets(NamedTuple):
    """Mirrors ``struct program_offsets``, whose comments describe the fields."""

    exec_id: int
    mm: int
    stack_start: int
    credentials: int
    owner: int


class TaskOffsets(NamedTuple):
    """Offsets in ``task_struct``, in bytes.

    Attributes:
        leader: offset of the pointer to the main thread's task.
        start: offset of the task's start time.
        parent: offset of the pointer to the parent process's task.
        program: offsets of the program and user fields; None if the kernel's structs differ.
    """

    leader: int
    start: int
    parent: int
    tgid: int
    comm: int
    program: ProgramOffsets | None


_TASK: Final = tuple(
    ("task_struct", name)
    for name in ("group_leader", "start_boottime", "real_parent", "tgid", "comm")
)
_PROGRAM: Final = (
    ("task_struct", "self_exec_id"),
    ("task_struct", "mm"),
    ("mm_struct", "start_stack"),
    ("task_struct", "real_cred"),
    ("cred", "euid"),
)


def find_task_offsets(types: KernelTypes) -> TaskOffsets | None:
    """Finds the offsets in a kernel's ``task_struct``; None if a member is missing."""
    task = _find(types, _TASK)
    if task is None:
        return None
    leader, start, parent, tgid, comm = task
    offsets = _find(types, _PROGRAM)
    program = ProgramOffsets(*offsets) if offsets else None
    return TaskOffsets(leader, start, parent, tgid, comm, program)


def _find(types: KernelTypes, paths: tuple[tuple[str, str], ...]) -> list[int] | None:
    offsets = [offset for path in paths if (offset := types.offset(*path)) is not None]
    return offsets if len(offsets) == len(paths) else None
