"""Scheduler frames are removed from wait stacks, and stacks of idle pools are recognized."""

import pytest

from otel_kprofiler.formats import stack_entries
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    STACK_NOT_CAPTURED,
    STACK_OK,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Side,
    Stack,
    WaitCause,
    WaitStacks,
    WaitState,
    find_stack_cause,
)

VMLINUX = Module("vmlinux", ModuleKind.VMLINUX, None, FileId("0" * 32), 1 << 63)
SCHEDULER = range(0x1000, 0x2000)
ADDRESSES = {
    "__schedule": 0x1000,
    "schedule": 0x1100,
    "do_nanosleep": 0x1200,
    "__mutex_lock": 0x1300,
}
ROOT = ["hrtimer_nanosleep", "do_syscall_64"]


def kernel(names):
    return Side(
        KERNEL_SIDE,
        tuple(
            Frame(VMLINUX, ADDRESSES.get(name, 0x9000), (Line(name),), 0, KERNEL_SIDE)
            for name in names
        ),
    )


def names(stack):
    return [frame.function for frame in stack.frames]


@pytest.mark.parametrize(
    "above",
    [
        [],
        ["__schedule", "schedule", "do_nanosleep"],
        ["bpf_prog_1_kprofiler_switch", "bpf_trace_run4", "__schedule", "schedule", "do_nanosleep"],
        ["bpf_prog_1_kprofiler_switch", "bpf_trace_run4", "__traceiter_sched_switch", "__schedule",
         "schedule", "do_nanosleep"],
    ],
)  # fmt: skip
def test_equal_waits_share_a_stack_regardless_of_scheduler_frames(above):
    stacks = WaitStacks(SCHEDULER)
    late = stacks.cut(Stack((kernel(ROOT),)))
    assert stacks.cut(Stack((kernel([*above, *ROOT]),))) is late
    assert names(late) == ROOT
    assert stacks.cut(late) is late


def test_scheduler_frames_are_recognized_by_name_if_no_markers_are_given():
    stack = WaitStacks().cut(Stack((kernel(["bpf_prog_1", "__schedule", "schedule", *ROOT]),)))
    assert names(stack) == ROOT


def test_the_root_frame_of_a_stack_with_only_scheduler_frames_is_kept():
    stack = WaitStacks(SCHEDULER).cut(Stack((kernel(["__schedule", "schedule"]),)))
    assert names(stack) == ["schedule"]


def test_a_missing_user_stack_is_reported_except_for_kernel_threads():
    none = Side(USER_SIDE, (), STACK_NOT_CAPTURED)
    stack = WaitStacks(SCHEDULER).cut(Stack((kernel(ROOT), none)))
    assert stack_entries(stack)[0].name == "[user stack not captured]"
    stack = WaitStacks(SCHEDULER).cut(Stack((kernel(["worker_thread", "kthread"]), none)))
    assert [entry.name for entry in stack_entries(stack)] == ["kthread", "worker_thread"]
    assert stack.sides[1].status == STACK_OK


FUTEX = kernel(["futex_do_wait", "do_futex"])


def user(*functions):
    return Side(USER_SIDE, tuple(Frame(None, 1, (Line(name),), 0, USER_SIDE) for name in functions))


def python(*lines):
    return Side(
        PYTHON_SIDE,
        tuple(Frame(None, 1, (Line(name, file=file),), 0, PYTHON_SIDE) for name, file in lines),
    )


WORKER = ("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py")
WAIT = ("Condition.wait", "/usr/lib/python3.11/threading.py")
GET = ("Queue.get", "/usr/lib/python3.11/queue.py")


@pytest.mark.parametrize(
    ("side", "cause"),
    [
        (python(WORKER, ("Thread.run", WAIT[1])), WaitCause.POOL),
        (python(WAIT, GET, WORKER), WaitCause.POOL),
        (python(("worker", "/usr/lib/python3.11/multiprocessing/pool.py")), WaitCause.POOL),
        (python(WAIT, ("Future.result", "/srv/app.py"), WORKER), WaitCause.FUTEX),
        (python(WAIT, GET, ("consume", "/srv/app.py")), WaitCause.FUTEX),
        (python(("_worker", "/srv/thread.py")), WaitCause.FUTEX),
        (user("runtime.futex.abi0", "runtime.notesleep", "runtime.stopm", "runtime.findRunnable"),
         WaitCause.POOL),
        (user("runtime.notesleep", "runtime.stopm", "runtime.gcstopm"), WaitCause.FUTEX),
        (user("pthread_cond_wait", "uv_cond_wait", "worker", "start_thread"), WaitCause.POOL),
        (user("pthread_cond_wait", "uv_cond_wait", "main"), WaitCause.FUTEX),
        (user("pthread_cond_timedwait", "Monitor::wait(long)", "CompileQueue::get()",
              "CompileBroker::compiler_thread_loop()"), WaitCause.POOL),
        (user("Unsafe_Park", "Runnable java.util.concurrent.ThreadPoolExecutor.getTask()"),
         WaitCause.POOL),
        (user("Unsafe_Park", "java.util.concurrent.FutureTask.get()"), WaitCause.FUTEX),
    ],
)  # fmt: skip
def test_waits_of_pool_threads_without_work_are_classified_as_idle(side, cause):
    stack_cause = find_stack_cause(WaitState.INTERRUPTIBLE, Stack((FUTEX, side)))
    assert stack_cause is cause
    assert stack_cause.is_idle is (cause is WaitCause.POOL)
