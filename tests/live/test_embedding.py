"""The embedded profiler on the running kernel, and its effects on a service."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource as SdkResource
from programs import load
from programs import run as run_program
from samplers import spawned
from services import WORK, count_by_pid, problems, run, work

from otel_kprofiler.errors import HostError
from otel_kprofiler.otlp import read_profiles
from otel_kprofiler.sdk import (
    InMemoryProfileExporter,
    KernelProfiler,
    ProfilerProvider,
    SimpleProfileProcessor,
    read_process_context,
)
from otel_kprofiler.symbols import KernelSymbolizer
from tests.further import further
from tests.needs import X86_64
from tests.raising import raising
from tests.servers import HttpServer
from tests.waiting import wait_until

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
WILL_PATCH = "gevent.plugins.monkey.will_patch_all"


def count_leaves(windows, suffix):
    return sum(
        len(sample.timestamps_unix_ns)
        for window in windows
        for _, sample in window.samples
        if (sample.stack.frames[0].function or "").endswith(suffix)
    )


@contextlib.contextmanager
def profiling(provider=None, **options):
    exporter = InMemoryProfileExporter()
    resource = SdkResource({"service.name": "svc"})
    provider = provider or ProfilerProvider(resource, shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(exporter))
    profiler = KernelProfiler(provider, samples_per_second=999, **options)
    try:
        yield profiler.start("raise"), exporter
    finally:
        provider.shutdown()


def test_only_the_embedding_process_is_profiled_and_a_second_profiler_is_rejected():
    with (
        spawned(sys.executable, "-c", "while True: open('/proc/stat').read()"),
        profiling() as (profiler, exporter),
    ):
        assert read_process_context(os.getpid()).resource["service.name"] == "svc"
        with pytest.raises(HostError, match="another kernel profiler"):
            KernelProfiler(ProfilerProvider(shutdown_on_exit=False)).start("raise")
        work(0.5)
        profiler.stop()
    samples = [pair for window in exporter.get_finished_windows() for pair in window.samples]
    attributes = [resource.attributes for resource, _ in samples]
    assert {values["process.pid"] for values in attributes} == {os.getpid()}
    assert {values["service.name"] for values in attributes} == {"svc"}
    assert all("process.creation.time" in values for values in attributes)
    stats = profiler.stats()
    assert stats["state"] == "stopped"
    assert stats["samples"] > 100
    assert stats["account"]["gaps"] == []
    names = {frame.function for _, sample in samples for frame in sample.stack.frames}
    assert names & {"proc_readdir_de", "proc_task_readdir", "iterate_dir"}


def find_new(threads):
    return set(threading.enumerate()) - threads


def test_profiler_threads_are_named_daemon_threads_that_stop_with_the_profiler():
    before = set(threading.enumerate())
    with profiling():
        # kprofiler-drain also exports. kprofiler-symbols starts when there is a file to read.
        expected = {"kprofiler-drain", "kprofiler-ksymbols", "kprofiler-files", "kprofiler-tables"}
        expected.add("kprofiler-symbols")
        if Path("/proc/modules").exists():
            expected.add("kprofiler-modules")
        wait_until(lambda: {thread.name for thread in find_new(before)} >= expected)
        ours = find_new(before)
        assert {thread.name for thread in ours} == expected
        assert all(thread.daemon for thread in ours)
    assert set(threading.enumerate()) <= before


def test_a_bpf_program_loaded_after_startup_is_named():
    with profiling(reporter_interval_s=60) as (profiler, exporter):
        fd = load(7, name="svc_bpf", spin=100_000)
        run_program(fd, 3000)
        os.close(fd)
        profiler.stop()
    assert count_leaves(exporter.get_finished_windows(), "_svc_bpf") > 20


LOCKED = """
    import logging, resource
    logging.basicConfig(format="%(message)s")
    from otel_kprofiler import KernelProfiler
    from otel_kprofiler.errors import HostError
    from otel_kprofiler.tracking import KsymbolWatch
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    others = []
    try:
        while True:
            others.append(KsymbolWatch())
    except HostError:
        pass
    profiler = KernelProfiler.from_env().start("raise")
    work(0.5)
    profiler.stop()
    assert profiler.stats()["samples"] > 50
"""


def test_a_failure_to_track_bpf_programs_is_logged_once(public_python):
    """Without CAP_IPC_LOCK, a user's locked memory for perf events is limited."""
    capabilities = "+bpf,+perfmon,+syslog"
    wrapper = ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={capabilities}",
               f"--ambient-caps={capabilities}"]  # fmt: skip
    done = run(LOCKED, wrapper=wrapper, env={"OTEL_PROFILES_EXPORTER": "console"})
    (line,) = done.stderr.splitlines()
    assert line.startswith("BPF programs loaded from now on will have no names: ")
    assert "RLIMIT_MEMLOCK" in line


FIND_LINKS = """
    def find_links():
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(path) for path in paths if os.path.lexists(path)]
"""
FORKING = """
    import sys
    sys.path.insert(0, {folder!r})
    from programs import load, run as run_program
    from otel_kprofiler import KernelProfiler
    profiler = KernelProfiler.from_env().start("raise")
    before = load(7, name="svc_before", spin=100_000)
    run_program(before, 10)
    profiler.flush_window(60_000)
    gone = load(8, name="svc_gone", spin=1)
    pid = os.fork()
    if not pid:
        os.close(gone)
        await_running(profiler)
        after = load(9, name="svc_after", spin=100_000)
        run_program(before, 3000)
        run_program(after, 3000)
        sys.exit(0)
    os.close(gone)
    assert os.waitpid(pid, 0)[1] == 0
    print(pid)
"""


def test_a_forked_child_names_bpf_programs_loaded_before_and_after_the_fork(to_file):
    env = {**to_file.env, "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    done = run(FORKING.format(folder=str(Path(__file__).parent)), env=env)
    assert problems(done.stderr) == []
    child = [
        window
        for window in read_profiles(str(to_file.path))
        if int(done.stdout) in count_by_pid([window])
    ]
    assert count_leaves(child, "_svc_before") > 20
    assert count_leaves(child, "_svc_after") > 20


def test_no_samples_are_taken_during_nested_pauses():
    with profiling() as (profiler, _):
        work(0.2)
        with profiler.paused():
            with profiler.paused():
                pass
            taken = profiler.stats()["account"]["taken"]
            assert taken > 0
            assert profiler.stats()["state"] == "paused"
            work(0.3)
            assert profiler.stats()["account"]["taken"] == taken

        def is_resumed():
            work(0.05)
            return profiler.stats()["account"]["taken"] > taken

        wait_until(is_resumed)


def test_a_profiler_started_in_a_pause_takes_no_samples_before_the_pause_ends():
    with profiling() as (profiler, _):
        profiler.stop()
        with profiler.paused():
            profiler.start("raise")
            taken = profiler.stats()["account"]["taken"]
            work(0.3)
            profiler.flush_window(10_000)
            assert profiler.stats()["account"]["taken"] == taken


def test_a_flush_delivers_earlier_samples():
    provider = ProfilerProvider(shutdown_on_exit=False)
    with profiling(provider, reporter_interval_s=60) as (_, exporter):
        work(1.5)  # the first window is short
        exporter.clear()
        work(0.5)
        assert provider.force_flush(60_000)
        assert sum(window.sample_count for window in exporter.get_finished_windows()) > 50


def test_descendants_are_profiled_with_separate_resources():
    code = WORK + "work(0.5)\nprint(os.getpid())"
    with profiling(target="children") as (profiler, exporter):
        children = [
            subprocess.Popen(
                ["/bin/sh", "-c", f'"{sys.executable}" -c "$0"; true', code], stdout=subprocess.PIPE
            )
            for _ in range(2)
        ]
        busy = {int(child.communicate()[0]) for child in children}
        profiler.stop()
    windows = exporter.get_finished_windows()
    resources = {resource for window in windows for resource, _ in window.samples}
    assert {resource.attributes["service.name"] for resource in resources} == {"svc"}
    counts = count_by_pid(windows)
    assert len(busy) == 2
    assert all(counts[pid] > 50 for pid in busy), counts


@X86_64
@pytest.mark.parametrize("links", [True, False])
def test_samples_from_descendants_are_linked_to_the_spans_they_publish(links):
    code = """
        import os, time
        from opentelemetry.sdk.trace import TracerProvider
        from otel_kprofiler import KernelProfiler, ProfilerProvider
        from otel_kprofiler.sdk import InMemoryProfileExporter, SimpleProfileProcessor

        exporter = InMemoryProfileExporter()
        provider = ProfilerProvider(shutdown_on_exit=False)
        provider.add_profile_processor(SimpleProfileProcessor(exporter))
        links = os.environ["LINKS"] == "True"
        parent = os.getpid()
        profiler = KernelProfiler(
            provider, target="children", samples_per_second=499, reporter_interval_s=1,
            span_links=links,
        ).start("raise")
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            with TracerProvider().get_tracer("test").start_as_current_span("child") as span:
                os.write(writing, b"%016x" % span.get_span_context().span_id)
                while os.getppid() == parent:
                    os.stat("/proc/self")
        span_id = bytes.fromhex(os.read(reading, 16).decode())

        def of_child():
            samples = [
                sample for window in exporter.get_finished_windows()
                for _, sample in window.samples if sample.tid == pid
            ]
            return len(samples), [sample.link.span_id for sample in samples if sample.link]

        deadline = time.monotonic() + 60
        wanted = (lambda all, linked: linked) if links else (lambda all, linked: all > 1)
        while not wanted(*of_child()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0 if links else 3)  # until the process context is read and a window closes
        os.kill(pid, 9)
        found = of_child()[1]
        assert set(found) == ({span_id} if links else set()), found
    """
    run(code, env={"LINKS": str(links)})


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare of util-linux")
@pytest.mark.parametrize("target", ["self", *further("children")])
def test_samples_have_pids_from_the_services_pid_namespace(target, to_file):
    """In a new PID namespace, os.getpid() is 1 and differs from the global pid."""
    run(
        """
        import threading
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from otel_kprofiler import KernelProfiler
        assert os.getpid() == 1
        with KernelProfiler.from_env() as profiler:
            with TracerProvider().get_tracer("t").start_as_current_span("s"):
                work(1)  # much more than the profiler's threads use
        stats = profiler.stats()
        assert stats["samples"] > 100, stats
        assert stats["linked"] > 0.9 * stats["samples"], stats
        """,
        wrapper=["unshare", "--fork", "--pid", "--mount-proc"],
        # Excludes the profiler's threads, which run in user mode and have no span.
        env={**to_file.env, "OTEL_KPROFILER_TARGET": target, "OTEL_KPROFILER_STACKS": "kernel"},
    )
    assert set(to_file.pids()) == {1}


def test_profiling_the_host_from_a_pid_namespace_is_rejected_with_a_fix():
    done = run(
        """
        from otel_kprofiler import KernelProfiler
        KernelProfiler.from_env().start()
        print("the service runs")
        """,
        wrapper=["unshare", "--fork", "--pid", "--mount-proc"],
        env={"OTEL_KPROFILER_TARGET": "host", "OTEL_PROFILES_EXPORTER": "console"},
    )
    assert done.stdout == "the service runs\n"
    assert "hostPID" in done.stderr


SERVICE = """
    import logging
    logging.basicConfig(format="%(message)s")
    from otel_kprofiler import KernelProfiler
    profiler = KernelProfiler.from_env().start()
    work(0.5)
    print("served", profiler.stats()["state"])
"""


@pytest.mark.parametrize("kept", ["-all,+perfmon", *further("-all")])
def test_a_service_without_privileges_publishes_its_context_and_logs_one_warning(kept):
    """With CAP_PERFMON alone, BPF programs could be tracked, but no samples could be taken."""
    wrapper = ["setpriv", f"--bounding-set={kept}", "--inh-caps=-all"]
    code = (
        SERVICE
        + """
    print([link for link in find_links() if "perf" in link or "net" in link])
    from otel_kprofiler.sdk import read_process_context
    print(read_process_context(os.getpid()).resource["service.name"])
    """
    )
    env = {"OTEL_PROFILES_EXPORTER": "console", "OTEL_SERVICE_NAME": "svc"}
    done = run(FIND_LINKS + code, wrapper=wrapper, env=env)
    assert done.stdout == "served stopped\n[]\nsvc\n"
    (line,) = done.stderr.splitlines()
    assert "CAP_BPF" in line
    assert "fix: " in line


def test_profiles_contain_unresolved_addresses_if_kernel_symbols_are_hidden(to_file):
    """Without CAP_SYSLOG, the kernel shows zeros (kptr_restrict, perf_event_paranoid)."""
    done = run(SERVICE, wrapper=["setpriv", "--bounding-set=-syslog"], env=to_file.env)
    assert done.stdout == "served running\n"
    ((_, count),) = to_file.pids().items()
    assert count > 100


@pytest.fixture(params=["grpc", *further("http/protobuf")])
def to_dead_receiver(request):
    """Returns an environment with an OTLP endpoint at which no server is listening."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_PROTOCOL": request.param,
        "OTEL_KPROFILER_REPORTER_INTERVAL": "200ms",
    }


def test_a_dead_receiver_delays_neither_the_service_nor_its_exit(to_dead_receiver):
    done = run(SERVICE, env=to_dead_receiver)
    assert done.stdout == "served running\n"
    assert len(problems(done.stderr)) <= 3


def test_a_service_keeps_its_exit_status_and_pending_samples_are_delivered(to_file):
    done = subprocess.run(
        [sys.executable, "-c", WORK + textwrap.dedent("""
            import threading
            from otel_kprofiler import KernelProfiler
            KernelProfiler.from_env().start()
            threading.Thread(target=work, args=(600,), daemon=True).start()
            work(0.3)
            raise SystemExit(7)
         """)],
        env={**os.environ, **to_file.env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, problems(done.stderr)) == (7, [])
    assert to_file.exists()


def test_a_forked_child_has_its_own_profiler_and_the_parent_continues(to_file):
    done = run(
        """
        import sys
        from otel_kprofiler import KernelProfiler
        profiler = KernelProfiler.from_env().start()
        work(0.3)
        pid = os.fork()
        if not pid:
            await_running(profiler)
            work(0.5)
            sys.exit(0)
        work(0.5)
        assert os.waitpid(pid, 0)[1] == 0
        print(os.getpid(), pid)
        """,
        # From 3.12 on, Python warns about every fork of a process with threads.
        env={**to_file.env, "PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
    assert problems(done.stderr) == []
    parent, child = map(int, done.stdout.split())
    counts = to_file.pids()
    assert set(counts) == {parent, child}
    assert min(counts.values()) > 100


def test_a_forked_child_that_is_not_profiled_holds_no_descriptors_or_threads(to_file):
    done = run(
        """
        import sys, threading
        from otel_kprofiler import KernelProfiler
        profiler = KernelProfiler.from_env().start()
        before = len(os.listdir("/proc/self/fd"))
        pid = os.fork()
        if not pid:
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.islink(f"/proc/self/fd/{fd}")]
            assert not any(
                word in link for link in links for word in ("bpf", "perf", "eventfd", "eventpoll")
            ), links
            work(0.5)
            assert profiler.stats()["state"] == "stopped"
            assert threading.active_count() == 1
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        work(0.5)
        print(os.getpid())
        """,
        env={**to_file.env, "OTEL_KPROFILER_RESTART_IN_CHILDREN": "false"},
    )
    assert set(to_file.pids()) == {int(done.stdout)}


def test_multiprocessing_children_run_and_exit_cleanly(to_dead_receiver):
    run(
        """
        import multiprocessing
        from otel_kprofiler import KernelProfiler
        KernelProfiler.from_env().start()
        work(0.7)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(work, [0.7] * 4)
        print("done")
        """,
        env=to_dead_receiver,
    )


def test_a_service_under_gevent_runs_unprofiled_with_one_warning():
    pytest.importorskip("gevent")
    done = run(
        """
        from gevent import monkey
        monkey.patch_all()
        import logging
        logging.basicConfig(format="%(message)s")
        from otel_kprofiler.sdk import KernelProfiler, read_process_context
        profiler = KernelProfiler.from_env().start()
        assert profiler.stats()["state"] == "stopped"
        print(read_process_context(os.getpid()).resource["service.name"])
        """,
        env={"OTEL_PROFILES_EXPORTER": "console", "OTEL_SERVICE_NAME": "svc"},
    )
    assert done.stdout == "svc\n"
    (line,) = done.stderr.splitlines()
    assert "gevent has monkey-patched threading" in line
    assert "gthread" in line


PATCHED = """
import logging, threading
logging.basicConfig(format="%(message)s")
from otel_kprofiler.sdk import KernelProfiler
import gevent.monkey
profiler = KernelProfiler.from_env().start("raise")

def patch():
    gevent.monkey.patch_all()
    print(profiler.stats()["state"], [thread.name for thread in threading.enumerate()], flush=True)

"""
FORKED = """
if pid := os.fork():
    os.waitpid(pid, 0)
    profiler.stop()
else:
    patch()
    os._exit(0)
"""


@pytest.mark.parametrize("patch", ["patch()", FORKED])
def test_gevent_stops_a_profiler_before_it_patches_threads(to_file, tmp_path, patch):
    pytest.importorskip("gevent")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, function),) = project["entry-points"][WILL_PATCH].items()
    installed = tmp_path / "kprofiler-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: kprofiler\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[{WILL_PATCH}]\n{name} = {function}\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}  # about forks, from 3.12 on
    done = run(PATCHED + patch, env={**to_file.env, **quiet, "PYTHONPATH": path})
    assert done.stdout == "stopped ['MainThread']\n"
    (line,) = done.stderr.splitlines()
    assert "gevent has monkey-patched threading" in line


def test_a_subinterpreter_is_rejected_with_a_reason():
    done = run(
        """
        try:
            import _xxsubinterpreters as interpreters
            create = lambda: interpreters.create(isolated=False)
        except ImportError:  # since 3.13
            import _interpreters as interpreters
            create = lambda: interpreters.create("legacy")
        code = '''
        from otel_kprofiler.sdk.refusals import refuse_subinterpreters
        from otel_kprofiler.errors import HostError
        try:
            refuse_subinterpreters()
        except HostError as error:
            print(error.hint)
        '''
        import textwrap
        interpreters.run_string(create(), textwrap.dedent(code))
        """
    )
    assert "main interpreter" in done.stdout


def test_the_service_survives_an_error_in_the_profilers_thread(caplog, monkeypatch):
    with profiling() as (profiler, _):
        monkeypatch.setattr(KernelSymbolizer, "advance", None)
        wait_until(lambda: profiler.stats()["problem"])
        assert profiler.stats()["state"] == "stopped"
        profiler.stop()
    assert "TypeError" in profiler.stats()["problem"]
    assert len([r for r in caplog.records if "profiling has ended" in r.message]) == 1


@pytest.mark.parametrize("error", [OSError("failed"), SystemExit(1)])
def test_a_profiler_that_an_error_ended_can_be_started_again(caplog, monkeypatch, error):
    with profiling() as (profiler, exporter), monkeypatch.context() as failing:
        failing.setattr(KernelSymbolizer, "advance", raising(error))
        wait_until(lambda: profiler.stats()["state"] == "stopped")
        assert type(error).__name__ in profiler.stats()["problem"]
        failing.undo()
        exporter.clear()
        profiler.start("raise")
        assert (profiler.stats()["state"], profiler.stats()["problem"]) == ("running", "")
        work(0.2)
        profiler.flush_window(10_000)
        assert exporter.get_finished_batches()
    assert len([r for r in caplog.records if "profiling has ended" in r.message]) == 1


def test_opentelemetry_instrument_starts_or_disables_the_profiler(to_file):
    instrument = shutil.which("opentelemetry-instrument", path=os.path.dirname(sys.executable))
    service = [instrument, sys.executable, "-c", WORK + "work(0.5)"]
    env = {**os.environ, **to_file.env, "OTEL_SERVICE_NAME": "svc"}
    disabled = {**env, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "kprofiler"}
    assert subprocess.run(service, env=disabled, timeout=60).returncode == 0
    assert not to_file.exists()
    flags = ["--kprofiler_samples_per_second", "999", "--kprofiler_max_frames", "64"]
    assert subprocess.run([instrument, *flags, *service[1:]], env=env, timeout=60).returncode == 0
    assert sum(to_file.pids().values()) > 30


def test_declarative_configuration_supports_the_receivers_keys(to_file, tmp_path):
    config = tmp_path / "sdk.yaml"
    config.write_text(
        "file_format: '1.1'\n"
        "instrumentation/development:\n  python:\n    kprofiler:\n"
        "      samples_per_second: 999\n      stacks: both\n      reporter_interval: 300ms\n"
    )
    run(
        f"""
        from opentelemetry.configuration import configure_sdk, load_config_file
        configure_sdk(load_config_file({str(config)!r}))
        work(0.5)
        """,
        env={**to_file.env, "OTEL_KPROFILER_SAMPLES_PER_SECOND": "1"},
    )
    assert sum(to_file.pids().values()) > 100


class Receiver(HttpServer):
    """Counts requests, and creates the file at ``sign`` when profiles arrive."""

    def __init__(self, sign=None):
        self.came, self._sign = Counter(), sign
        super().__init__(self._take)

    def _take(self, request):
        self.came[request.path, request.headers["X-Tenant"]] += 1
        if self._sign and "profiles" in request.path:
            self._sign.touch()
        request.reply(Content_Type="application/x-protobuf")


@pytest.mark.parametrize(
    "named_by", ["OTEL_CONFIG_FILE", "OTEL_CONFIG_FILE alone", *further("a call")]
)
def test_declarative_configuration_sends_profiles_to_the_trace_endpoint(tmp_path, named_by):
    config = tmp_path / "sdk.yaml"
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_CONFIG_FILE": ""}
    if named_by != "a call":
        environment["OTEL_CONFIG_FILE"] = str(config)
    load = {
        "a call": f"configure_sdk(load_config_file({str(config)!r}))",
        "OTEL_CONFIG_FILE": "configure_sdk(load_config_file(os.environ['OTEL_CONFIG_FILE']))",
        "OTEL_CONFIG_FILE alone": "KernelProfiler.from_env().start()",
    }
    sign = tmp_path / "sign"
    with Receiver(sign) as receiver:
        config.write_text(
            "file_format: '1.1'\n"
            "tracer_provider:\n  processors:\n  - batch: {exporter: {otlp_http: {\n"
            f"      endpoint: 'http://127.0.0.1:{receiver.server_port}/v1/traces',\n"
            "      headers: [{name: x-tenant, value: shop}]}}}\n"
            "instrumentation/development: {python: {kprofiler: {samples_per_second: 999}}}\n"
        )
        run(
            f"""
            from opentelemetry import trace
            from opentelemetry.configuration import configure_sdk, load_config_file
            from otel_kprofiler import KernelProfiler
            {load[named_by]}
            with trace.get_tracer("x").start_as_current_span("y"):
                while not os.path.exists({str(sign)!r}):
                    work(0.1)
            """,
            env=environment,
        )
        receiver.shutdown()
    assert receiver.came["/v1development/profiles", "shop"] > 0
    if "alone" not in named_by:
        assert receiver.came["/v1/traces", "shop"] > 0


COMMANDS_ONLY = {"click", "rich", "pygments", "ruamel", "elftools"}
BLOCKED = """
import sys
class Blocker:
    def find_spec(name, path, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Blocker)
"""


@pytest.mark.parametrize(
    ("environment", "unused"),
    [
        *further(({}, {"pydantic", "requests", "google"})),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {"pydantic", "grpc", "google"}),
        pytest.param(
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_KPROFILER_SAMPLES_PER_SECOND": "999",
                "OTEL_KPROFILER_STACKS": "both",
                "OTEL_KPROFILER_TARGET": "host",
            },
            {"grpc", "google"},
            marks=pytest.mark.long,
        ),
        ({"OTEL_PROFILES_EXPORTER": "console"}, {"pydantic", "grpc", "requests", "google"}),
    ],
)
def test_a_service_does_not_need_the_cli_dependencies(environment, unused):
    with Receiver() as receiver:
        endpoint = f"http://127.0.0.1:{receiver.server_port}"
        environment = {
            "OTEL_KPROFILER_SAMPLES_PER_SECOND": "",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            **environment,
        }
        is_taken = "http" in environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
        done = run(
            BLOCKED.format(blocked=COMMANDS_ONLY | unused)
            + textwrap.dedent(
                """
                from otel_kprofiler import KernelProfiler
                profiler = KernelProfiler.from_env().start("raise")
                work(2)
                profiler.stop(STOP_MILLIS)
                account = profiler.stats()["account"]
                assert account["received"] > 10, account
                """
            ).replace("STOP_MILLIS", "30_000" if is_taken else "500"),
            env=environment,
        )
        receiver.shutdown()
    if is_taken:
        assert receiver.came["/v1development/profiles", None] > 0
        assert problems(done.stderr) == []


def test_the_receiver_section_in_agent_yaml_is_valid_for_services(tmp_path):
    from ruamel.yaml import YAML

    from otel_kprofiler.sdk.schema import make_plan, make_settings

    with open(os.path.join(os.path.dirname(__file__), "..", "..", "config", "agent.yaml")) as file:
        block = YAML(typ="safe").load(file)["receivers"]["kprofiler"]
    plan = make_plan(make_settings(json.loads(json.dumps(block)), source="agent.yaml"))
    assert plan.sampler.samples_per_second == block["samples_per_second"]
