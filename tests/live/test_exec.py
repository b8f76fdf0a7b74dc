"""Samples describe their process at sampling time, even if it later execs or changes its user."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing

import pytest
from samplers import sampling

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import KERNEL_SIDE, OFF_CPU
from otel_kprofiler.processes import ProcessContexts, ProcessResources
from otel_kprofiler.sampling import OffCpuConfig
from otel_kprofiler.symbols import KernelResolver
from tests.commands import run_checked
from tests.public import TWO, as_nobody

pytestmark = pytest.mark.live

NOBODY_ID = 65534
KERNEL = KernelResolver()
SPIN = "i=0; while [ $i -lt {rounds} ]; do i=$((i + 1)); done"


@pytest.fixture
def shells(tmp_path):
    results = [shutil.copy("/bin/dash", tmp_path / name) for name in ("first", "second")]
    return [str(path) for path in results]


def sample(command, resources, *, go=None, **settings):
    """Samples a command, and returns its pid and its samples with process attributes.

    Creates the file ``go`` once the program ``first`` has been sampled.
    """
    settings = {"samples_per_second": 999, "stacks": "both", **settings}
    pairs = []
    with sampling(**settings) as sampler:
        process = subprocess.Popen(command)
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
            pairs += [(one, resources.get(one)) for one in sampler.drain()]
            if go and any(one.comm == b"first" for one, _ in pairs):
                go.touch()
        process.kill()
        process.wait()
        pairs += [(one, resources.get(one)) for one in sampler.drain()]
    renewed = resources.renew({resource for _, resource in pairs})
    return process.pid, [
        (one, renewed.get(resource, resource).attributes) for one, resource in pairs
    ]


@pytest.fixture
def resources():
    result = ProcessResources(Access(), Clock(), {})
    yield result
    result.close()


def name(attributes):
    return attributes.get("process.executable.name")


def is_in_exec(sample):
    """Returns whether the kernel was replacing the program.

    begin_new_exec() changes the thread's name shortly before incrementing the exec count.
    """
    addresses = memoryview(sample.words(KERNEL_SIDE)).cast("Q").tolist()
    frames = KERNEL.resolve([address - 1 for address in addresses])
    return any(frame.function == "begin_new_exec" for frame in frames)


def test_samples_before_and_after_an_exec_belong_to_their_programs(shells, resources, tmp_path):
    first, second = shells
    go = tmp_path / "go"
    after = SPIN.format(rounds=600_000)
    script = f"while [ ! -e {go} ]; do :; done; exec {second} -c '{after}'"
    pid, pairs = sample([first, "-c", script], resources, go=go)
    own = [
        (sample, attributes)
        for sample, attributes in pairs
        if sample.tgid == pid and sample.comm in (b"first", b"second")
    ]
    results = Counter((one.comm.decode(), name(attributes)) for one, attributes in own)
    assert {names for names in results if len(set(names)) > 1} == set(), results
    assert min(results["first", "first"], results["second", "second"]) > 5
    paths = {attributes.get("process.executable.path") for _, attributes in own}
    assert first in paths
    assert paths <= {first, second, None}  # the second program may exit before it is read


def test_forked_children_have_their_parents_program_name_until_they_exec(shells, resources):
    first, second = shells
    child = f"{SPIN.format(rounds=1000)}; exec {second} -c '{SPIN.format(rounds=3000)}'"
    script = f"n=0; while [ $n -lt 150 ]; do n=$((n + 1)); ({child}); done"
    pid, pairs = sample([first, "-c", script], resources)
    results = Counter(
        (sample.comm.decode(), name(attributes))
        for sample, attributes in pairs
        if sample.comm in (b"first", b"second") and sample.tgid != pid and not is_in_exec(sample)
    )
    assert {names for names in results if len(set(names)) > 1} == set(), results
    assert min(results["first", "first"], results["second", "second"]) > 20


def test_the_process_owner_is_the_user_at_sample_time(resources):
    spin = "end = time.thread_time() + 1\nwhile time.thread_time() < end: pass\n"
    drop = f"import os, time\n{spin}os.setuid({NOBODY_ID})\n{spin}"
    pid, pairs = sample([sys.executable, "-S", "-c", drop], resources)
    own = [
        (sample.owner, attributes.get("process.owner"))
        for sample, attributes in pairs
        if sample.tgid == pid
    ]
    assert set(own) == {(0, "root"), (NOBODY_ID, "nobody")}
    assert own == sorted(own)


def test_waits_are_attributed_to_the_program_that_waited(shells, resources):
    first, second = shells
    nap = "for i in 1 2 3 4 5 6 7 8; do sleep 0.05; done"
    command = [first, "-c", f"{nap}; exec {second} -c '{nap}'"]
    config = OffCpuConfig(samples_per_second=1000)
    # Filter by name, because on a busy host, most of these waits would not be sampled otherwise.
    comms = b"first", b"second"
    pid, pairs = sample(command, resources, off_cpu=config, on_cpu=False, target_comms=comms)
    results = Counter(
        (sample.comm.decode(), name(attributes))
        for sample, attributes in pairs
        if sample.tgid == pid and sample.kind is OFF_CPU
    )
    assert {names for names in results if len(set(names)) > 1} == set(), results
    assert min(results["first", "first"], results["second", "second"]) > 2


def test_each_program_has_the_service_name_from_its_environment(shells, tmp_path):
    first, second = shells
    go = tmp_path / "go"
    after = SPIN.format(rounds=100_000_000)
    changed = f"exec env OTEL_SERVICE_NAME=new {second} -c '{after}'"
    script = f"while [ ! -e {go} ]; do :; done; {changed}"
    command = ["env", "OTEL_SERVICE_NAME=old", first, "-c", script]
    contexts = ProcessContexts(Access(), first_look_s=0.1, answer_timeout_s=2)
    result = ProcessResources(Access(), Clock(), {}, contexts=contexts)
    pairs, wanted = [], {(b"first", "old"), (b"second", "new")}

    def renew():
        name = "service.name"  # after an exec, the name is reported only once
        renewed = result.renew({each for _, each in pairs if name not in each.attributes})
        pairs[:] = [(sample, renewed.get(resource, resource)) for sample, resource in pairs]
        return {(sample.comm, resource.attributes.get(name)) for sample, resource in pairs}

    with closing(result), sampling(samples_per_second=499, stacks="both") as sampler:
        process = subprocess.Popen(command)
        end = time.monotonic() + 90
        while (services := renew()) != wanted and time.monotonic() < end:
            time.sleep(0.2)
            samples = [sample for sample in sampler.drain() if sample.tgid == process.pid]
            pairs += [
                (sample, result.get(sample))
                for sample in samples
                if sample.comm in (b"first", b"second") and not is_in_exec(sample)
            ]
            if (b"first", "old") in services:
                go.touch()
        process.kill()
        process.wait()
    assert services == wanted


WATCH = """
import sys, time
from collections import Counter
from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.processes import ProcessResources
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
resources = ProcessResources(Access(), Clock(), {})
sampler = EbpfSampler(SamplerConfig(samples_per_second=199, stacks="both"))
sampler.start()
print("started", flush=True)
found, end = Counter(), time.monotonic() + 60
while time.monotonic() < end and len({comm for comm, _ in found} & {b"first", b"second"}) < 2:
    time.sleep(0.5)
    for one in sampler.drain():
        name = resources.get(one).attributes.get("process.executable.name")
        found[one.comm, name] += 1
print([(comm.decode(), name) for comm, name in found if comm in (b"first", b"second")])
"""


def test_program_names_are_correct_without_ptrace_permission(shells, public_python):
    """Without ptrace rights, /proc hides the executable and stack of other users' processes."""
    first, second = shells
    spin = SPIN.format(rounds=1_500_000)
    watcher = subprocess.Popen(
        [*as_nobody(*TWO), public_python.command, "-c", WATCH], stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout.readline() == "started\n"
    subprocess.run([first, "-c", f"{spin}; exec {second} -c '{spin}'"], check=True)
    printed, _ = watcher.communicate(timeout=120)
    assert "('first', 'first')" in printed
    assert "('second', 'second')" in printed
    assert printed.count("'first'") == printed.count("'second'") == 2, printed


def test_recordings_omit_an_interpreters_arguments_except_the_script(tmp_path):
    script = tmp_path / "manage.py"
    # Arguments are read within a second of the first sample.
    script.write_text(
        "import time\nend = time.thread_time() + 3\nwhile time.thread_time() < end: pass"
    )
    shown = f"manage.py ({os.path.basename(os.path.realpath(sys.executable))})"
    path = tmp_path / "x.otlp"
    run_checked("record", "-o", path, "--", sys.executable, "-S", script, "--key", "hunter2")
    for words in (["--by", "process"], ["-o", "-", "-f", "folded"]):
        assert shown in run_checked("report", path, *words).stdout
    assert b"hunter2" not in path.read_bytes()
