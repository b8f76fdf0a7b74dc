"""Classifies wait causes by the functions in which threads wait.

Function names are from Linux 5.10 to 6.18. For functions that compilers inline, the tables also
list their callers.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Final

from otel_kprofiler.model.stack import KERNEL_SIDE, PYTHON_SIDE, USER_SIDE, Stack
from otel_kprofiler.model.wait import WaitState
from otel_kprofiler.model.wait_pool import is_idle_in_pool


class WaitCause(enum.Enum):
    """The cause of a wait. Values appear in reports and in exported profiles."""

    RUN_QUEUE = "run_queue"
    """Runnable, but other threads occupy the CPU."""
    THROTTLED = "throttled"
    """The thread's cgroup has used up its CPU quota."""
    DISK = "disk"
    """Reads from and writes to a block device, including file pages and buffers."""
    PAGE_FAULT = "page_fault"
    """Memory that is not yet resident, such as pages of a mapped file."""
    MEMORY_RECLAIM = "memory_reclaim"
    """Memory reclaim, or throttling because the thread's cgroup exceeds a memory limit."""
    KERNEL_LOCK = "kernel_lock"
    """A kernel lock, such as ``mmap_lock``."""
    FILE_LOCK = "file_lock"
    """A file lock: ``flock``, ``lockf`` or an ``fcntl`` record lock."""
    FUTEX = "futex"
    """A futex, which underlies user-space locks and condition variables."""
    GIL = "gil"
    PIPE = "pipe"
    """Waiting for data or free space in a pipe or FIFO, or for its other end to be opened."""
    SOCKET_RECEIVE = "socket_receive"
    SOCKET_SEND = "socket_send"
    SOCKET_ACCEPT = "socket_accept"
    SOCKET_CONNECT = "socket_connect"
    POLL = "poll"
    EPOLL = "epoll"
    IO_URING = "io_uring"
    SLEEP = "sleep"
    """A timer: in ``nanosleep`` or a similar call, or in a read from a ``timerfd``."""
    SIGNAL = "signal"
    """``pause``, ``sigsuspend``, ``sigwait`` and similar calls."""
    TERMINAL = "terminal"
    CHILD = "child"
    """A child process's exit, or its execve(2) after ``vfork``."""
    STOP = "stop"
    """Stopped by a signal, a debugger or the freezer."""
    POOL = "pool"
    """An idle pool thread in Python, Go, Java or libuv, waiting for work."""
    KERNEL_THREAD = "kernel_thread"
    OTHER = "other"

    __hash__ = object.__hash__  # Enum's __hash__ is Python code

    @property
    def label(self) -> str:
        """Returns the name used in reports and OTLP."""
        return self.value

    @property
    def is_idle(self) -> bool:
        """Returns whether a thread with this wait cause is only waiting for work."""
        return self in _IDLE


_IDLE: Final = frozenset({
    WaitCause.SOCKET_ACCEPT, WaitCause.POLL, WaitCause.EPOLL, WaitCause.IO_URING, WaitCause.SLEEP,
    WaitCause.SIGNAL, WaitCause.TERMINAL, WaitCause.POOL, WaitCause.KERNEL_THREAD,
})  # fmt: skip

PROOFS: Final[Mapping[WaitCause, str]] = {
    WaitCause.PAGE_FAULT: "handle_mm_fault exc_page_fault do_user_addr_fault do_page_fault"
    " do_mem_abort faultin_page",
    WaitCause.MEMORY_RECLAIM: "try_to_free_pages try_to_free_mem_cgroup_pages shrink_node"
    " shrink_lruvec reclaim_throttle throttle_direct_reclaim congestion_wait"
    " mem_cgroup_handle_over_high __mem_cgroup_handle_over_high try_to_compact_pages"
    " mem_cgroup_oom_synchronize out_of_memory",
    WaitCause.KERNEL_LOCK: "__mutex_lock mutex_lock mutex_lock_killable mutex_lock_interruptible"
    " mutex_lock_io __mutex_lock_slowpath __mutex_lock_killable_slowpath"
    " __mutex_lock_interruptible_slowpath ww_mutex_lock __ww_mutex_lock"
    " rwsem_down_read_slowpath rwsem_down_write_slowpath down_read down_write down_read_killable"
    " down_write_killable __down __down_common __down_interruptible __down_killable"
    " __down_timeout __percpu_down_read percpu_down_write percpu_rwsem_wait __vma_start_write"
    " rt_spin_lock rtlock_slowlock rtlock_slowlock_locked rt_mutex_slowlock rwbase_read_lock"
    " rwbase_write_lock __rwbase_read_lock __lock_sock",
    WaitCause.FILE_LOCK: "locks_lock_inode_wait flock_lock_inode_wait posix_lock_inode_wait"
    " locks_lock_file_wait do_lock_file_wait fcntl_setlk fcntl_setlk64 __do_sys_flock"
    " __break_lease",
    WaitCause.FUTEX: "do_futex futex_wait __futex_wait futex_wait_queue futex_wait_queue_me"
    " futex_do_wait futex_lock_pi futex_wait_requeue_pi futex_wait_multiple"
    " futex_wait_restart",
    WaitCause.PIPE: "pipe_read pipe_write anon_pipe_read anon_pipe_write fifo_pipe_read"
    " fifo_pipe_write pipe_wait pipe_wait_readable pipe_wait_writable wait_for_partner"
    " fifo_open",
    WaitCause.SOCKET_RECEIVE: "sock_recvmsg sock_read_iter sock_splice_read __sys_recvfrom"
    " __sys_recvmsg ___sys_recvmsg ____sys_recvmsg do_recvmmsg kernel_recvmsg",
    WaitCause.SOCKET_SEND: "sock_sendmsg __sock_sendmsg sock_write_iter __sys_sendto"
    " __sys_sendmsg ___sys_sendmsg ____sys_sendmsg __sys_sendmmsg kernel_sendmsg",
    WaitCause.SOCKET_ACCEPT: "do_accept __sys_accept4 __sys_accept4_file inet_csk_accept"
    " inet_accept unix_accept",
    WaitCause.SOCKET_CONNECT: "__sys_connect __sys_connect_file inet_stream_connect"
    " __inet_stream_connect unix_stream_connect",
    WaitCause.POLL: "do_sys_poll do_poll do_select core_sys_select poll_schedule_timeout"
    " do_pselect",
    WaitCause.EPOLL: "do_epoll_wait ep_poll do_epoll_pwait",
    WaitCause.IO_URING: "io_cqring_wait io_cqring_wait_schedule io_cqring_schedule_timeout",
    WaitCause.SLEEP: "hrtimer_nanosleep do_nanosleep common_nsleep common_nsleep_timens"
    " alarm_timer_nsleep timerfd_read timerfd_read_iter",
    WaitCause.SIGNAL: "do_sigtimedwait sigsuspend signalfd_read signalfd_read_iter"
    " signalfd_dequeue",
    WaitCause.TERMINAL: "n_tty_read",
    WaitCause.CHILD: "do_wait kernel_wait4 kernel_waitid wait_for_vfork_done",
    WaitCause.STOP: "do_signal_stop ptrace_stop ptrace_notify do_freezer_trap __refrigerator"
    " do_jobctl_trap",
}
"""Functions that imply a wait cause if the thread is waiting in them or in their callees. If the
stack contains several of these functions, the innermost one determines the cause."""

DIRECT_PROOFS: Final[Mapping[WaitCause, str]] = {
    WaitCause.CHILD: "kernel_clone",
    WaitCause.SIGNAL: "__x64_sys_pause __ia32_sys_pause __arm64_sys_pause __do_sys_pause"
    " __se_sys_pause sys_pause",
    WaitCause.KERNEL_THREAD: "kthreadd io_wq_worker vhost_task_fn",
}
"""Functions that imply a cause only if the thread waits in them directly, not in a callee."""

DISK_PROOFS: Final = (
    "io_schedule io_schedule_timeout submit_bio_wait blk_wait_io wait_for_completion_io "
    "wait_for_completion_io_timeout jbd2_log_wait_commit folio_wait_writeback "
    "wait_on_page_writeback balance_dirty_pages"
)
"""Functions that imply :attr:`WaitCause.DISK`, absent another cause, such as a page fault."""

GIL_PROOFS: Final = "take_gil drop_gil drop_gil_impl"
"""CPython functions that wait for the GIL, or for another thread to acquire it."""

GIL_TAKERS: Final = (
    "PyEval_RestoreThread PyEval_AcquireThread PyEval_AcquireLock PyGILState_Ensure"
    " _PyThreadState_Attach _PyEval_EvalFrameDefault"
)
"""Exported CPython functions that call ``take_gil()`` and do not wait on other condition variables
(``Python/ceval_gil.c``). Distributions strip the symbol for ``take_gil()`` itself."""


def _invert(table: Mapping[WaitCause, str]) -> dict[str, WaitCause]:
    return {name: cause for cause, names in table.items() for name in names.split()}


_CAUSES: Final = _invert(PROOFS)
_DIRECT: Final = _invert(DIRECT_PROOFS)
_DISK: Final = frozenset(DISK_PROOFS.split())
_GIL: Final = frozenset(GIL_PROOFS.split())
_GIL_TAKERS: Final = frozenset(GIL_TAKERS.split())
_CONDITION_WAITS: Final = frozenset({"pthread_cond_timedwait", "pthread_cond_wait"})
_OF_STATE: Final = {
    WaitState.STOPPED: WaitCause.STOP,
    WaitState.IDLE: WaitCause.KERNEL_THREAD,
}
_WAITING: Final = re.compile(
    r"(?:__)?(?:io_|freezable_|preempt_)?schedule(?:_\w+)?|__cond_resched|__wait_for_common"
    r"|do_wait_for_common|wait_for_completion\w*|wait_for_common|do_wait_intr(?:_irq)?|wait_woken"
    r"|bpf_\w+|__bpf_\w+|__traceiter_\w+|trace_\w+|ftrace_trampoline"
)
"""Matches generic wait functions, and tracer functions that run at ``sched_switch``."""


def find_cause(
    state: WaitState,
    kernel: Sequence[str],
    user: Iterable[str] = (),
    *,
    in_iowait: bool = False,
    is_throttled: bool = False,
) -> WaitCause:
    """Returns the cause of a wait; :attr:`WaitCause.OTHER` if no cause matches.

    If several causes match, the first in this order is returned: the cause that the state implies
    (a runnable thread waits for a CPU, whatever its stack), :data:`DIRECT_PROOFS`, :data:`PROOFS`,
    :attr:`WaitCause.KERNEL_THREAD` if a kernel thread's main function waits, and
    :attr:`WaitCause.DISK`.

    Args:
        state: why the thread is off the CPU.
        kernel: names of the kernel functions on the thread's stack, leaf first; compiler suffixes
            (``.isra.0``) are ignored; empty if the names are hidden or unknown.
        user: names of the native functions on the thread's stack; compiler suffixes are ignored.
        in_iowait: whether the kernel marked the thread as waiting for block I/O.
        is_throttled: whether the thread's cgroup has used up its CPU quota.
    """
    names = [name.partition(".")[0] for name in kernel]
    if state is WaitState.RUNNABLE:
        throttled = is_throttled or "throttle_cfs_rq_work" in names
        return WaitCause.THROTTLED if throttled else WaitCause.RUN_QUEUE
    cause = _OF_STATE.get(state) or _find_proved(state, names)
    if cause is WaitCause.FUTEX and not _GIL.isdisjoint(name.partition(".")[0] for name in user):
        return WaitCause.GIL
    if cause is None and (in_iowait or not _DISK.isdisjoint(names)):
        return WaitCause.DISK
    return cause or WaitCause.OTHER


def _find_proved(state: WaitState, names: Sequence[str]) -> WaitCause | None:
    """Returns the cause that function names imply, except ``DISK``; None if they imply no cause."""
    waiting = next((at for at, name in enumerate(names) if not _WAITING.fullmatch(name)), 0)
    direct = [_DIRECT[name] for name in names[waiting : waiting + 1] if name in _DIRECT]
    if causes := direct or [_CAUSES[name] for name in names if name in _CAUSES]:
        return causes[0]
    is_main = names[waiting + 1 : waiting + 2] == ["kthread"]
    return WaitCause.KERNEL_THREAD if is_main and state is WaitState.INTERRUPTIBLE else None


def find_stack_cause(
    state: WaitState, stack: Stack, *, in_iowait: bool = False, is_throttled: bool = False
) -> WaitCause:
    """Returns the cause of a wait from its resolved stack."""
    kernel: list[str] = []
    user: list[str] = []
    for side in stack.sides:
        if side.kind is KERNEL_SIDE:
            kernel += [line.function for frame in side.frames for line in frame.lines]
        elif side.kind is USER_SIDE:
            user += [line.function for frame in side.frames for line in frame.lines]
    cause = find_cause(state, kernel, user, in_iowait=in_iowait, is_throttled=is_throttled)
    if cause is not WaitCause.FUTEX:
        return cause
    if _takes_gil(stack):
        return WaitCause.GIL
    return WaitCause.POOL if is_idle_in_pool(stack) else cause


def _takes_gil(stack: Stack) -> bool:
    """Returns whether a thread is waiting in ``take_gil()``, where that symbol is stripped.

    Recognizes ``take_gil()`` as an unnamed function that is in the interpreter's file and waits on
    a condition variable. The caller of ``take_gil()`` must be in :data:`GIL_TAKERS`, or be the
    evaluation loop, in which case the stack has Python frames.
    """
    frames = [
        frame for side in stack.sides if side.kind in (USER_SIDE, PYTHON_SIDE)
        for frame in side.frames
    ]  # fmt: skip
    waits = (at for at, frame in enumerate(frames) if frame.function in _CONDITION_WAITS)
    callers = frames[next(waits, len(frames)) + 1 :]
    unnamed = list(takewhile(lambda frame: frame.side is USER_SIDE and not frame.lines, callers))
    if len(unnamed) == len(callers):
        return False
    taker = callers[len(unnamed)]
    interpreters = {
        frame.module
        for frame in callers
        if frame.side is USER_SIDE and frame.function.startswith(("Py", "_Py"))
    }
    return (taker.side is PYTHON_SIDE or taker.function in _GIL_TAKERS) and all(
        frame.module in interpreters for frame in unnamed
    )
