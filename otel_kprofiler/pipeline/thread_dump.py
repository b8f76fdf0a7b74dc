"""Dumps the states and stacks of threads: reader → symbols → thread states."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Final

from otel_kprofiler.bpf import IN_IOWAIT, DumpRow, ProcessSeen, get_loader
from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access, PatientMaps, read_stat
from otel_kprofiler.interpreters import PythonProcesses
from otel_kprofiler.model import (
    TRUNCATED_STACKS,
    USER_SIDE,
    KnownCodes,
    KnownFiles,
    KnownLoops,
    LabelSet,
    ProcessState,
    RawSample,
    Stack,
    StackEnd,
    ThreadState,
    find_stack_cause,
)
from otel_kprofiler.pipeline.composition import make_stacks
from otel_kprofiler.processes import ProcessResources
from otel_kprofiler.sampling import SamplerConfig, ThreadReader, ThreadReading
from otel_kprofiler.stopping import join_all
from otel_kprofiler.symbols import KernelSymbolizer, UserNames, UserResolver
from otel_kprofiler.text import decode_name, describe_count

_PASSES: Final = 40
_WAIT_S: Final = 0.02
"""Pause in seconds between two reads of stacks whose unwind tables are being loaded."""
_MOST_WAIT_S: Final = 1.0
_NAMES_S: Final = 5.0
"""Time limit, in seconds, for reading user function names."""
_CAUGHT_UP_TRIES: Final = 25
_NO_STACK: Final = Stack()
_PENDING: Final = next(s for s, end in TRUNCATED_STACKS.items() if end is StackEnd.PENDING)


class ThreadDumper:
    """Dumps the threads of the processes in ``config.target_pids``. Not thread-safe.

    The constructor loads the BPF program and unwind tables, and finds the processes' interpreters.
    Closing the dumper also closes ``symbolizer``, ``resources`` and ``user_names``.

    Raises:
        DependencyError: libbpf is missing.
        HostError: the kernel refuses the BPF program or lacks a feature.
        SamplerError: the verifier rejects the program.
    """

    def __init__(
        self,
        config: SamplerConfig,
        *,
        access: Access,
        clock: Clock,
        symbolizer: KernelSymbolizer,
        resources: ProcessResources,
        user_names: UserNames | None,
    ) -> None:
        self._config, self._clock = config, clock
        self._files = PatientMaps(access)
        self._resources = resources
        files = KnownFiles(on_opened=user_names.add if user_names else None)
        codes, loops = KnownCodes(), KnownLoops()
        self._stacks = make_stacks(
            symbolizer, UserResolver(files, user_names), codes, {}, loops=loops
        )
        self._python: PythonProcesses | None = None
        self._unpermitted = 0
        self._looks_for_contexts = True
        with contextlib.ExitStack() as undo:
            undo.callback(resources.close)
            undo.callback(self._stacks.close)
            symbolizer.advance(clock.boot_ns())  # starts tracking changes
            undo.callback(self._stop_reading)
            self._reader = ThreadReader(
                config,
                access=self._files,
                loader=get_loader("libbpf"),
                user_files=files,
                python_codes=codes,
            )
            undo.callback(self._reader.close)
            resources.follow_threads(self._reader.contexts)
            if self._reader.python is not None:
                self._python = PythonProcesses(
                    self._reader.python,
                    self._files,
                    lambda interpreter: loops.add(interpreter.build_id, interpreter.eval_loop),
                )
                self._find_interpreters(self._python)
            self._close = undo.pop_all().close

    def dump(self) -> list[ProcessState]:
        """Returns the state of each running process and its threads, sorted by process id.

        Raises:
            OSError: the kernel refused to run the BPF iterator.
        """
        reading = self._read()
        now_ns = max((row.time_ns for row in reading.rows), default=0)
        for _ in range(_CAUGHT_UP_TRIES):
            if self._stacks.advance(self._clock.boot_ns()) >= now_ns:
                break
            time.sleep(_WAIT_S)
        stacks = {tid: self._stacks.resolve(sample) for tid, sample in reading.samples.items()}
        if any(stack.is_provisional for stack in stacks.values()):
            self._stacks.finish(_NAMES_S)
            stacks = {tid: self._stacks.resolve(sample) for tid, sample in reading.samples.items()}
        ahead_ns = min((row.monotonic_ns - row.clock_ns for row in reading.rows), default=0)
        by_process: dict[int, list[DumpRow]] = {}
        for row in reading.rows:
            by_process.setdefault(row.tgid, []).append(row)
        return [
            self._describe(tgid, rows, stacks, reading.samples, ahead_ns)
            for tgid, rows in sorted(by_process.items())
        ]

    def remarks(self) -> list[str]:
        """Returns report lines that explain why data could not be read."""
        lines = []
        if self._reader.user_problem and self._config.stacks != "kernel":
            lines.append(f"user stacks not read: {self._reader.user_problem}")
        refused = self._python.counts().refused_processes if self._python else {}
        lines += [
            f"Python frames of {describe_count(count, 'process', 'processes')} not read: "
            f"{reason.value}"
            for reason, count in refused.items()
        ]
        for pid in sorted(self._files.locked.intersection(self._config.target_pids)):
            lines.append(
                f"process {pid} is stuck holding its mmap_lock, so user and Python frames in files "
                "outside the usual directories are missing"
            )
        if self._unpermitted:
            count = describe_count(self._unpermitted, "process", "processes")
            lines.append(f"Python frames of {count} not read: CAP_SYS_PTRACE is missing")
        return lines + self._resources.remarks()

    def close(self) -> None:
        """Release all resources."""
        self._close()

    def _find_interpreters(self, processes: PythonProcesses) -> None:
        for pid in self._config.target_pids:
            try:
                processes.inspect(ProcessSeen(pid, 0))
            except PermissionError:
                self._unpermitted += 1

    def _stop_reading(self) -> None:
        self._files.stop()
        join_all(self._python.stop() if self._python else ())

    def _read(self) -> ThreadReading:
        """Read the threads. The first call reads the threads twice, to find their contexts."""
        reading = self._read_stacks()
        if self._looks_for_contexts:
            self._looks_for_contexts = False
            by_process = {sample.process: sample for sample in reading.samples.values()}
            # Registers the processes that publish thread contexts.
            self._resources.renew([self._resources.get(sample) for sample in by_process.values()])
            reading = self._read_stacks()
        return reading

    def _read_stacks(self) -> ThreadReading:
        """Read the stacks, retrying while unwind tables are being loaded."""
        until_s = time.monotonic() + _MOST_WAIT_S
        for _ in range(_PASSES):
            reading = self._reader.read()
            if time.monotonic() > until_s or not any(
                (USER_SIDE, _PENDING) in sample.collected for sample in reading.samples.values()
            ):
                break
            time.sleep(_WAIT_S)
        return reading

    def _describe(
        self,
        tgid: int,
        rows: Sequence[DumpRow],
        stacks: Mapping[int, Stack],
        samples: Mapping[int, RawSample],
        ahead_ns: int,
    ) -> ProcessState:
        threads = [
            self._describe_thread(
                row, stacks.get(row.tid, _NO_STACK), samples.get(row.tid), ahead_ns
            )
            for row in rows
            if not row.has_ended
        ]
        stat = read_stat(self._files, tgid)
        name = stat.name if stat else b""
        return ProcessState(
            tgid, decode_name(name), tuple(threads), len(rows) - len(threads), rows[-1].time_ns
        )

    def _describe_thread(
        self, row: DumpRow, stack: Stack, sample: RawSample | None, ahead_ns: int
    ) -> ThreadState:
        state = row.wait_state
        waited_ns = None
        if state is not None and row.since_ns:
            waited_ns = max(0, row.monotonic_ns - ahead_ns - row.since_ns)
        link = sample.link if sample else None
        labels: LabelSet = ()
        if sample is not None and sample.context:
            link, labels = self._resources.decode_context(sample.process, sample.context, link)
        return ThreadState(
            row.tgid,
            row.tid,
            decode_name(row.comm),
            state,
            waited_ns,
            None
            if state is None
            else find_stack_cause(state, stack, in_iowait=bool(row.flags & IN_IOWAIT)),
            stack,
            row.switches,
            link,
            labels,
        )


def compare_dumps(
    first: Sequence[ProcessState], second: Sequence[ProcessState]
) -> list[ProcessState]:
    """Returns the second dump, marking threads that ran or whose stack changed since the first."""
    earlier = {
        (process.tgid, thread.tid): thread for process in first for thread in process.threads
    }
    return [
        process._replace(
            threads=tuple(
                thread._replace(has_moved=_has_moved(old, thread))
                if (old := earlier.get((process.tgid, thread.tid)))
                else thread
                for thread in process.threads
            )
        )
        for process in second
    ]


def _has_moved(old: ThreadState, new: ThreadState) -> bool:
    return new.state is None or old.switches != new.switches or old.stack.frames != new.stack.frames
