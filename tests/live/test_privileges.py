"""Threads drop capabilities, as verified in ``/proc`` for separate test processes."""

import errno
import json
import subprocess

import pytest
from samplers import spawned

from tests.needs import ROOT
from tests.public import as_nobody, get_public_python, open_directory

pytestmark = [pytest.mark.live, ROOT]

BEGIN = """
import json, os, sys, threading
from otel_kprofiler.host import Access, Privileges, keep_only, read_threads, run_unprivileged
def start(name, function=lambda: None):
    going = threading.Event()
    threading.Thread(target=lambda: (function(), going.set(), threading.Event().wait()),
                     name=name, daemon=True).start()
    going.wait()
def held(tid):
    return sorted(next(v for k, v in read_threads(Access()).items() if k.startswith(f"{tid} ")))
"""


def run(script, by=()):
    done = subprocess.run(
        [*by, *get_public_python().words, "-c", BEGIN + script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


KEPT = ["CAP_DAC_READ_SEARCH", "CAP_PERFMON", "CAP_SYSLOG", "CAP_SYS_PTRACE"]


def test_each_thread_keeps_only_the_capabilities_it_needs():
    result = run("""
privileges = Privileges()
tids = {}
for name in ("export", "ksymbols", "contexts", "tables"):
    name = f"kprofiler-{name}"
    start(name, lambda name=name: tids.setdefault(name, threading.get_native_id()))
before = len(held(os.getpid()))
missing = privileges.reduce_this_thread()
print(json.dumps([before, missing, held(os.getpid()), {n: held(t) for n, t in tids.items()}]))
""")
    before, missing, main, threads = result
    assert before > len(KEPT)
    assert (missing, main) == ([], KEPT)
    assert threads == {
        "kprofiler-export": [],
        "kprofiler-ksymbols": ["CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG"],
        "kprofiler-contexts": ["CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE"],
        "kprofiler-tables": [
            "CAP_BPF",
            "CAP_CHECKPOINT_RESTORE",
            "CAP_DAC_READ_SEARCH",
            "CAP_SYS_PTRACE",
        ],
    }


def test_drop_all_drops_every_capability_and_returns_those_that_features_need():
    missing, threads = run("""
privileges = Privileges(drop_all=True)
start("kprofiler-ksymbols")
print(json.dumps([privileges.reduce_this_thread(),
                  [sorted(held) for held in read_threads(Access()).values()]]))
""")
    assert sorted(missing) == ["CAP_BPF", "CAP_CHECKPOINT_RESTORE", *KEPT]
    assert threads == [[], []]


def test_threads_started_by_an_unprivileged_thread_have_no_capabilities():
    threads, result, error = run("""
tids = []
def work():
    start("any", lambda: tids.append(threading.get_native_id()))
    return 7
result = run_unprivileged(work)
try:
    run_unprivileged(lambda: 1 / 0)
except ZeroDivisionError as error:
    message = str(error)
print(json.dumps([held(tids[0]), result, message]))
""")
    assert (threads, result, error) == ([], 7, "division by zero")


def test_a_reload_reads_a_configuration_that_only_root_may_read():
    with open_directory() as directory:
        path = directory / "agent.yaml"
        path.write_text(
            "receivers: {kprofiler: {samples_per_second: 97}}\nexporters: {debug: }\n"
            "service: {pipelines: {profiles: {receivers: [kprofiler], exporters: [debug]}}}\n"
        )
        path.chmod(0o600)
        rates = run(
            f"""
from otel_kprofiler.agent import agent_config
from otel_kprofiler.config import PendingConfig
privileges = Privileges()
rates = []
def reload():
    config = PendingConfig({str(path)!r}, agent_config).get()
    rates.append(config.sampler.samples_per_second)
start("kprofiler-config", reload)
print(json.dumps(rates))
""",
            by=as_nobody("dac_read_search"),
        )
    assert rates == [97]


def test_exec_regains_no_capabilities():
    assert (
        run("""
import subprocess
Privileges(drop_all=True).reduce_this_thread()
child = "import re; print(re.search('CapEff:.(.*)', open('/proc/self/status').read())[1])"
print(json.dumps(int(subprocess.check_output([sys.executable, "-c", child]), 16)))
""")
        == 0
    )


PUBLISH = """
import ctypes, os, time
from otel_kprofiler import publish_process_context
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which setuid clears
publish_process_context({"service.name": "of another user"})
print("published", flush=True)
time.sleep(60)
"""


def test_the_retained_capabilities_suffice_to_read_other_users_contexts(public_python):
    with spawned(public_python.command, "-c", PUBLISH, stdout=subprocess.PIPE) as publisher:
        assert publisher.stdout.readline() == b"published\n"
        result = run(f"""
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.processes import ProcessContexts
from otel_kprofiler.host import TICK_NS, read_start_ticks
privileges = Privileges()
files = Access()
key = ProcessKey({publisher.pid}, read_start_ticks(files, {publisher.pid}) * TICK_NS)
contexts = ProcessContexts(files, first_look_s=0, answer_timeout_s=30)
contexts.expect(key)
print(json.dumps([dict(value) for value in contexts.look([key]).values()]))
""")
    assert result == [{"service.name": "of another user"}]


def test_a_process_that_reads_hostile_input_keeps_only_the_specified_capabilities():
    held, regained = run("""
import subprocess
from otel_kprofiler.host import give_up_capabilities
give_up_capabilities("CAP_SYS_PTRACE")
child = "import re; print(re.search('CapEff:.(.*)', open('/proc/self/status').read())[1])"
regained = subprocess.check_output([sys.executable, "-c", child])
print(json.dumps([held(threading.get_native_id()), int(regained, 16)]))
""")
    assert held == ["CAP_SYS_PTRACE"]
    assert regained & ~(1 << 19) == 0


def test_threads_start_even_if_no_file_can_be_opened():
    result = run("""
import resource
Privileges()
directory = os.open("/proc/self/task", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (directory + 1, directory + 1))
try:
    os.open("/", os.O_RDONLY)
except OSError as error:
    code = error.errno
tids = []
thread = threading.Thread(target=lambda: tids.append(threading.get_native_id()), name="export")
thread.start()
thread.join()
print(json.dumps([code, len(tids)]))
""")
    assert result == [errno.EMFILE, 1]
