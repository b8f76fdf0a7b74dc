"""Each sample is resolved to the exact name that the ksymbol had when the sample was taken."""

import contextlib
import errno
import multiprocessing
import os
import resource
import subprocess
import threading
import time
from pathlib import Path

import pytest
from programs import churn_command, close_all, kallsyms, load, run
from samplers import offline, sampling

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.bpf import SAMPLER_OBJECT
from otel_kprofiler.bpf.libbpf import LibbpfLoader
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import Access
from otel_kprofiler.model import KERNEL_SIDE, ModuleKind, Unresolved
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.symbols import KernelSymbolizer, StackResolver
from otel_kprofiler.tracking import KsymbolWatch, ReadMethod, RecordLoss
from otel_kprofiler.tracking.program_iterator import read_programs
from otel_kprofiler.tracking.programs import ProgramReader
from otel_kprofiler.tracking.record_events import KSYMBOLS, RecordEvents
from tests.raw_forks import check_in_child
from tests.waiting import wait_until

pytestmark = pytest.mark.live

TASKS = Path("/proc/self/task")
BLOCKS = ("bpf", "__builtin__ftrace", "__builtin__kprobes")


def now_ns():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@contextlib.contextmanager
def watching(*, polled=True, **options):
    """Yields a symbolizer and its ksymbol watch, which starts reading the rings if ``polled``."""
    try:
        watch = KsymbolWatch(**options)
    except HostError as error:
        pytest.skip(f"{error}; fix: {error.hint}")
    symbolizer = KernelSymbolizer.live(ksymbols=watch)
    if polled:
        symbolizer.advance(now_ns())
    try:
        yield symbolizer, watch
    finally:
        symbolizer.close()


def catch_up(symbolizer):
    """Advances the symbolizer until it has applied all records written so far."""
    start_ns = now_ns()
    while symbolizer.advance(now_ns()) < start_ns:
        assert now_ns() - start_ns < 120 * 10**9
        time.sleep(0.002)


def known(symbolizer):
    return {(symbol.start, symbol.name) for symbol in symbolizer.ksymbols()}


@contextlib.contextmanager
def programs(count, **options):
    """Loads programs, and at the end of the block unloads those still in the yielded list."""
    fds = []
    try:
        fds += [load(number, **options) for number in range(count)]
        yield fds
    finally:
        close_all(fds)


def wait_unloaded(symbols):
    """Waits until kallsyms no longer lists the symbols; programs are unloaded asynchronously."""
    wait_until(lambda: not symbols & kallsyms(), seconds=120)


def mine(symbols):
    """Returns only the symbols of this module's programs. Other processes also load programs."""
    return {symbol for symbol in symbols if "_kprof_" in symbol[1]}


def test_five_hundred_programs_are_added_and_removed_without_delay():
    with watching() as (symbolizer, watch):
        assert watch.method is ReadMethod.WALK
        fds = [load(number, functions=1 + number % 5) for number in range(500)]
        catch_up(symbolizer)
        there = kallsyms(*BLOCKS)
        functions = {s for s in known(symbolizer) if "kprof_test" in s[1] or s[1].endswith("_F")}
        assert len(functions) == 100 * (1 + 2 + 3 + 4 + 5)
        assert functions <= there
        assert mine(known(symbolizer)) == mine(there)
        close_all(fds)
        wait_unloaded(functions)
        catch_up(symbolizer)
        assert not functions & known(symbolizer)
        assert watch.counts().lost == {}
        assert watch.counts().kallsyms_reads == 0


def test_several_ksymbol_watches_do_not_interfere_with_each_other():
    """The kernel formats records differently when several events are open on a CPU."""
    with watching() as first, watching() as second, watching() as third:
        began_ns = now_ns()
        with programs(20, name="kprof_several"):
            for symbolizer, watch in (first, second, third):
                catch_up(symbolizer)
                results = [s for s in symbolizer.ksymbols() if s.name.endswith("_several")]
                assert len(results) == 20
                assert all(began_ns < symbol.since_ns < now_ns() for symbol in results)
                assert watch.counts().lost == {}


def test_all_previously_loaded_bpf_programs_are_listed():
    """Interfaces other than kallsyms report lengths, so addresses past a program are unnamed."""
    fds = [load(number, functions=1 + number % 9) for number in range(100)]
    try:
        walked = {(s.start, s.name): s for s in ProgramReader().read()}
        listed = {(s.start, s.name): s for s in read_programs(LibbpfLoader())}
        there = {s for s in kallsyms() if "kprof_test" in s[1] or s[1].endswith("_F")}
        assert len(there) == sum(1 + number % 9 for number in range(100))
        assert there <= walked.keys()
        assert {s: walked[s] for s in there} == {s: listed[s] for s in there}
        with watching() as (symbolizer, _):
            catch_up(symbolizer)
            assert mine(known(symbolizer)) == mine(kallsyms(*BLOCKS))
            for start, name in list(there)[:50]:
                symbol = walked[start, name]
                (inside,) = symbolizer.resolve_addresses([start + symbol.length - 1])
                assert inside.function == name
                (past,) = symbolizer.resolve_addresses([start + symbol.length])
                assert past.module is None or past.address == 0
    finally:
        close_all(fds)


def own_programs():
    results = {}
    for file in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            lines = file.read_text().splitlines()
            rows = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if "prog_id" in rows:
                results[int(rows["prog_id"])] = rows["prog_tag"]
    return results


def test_bpf_programs_loaded_with_bcc_or_libbpf_have_names_lines_and_details(loader):
    with watching() as (symbolizer, _), sampling():
        catch_up(symbolizer)
        ((number, tag),) = own_programs().items()
        functions = [s for s in symbolizer.ksymbols() if s.program_id == number]
        (symbol,) = (s for s in functions if s.name.startswith(f"bpf_prog_{tag}_"))
        name = symbol.name
        if loader == "libbpf":
            assert name.endswith(("_kprofiler_sample", "_kprofiler_sample_python"))
        else:  # without BTF, the kernel truncates the name to 15 characters
            assert name.endswith("_kprofiler_sampl")
        assert (symbol.start, name) in kallsyms()
        (frame,) = symbolizer.resolve_addresses([symbol.start])
        assert (frame.module.kind, frame.function, frame.address) == (ModuleKind.BPF, name, 0)
        program = frame.module.program
        assert program[:3] == (number, "perf_event", tag)
        assert 0 < program.load_time_ns < now_ns()
        if loader == "libbpf":
            assert frame.lines[0].file.endswith("sampler.bpf.c")
            source = SAMPLER_OBJECT.with_name("sampler.bpf.c").read_text().splitlines()
            assert 0 < frame.lines[0].line <= len(source)


def test_samples_in_an_unloaded_program_are_symbolized():
    """The dispatcher that the kernel creates for test runs of XDP programs is also named."""
    with watching() as (symbolizer, _):
        sampler = EbpfSampler(SamplerConfig(samples_per_second=999))
        sampler.start()
        fd = load(7, name="kprof_spin", spin=100_000)
        run(fd, 3000)
        name = next(s[1] for s in kallsyms() if s[1].endswith("kprof_spin"))
        catch_up(symbolizer)
        assert any(s[1] == "bpf_dispatcher_xdp" for s in known(symbolizer)), "made by run()"
        os.close(fd)
        sampler.stop()
        samples = sampler.drain()
        sampler.close()
        wait_unloaded({s for s in known(symbolizer) if s[1] == name})
        catch_up(symbolizer)
        assert name not in {s[1] for s in known(symbolizer)}
        stacks = StackResolver({KERNEL_SIDE: symbolizer})
        leaves = [stacks.resolve(sample).frames[0] for sample in samples]
        hits = [frame for frame in leaves if frame.function == name]
        assert len(hits) > 20
        assert len({id(frame.module) for frame in hits}) == 1
        assert not [frame for frame in leaves if frame.module is None]


def kallsyms_s():
    started = time.monotonic()
    Path("/proc/kallsyms").read_bytes()
    return time.monotonic() - started


def test_the_ksymbol_table_is_correct_after_records_are_lost():
    """3,000 programs are loaded while the one-page rings are not being read."""
    with watching(polled=False, ring_bytes=4096) as (symbolizer, watch), programs(3000) as fds:
        catch_up(symbolizer)
        there = mine(kallsyms(*BLOCKS))
        assert len(there) == 3000
        assert mine(known(symbolizer)) == there
        counts = watch.counts()
        assert {cause for cause, _ in counts.lost} == {RecordLoss.RING_FULL}
        assert counts.readings > 0
        close_all(fds)
        wait_unloaded(there)
        catch_up(symbolizer)
        assert not mine(known(symbolizer))
        counts = watch.counts()
        assert sum(counts.lost.values()) + counts.added + counts.removed >= 6000
        assert counts.kallsyms_reads <= counts.readings


def test_frames_sampled_while_records_are_lost_have_no_name():
    """If the record of an unload is lost, another program may have been loaded at the address.

    Once all symbols have been reread, an address without a symbol does not belong to any program.
    """
    results = set()
    for _ in range(10):
        with (
            watching(queue_bytes=4096) as (symbolizer, watch),
            programs(1, name="kprof_lost") as fds,
        ):
            catch_up(symbolizer)
            ((start, name),) = (s for s in known(symbolizer) if s[1].endswith("_kprof_lost"))
            before_ns = now_ns()
            catch_up(symbolizer)
            with programs(200):
                close_all(fds)
                wait_unloaded({(start, name)})
                doubt_ns = now_ns()
            catch_up(symbolizer)
            assert {"queue_full"} <= set(watch.count_lost()) <= {"queue_full", "ring_full"}
            (before,) = symbolizer.resolve_addresses([start], time_ns=before_ns)
            (in_doubt,) = symbolizer.resolve_addresses([start], time_ns=doubt_ns)
        assert before.function == name
        results.add(in_doubt.unresolved)
        if Unresolved.RECORDS_LOST in results:
            break
    assert results <= {Unresolved.RECORDS_LOST, Unresolved.UNMAPPED}
    assert Unresolved.RECORDS_LOST in results


def test_losses_caused_by_a_full_queue_are_counted_and_corrected_by_rereading():
    with watching(queue_bytes=10_000) as (symbolizer, watch), programs(2000):
        catch_up(symbolizer)
        assert mine(known(symbolizer)) == mine(kallsyms(*BLOCKS))
        lost = {cause for cause, _ in watch.counts().lost}
        # On a busy machine, the rings may fill first.
        assert {RecordLoss.QUEUE_FULL} <= lost <= {RecordLoss.QUEUE_FULL, RecordLoss.RING_FULL}


def test_a_loss_is_detected_even_if_no_records_follow():
    """The kernel reports a loss only with the next record on the same CPU."""
    before = os.sched_getaffinity(0)
    cpu = min(before)
    with watching(polled=False, ring_bytes=4096) as (symbolizer, watch):
        os.sched_setaffinity(0, {cpu})
        try:
            with programs(200) as fds:
                kept, fds[:] = fds[:], []
            catch_up(symbolizer)
            assert mine(known(symbolizer)) == mine(kallsyms(*BLOCKS))
            assert watch.counts().lost[RecordLoss.RING_FULL, cpu] > 50
            close_all(kept)
        finally:
            os.sched_setaffinity(0, before)


def cpu_s(tasks):
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_a_thousand_loads_per_second_cost_little_and_leak_nothing():
    """The test runs for ``KPROFILER_CHURN_S`` seconds (4 by default)."""
    seconds = float(os.environ.get("KPROFILER_CHURN_S", "4"))
    others = {*TASKS.iterdir()} - {TASKS / str(threading.get_native_id())}
    # The rings can hold several seconds of records while this process is not running.
    with watching(ring_bytes=4 << 20) as (symbolizer, watch):
        command = churn_command(seconds, "kprof_churn")
        fds, memory = len(os.listdir("/proc/self/fd")), []
        before = cpu_s(own := {*TASKS.iterdir()} - others)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as churn:
            while churn.poll() is None:
                time.sleep(0.25)
                symbolizer.advance(now_ns())
                memory.append(read_resident_bytes())
            loads = int(churn.stdout.read())
        spent = cpu_s(own) - before
        loading = resource.getrusage(resource.RUSAGE_CHILDREN)
        loading_s = sum(loading[:2]) - sum(children[:2])
        wait_unloaded({s for s in kallsyms() if s[1].endswith("kprof_churn")})
        catch_up(symbolizer)
        counts = watch.counts()
        assert counts.lost == {}
        assert counts.added >= loads
        assert counts.kallsyms_reads == 0
        assert spent < loading_s, f"{spent:.3f} s to follow {loads} loads of {loading_s:.3f} s"
        assert len(os.listdir("/proc/self/fd")) <= fds + 1  # plus the pipe to the churning process
        assert not [s for s in known(symbolizer) if s[1].endswith("kprof_churn")]
        assert memory[-1] - memory[len(memory) // 2] < 8 << 20, "history is bounded"


def test_an_idle_watch_wakes_at_most_twice_a_second():
    with watching() as (_, watch):
        start, began = watch.counts(), time.monotonic()
        time.sleep(3)
        watch.poll(now_ns())
        after, passed_s = watch.counts(), time.monotonic() - began
        # Other processes may load programs.
        records = after.added + after.removed - start.added - start.removed
        assert after.wakeups - start.wakeups <= 2 * passed_s + records


def test_closing_does_not_wait_until_all_symbols_are_reread():
    watch = KsymbolWatch(queue_bytes=10_000)
    with programs(3000):
        watch.poll(now_ns())
        assert watch.count_lost()
        time.sleep(0.05)
        started = time.monotonic()
        watch.close()
        assert time.monotonic() - started < max(5, kallsyms_s())
        watch.close()


class FilesThatFail(Access):
    """An ``Access`` that fails to open files as if no descriptors were left."""

    fails = False

    def read_bytes(self, path):
        if self.fails:
            raise OSError(errno.EMFILE, "no descriptor left")
        return super().read_bytes(path)


def test_symbols_are_tracked_once_the_cpu_list_is_readable_again(caplog):
    files, lost = FilesThatFail(), []
    events = RecordEvents(files, KSYMBOLS, 4096, lambda *loss: lost.append(loss))
    try:
        files.fails = True
        events.follow()
        assert "no descriptor left" in caplog.text
        files.fails = False
        with programs(1, name="kprof_after"):
            assert any(b"kprof_after" in data for _, data in events.take())
        events.follow()
    finally:
        events.close()
    assert not lost


@pytest.mark.changes_host
@pytest.mark.long
def test_symbols_are_tracked_again_on_a_cpu_that_was_offline():
    with watching() as (symbolizer, watch):
        time.sleep(1.2)
        with offline(1):
            pass
        wait_until(lambda: (RecordLoss.CPU_CAME, 1) in watch.counts().lost)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {1})
        try:
            fd = load(1, name="kprof_cpu1")
        finally:
            os.sched_setaffinity(0, before)
        catch_up(symbolizer)
        assert any(s[1].endswith("kprof_cpu1") for s in known(symbolizer))
        os.close(fd)


def has_uncertain(symbolizer):
    """Returns whether a loaded symbol has no name because records were lost."""
    starts = [symbol.start for symbol in symbolizer.ksymbols()]
    frames = [symbolizer.resolve_addresses([start])[0] for start in starts]
    return any(frame.unresolved is Unresolved.RECORDS_LOST for frame in frames)


def test_symbols_inherited_by_a_forked_child_are_uncertain_until_reread():
    """The child has a copy of the parent's symbols and a new watch."""
    with (
        watching() as (parent, watch),
        programs(1, name="kprof_kept"),
        programs(1, name="kprof_gone") as going,
    ):
        catch_up(parent)
        kept, gone = (
            next(one for one in known(parent) if one[1].endswith(name))
            for name in ("_kprof_kept", "_kprof_gone")
        )
        since_ns = parent.complete_until_ns
        watch.close()
        close_all(going)
        wait_unloaded({gone})
        new = load(9, name="kprof_new")
        child_watch = KsymbolWatch(missed_since_ns=since_ns)
        child = parent.copy_for_child(files=Access(), ksymbols=child_watch)
        try:
            catch_up(child)
            names = mine(known(child))
            assert kept in names
            assert gone not in names
            assert any(name.endswith("_kprof_new") for _, name in names)
            (frame,) = child.resolve_addresses([gone[0] + 1], time_ns=since_ns + 1)
            if frame.unresolved is not Unresolved.RECORDS_LOST:  # another process may load programs
                assert frame.module.name in {name for _, name in known(child)} - {gone[1]}

            def is_certain():
                catch_up(child)
                return not has_uncertain(child)

            wait_until(is_certain)
            assert child_watch.counts().kallsyms_reads
        finally:
            os.close(new)
            child.close()


def fork_while_watching():
    before = set(os.listdir("/proc/self/fd"))

    def check_child():
        links = [f"/proc/self/fd/{fd}" for fd in set(os.listdir("/proc/self/fd")) - before]
        left = [os.readlink(link) for link in links if os.path.lexists(link)]
        assert not any("perf_event" in each or "eventfd" in each for each in left)

    with watching() as (symbolizer, _):
        check_in_child(check_child)
        fd = load(3, name="kprof_parent")
        catch_up(symbolizer)
        assert any(s[1].endswith("kprof_parent") for s in known(symbolizer))
        os.close(fd)


def test_a_forked_child_holds_no_descriptors():
    """The test runs in a new process, because gRPC opens descriptors in forked children."""
    with watching():
        pass  # skips the test if ksymbols cannot be watched
    process = multiprocessing.get_context("spawn").Process(target=fork_while_watching)
    process.start()
    process.join()
    assert process.exitcode == 0
