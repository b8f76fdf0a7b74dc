"""Wait causes are derived from Linux 6.18 stacks that perf captured while test programs slept."""

import re
from pathlib import Path

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    RawFrames,
    Side,
    Stack,
    Unresolved,
    WaitCause,
    WaitState,
    find_cause,
    find_stack_cause,
)

PAGE = Path("docs/report.md")
WAITS = Path("tests/data/waits")
CAUSES = {
    "child": "child waitid vfork",
    "disk": "buffered_read direct_read directory_read fsync_flush fsync_inode fsync_pages",
    "epoll": "epoll",
    "file_lock": "flock posix_lock",
    "futex": "futex futex_pi futex_timeout",
    "kernel_lock": "kernel_lock_in_fault kernel_lock_of_mapping kernel_lock_write",
    "kernel_thread": "kernel_thread_of_cpu kernel_worker",
    "other": "affinity eventfd inotify message_queue semaphore",
    "page_fault": "fault_of_loader page_fault user_fault",
    "pipe": "fifo_open pipe_read pipe_write",
    "poll": "poll select",
    "signal": "pause signal sigsuspend",
    "sleep": "sleep timerfd",
    "socket_accept": "tcp_accept unix_accept",
    "socket_connect": "tcp_connect unix_connect",
    "socket_receive": "tcp_receive udp_receive unix_dgram_receive unix_receive",
    "socket_send": "tcp_send unix_send",
    "stop": "stop trace",
    "terminal": "terminal",
}
SCHEDULER = re.compile(
    r"(io_)?schedule\w*|rt_mutex_s\w+|do_nanosleep|__wait_(for|on)\w+|out_of_line_wait\w+|bit_wait_io"
    r"|wait_for_completion\w*|rwsem_down\w+|down_\w+"
)
EXPECTED = [(name, cause) for cause, names in CAUSES.items() for name in names.split()]
FUTEX = ("schedule", "futex_wait_queue", "futex_wait", "do_futex", "__x64_sys_futex")
TAKE_GIL = ("pthread_cond_timedwait", "take_gil.constprop.0", "PyEval_RestoreThread")


def captured(name):
    return (WAITS / f"{name}.txt").read_text().split()


@pytest.mark.parametrize(("name", "cause"), EXPECTED, ids=[name for name, _ in EXPECTED])
def test_captured_stacks_are_assigned_the_correct_wait_cause(name, cause):
    assert find_cause(WaitState.INTERRUPTIBLE, captured(name)).label == cause


@pytest.mark.parametrize("name", [name for name, _ in EXPECTED])
def test_frames_in_the_sampling_bpf_program_are_ignored(name):
    above = ["bpf_prog_0123456789abcdef_on_switch", "bpf_trace_run4", "__bpf_trace_sched_switch"]
    above += ["__traceiter_sched_switch", "__schedule"]
    kernel = captured(name)
    assert find_cause(WaitState.INTERRUPTIBLE, [*above, *kernel]) is find_cause(
        WaitState.INTERRUPTIBLE, kernel
    )


@pytest.mark.parametrize(("name", "cause"), EXPECTED, ids=[name for name, _ in EXPECTED])
def test_threads_already_asleep_are_assigned_the_correct_wait_cause(name, cause):
    """Stacks of sleeping threads omit .sched.text functions, such as those that acquire locks."""
    kernel = [one for one in captured(name) if not SCHEDULER.fullmatch(one)]
    result = find_cause(WaitState.INTERRUPTIBLE, kernel, in_iowait=cause == "disk")
    if cause == "kernel_lock":  # the cause is less specific without scheduler frames
        assert result in (WaitCause.OTHER, WaitCause.PAGE_FAULT, WaitCause.KERNEL_LOCK)
    else:
        assert result.label == cause


def test_every_captured_stack_is_tested():
    tested = {name for name, _ in EXPECTED} | {"preempted"}
    assert tested == {path.stem for path in WAITS.glob("*.txt")}


def test_only_the_listed_wait_causes_count_as_idle():
    assert {cause.label for cause in WaitCause if cause.is_idle} == {
        "epoll", "io_uring", "kernel_thread", "poll", "pool", "signal", "sleep", "socket_accept",
        "terminal",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "flags", "cause"),
    [
        (WaitState.RUNNABLE, {}, WaitCause.RUN_QUEUE),
        (WaitState.RUNNABLE, {"is_throttled": True}, WaitCause.THROTTLED),
        (WaitState.RUNNABLE, {"in_iowait": True}, WaitCause.RUN_QUEUE),
        (WaitState.STOPPED, {}, WaitCause.STOP),
        (WaitState.IDLE, {}, WaitCause.KERNEL_THREAD),
        (WaitState.UNINTERRUPTIBLE, {}, WaitCause.PAGE_FAULT),
    ],
)
def test_the_thread_state_takes_precedence_over_the_stack(state, flags, cause):
    assert find_cause(state, captured("page_fault"), **flags) is cause


def test_preempted_threads_are_recorded_as_waiting_for_a_cpu():
    assert find_cause(WaitState.RUNNABLE, captured("preempted")) is WaitCause.RUN_QUEUE


def test_throttled_threads_are_identified_by_their_stack_since_linux_6_18():
    kernel = ["schedule", "throttle_cfs_rq_work", "task_work_run", "exit_to_user_mode_loop"]
    assert find_cause(WaitState.RUNNABLE, kernel) is WaitCause.THROTTLED


@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        # The innermost recognized function determines the cause.
        (["io_schedule", "shrink_node", "try_to_free_pages", "handle_mm_fault"], "memory_reclaim"),
        (["schedule", "__mutex_lock", "pipe_write", "vfs_write"], "kernel_lock"),
        (["io_schedule", "filemap_fault", "handle_mm_fault", "pipe_read"], "page_fault"),
        # 5.10
        (["schedule", "futex_wait_queue_me", "futex_wait", "do_futex"], "futex"),
        (["schedule", "pipe_wait_readable", "pipe_read", "new_sync_read"], "pipe"),
        (["schedule", "wait_for_completion_killable", "kernel_clone"], "child"),
        (["schedule", "synchronize_rcu", "kernel_clone"], "other"),
        # Kernel workers that wait within a work item.
        (["io_schedule", "blk_wait_io", "process_one_work", "worker_thread", "kthread"], "disk"),
        (["schedule", "synchronize_rcu", "process_one_work", "worker_thread", "kthread"], "other"),
        (["schedule"], "other"),
        ([], "other"),
    ],
)  # fmt: skip
def test_the_innermost_recognized_function_determines_the_cause(kernel, cause):
    assert find_cause(WaitState.INTERRUPTIBLE, kernel).label == cause


def test_kernel_threads_that_wait_uninterruptibly_are_not_idle():
    assert find_cause(WaitState.UNINTERRUPTIBLE, captured("kernel_worker")) is WaitCause.OTHER


def test_the_block_io_flag_determines_the_cause_without_symbols():
    assert find_cause(WaitState.UNINTERRUPTIBLE, [], in_iowait=True) is WaitCause.DISK


def test_a_futex_wait_is_attributed_to_the_gil_only_if_the_user_stack_proves_it():
    assert find_cause(WaitState.INTERRUPTIBLE, FUTEX, TAKE_GIL) is WaitCause.GIL
    lock = ("pthread_cond_timedwait", "PyThread_acquire_lock_timed", "lock_PyThread_acquire_lock")
    assert find_cause(WaitState.INTERRUPTIBLE, FUTEX, lock) is WaitCause.FUTEX
    assert find_cause(WaitState.INTERRUPTIBLE, captured("sleep"), TAKE_GIL) is WaitCause.SLEEP


def frames(side, names):
    return Side(side, tuple(Frame(None, 1, (Line(name),), 0, side) for name in names))


def test_wait_causes_are_derived_from_resolved_stacks():
    stack = Stack((frames(KERNEL_SIDE, FUTEX), frames(USER_SIDE, TAKE_GIL)))
    assert find_stack_cause(WaitState.INTERRUPTIBLE, stack) is WaitCause.GIL
    without_names = Side(USER_SIDE, RawFrames(USER_SIDE, [1, 2], Unresolved.USER_ADDRESS))
    stack = Stack((frames(KERNEL_SIDE, FUTEX), without_names))
    assert find_stack_cause(WaitState.INTERRUPTIBLE, stack) is WaitCause.FUTEX
    assert find_stack_cause(WaitState.RUNNABLE, stack, is_throttled=True) is WaitCause.THROTTLED


INTERPRETER = Module("python3.11", ModuleKind.USER, None, FileId("1"), 0)
EXTENSION = Module("lz4.so", ModuleKind.USER, None, FileId("2"), 0)


def native(module, *names):
    """Returns native frames in a module. Empty names stand for unnamed functions."""
    return tuple(Frame(module, 1, (Line(name),) if name else (), 0, USER_SIDE) for name in names)


MAIN = native(INTERPRETER, "Py_RunMain")
PYTHON_FRAMES = frames(PYTHON_SIDE, ("work",))
WAITING = native(None, "", "pthread_cond_timedwait")


@pytest.mark.parametrize(
    ("sides", "cause"),
    [
        ([native(INTERPRETER, "", "PyEval_RestoreThread")], WaitCause.GIL),
        ([native(INTERPRETER, "PyEval_RestoreThread")], WaitCause.GIL),
        ([native(INTERPRETER, "", "", "_PyEval_EvalFrameDefault")], WaitCause.GIL),
        ([native(INTERPRETER, "", ""), PYTHON_FRAMES, MAIN], WaitCause.GIL),
        ([native(EXTENSION, ""), PYTHON_FRAMES, MAIN], WaitCause.FUTEX),
        ([native(EXTENSION, ""), native(INTERPRETER, "_PyEval_EvalFrameDefault")], WaitCause.FUTEX),
        ([native(EXTENSION, "poll_queue"), PYTHON_FRAMES], WaitCause.FUTEX),
        ([native(INTERPRETER, "", "PyThread_acquire_lock")], WaitCause.FUTEX),
        ([native(INTERPRETER, "")], WaitCause.FUTEX),
    ],
)
def test_a_gil_wait_is_recognized_despite_an_unnamed_function(sides, cause):
    sides = [side if isinstance(side, Side) else Side(USER_SIDE, side) for side in sides]
    stack = Stack((frames(KERNEL_SIDE, FUTEX), Side(USER_SIDE, WAITING), *sides))
    assert find_stack_cause(WaitState.INTERRUPTIBLE, stack) is cause


def test_the_documentation_states_for_every_wait_cause_whether_it_is_idle():
    rows = re.findall(r"^\| `(\w+)` \| .* \| (yes )?\|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: bool(idle) for name, idle in rows}
    assert listed == {cause.label: cause.is_idle for cause in WaitCause}
