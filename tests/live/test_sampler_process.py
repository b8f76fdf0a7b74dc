"""The sampler needs few privileges, survives forks, cleans up completely, and explains errors."""

import ctypes
import errno
import os
import platform
import signal
import struct
import subprocess
import sys

import pytest

from otel_kprofiler.bpf import SAMPLER_OBJECT, SAMPLER_SOURCE, LibbpfLoader, ObjectSpec, libbpf
from otel_kprofiler.errors import DependencyError, KernelFeatureError, SamplerError
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from tests.public import NOBODY
from tests.waiting import wait_until

pytestmark = pytest.mark.live

TWO_CAPABILITIES = ["--inh-caps=+bpf,+perfmon", "--ambient-caps=+bpf,+perfmon"]

TAKE_A_SAMPLE = """
import sys
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.bpf import get_loader
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
try:
    config = SamplerConfig(samples_per_second=999, stacks="both")
    sampler = EbpfSampler(config, loader=get_loader(*sys.argv[1:]))
    sampler.start()
except KProfilerError as error:
    print(error, "|", error.hint)
    sys.exit(error.exit_status)
samples = []
while not samples:
    samples = sampler.drain()
sampler.close()
print("sampled", samples[0].start_time_ns is not None)
"""


def run_as_nobody(python, *options, loader="auto"):
    return subprocess.run(
        [*NOBODY, *options, python.command, "-c", TAKE_A_SAMPLE, loader],
        capture_output=True, text=True,
    )  # fmt: skip


PARANOID = "/proc/sys/kernel/perf_event_paranoid"


@pytest.fixture
def restored_sysctl():
    with open(PARANOID) as file:
        before = file.read()
    yield
    with open(PARANOID, "w") as file:
        file.write(before)


def follow(fix):
    """Runs the commands in a printed fix, and returns the last command's output."""
    steps = [step.partition(": ")[2] for step in fix.strip().split("; then ")]
    steps[-1] = fix.strip().rpartition("with: ")[2] if "with: " in fix else steps[-1]
    for step in steps:
        done = subprocess.run(["sh", "-c", step], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("loader", ["libbpf", "bcc"], indirect=True)
def test_two_capabilities_suffice_to_sample(public_python, restored_sysctl, loader):
    """On distributions that restrict perf more strictly, the test first applies the printed fix."""
    with open(PARANOID) as file:
        level = int(file.read())
    done = run_as_nobody(public_python, *TWO_CAPABILITIES, loader=loader)
    if level > 2 and done.returncode:
        assert "CAP_SYS_ADMIN" in done.stdout
        follow(done.stdout.partition("|")[2])
        done = run_as_nobody(public_python, *TWO_CAPABILITIES, loader=loader)
    assert (done.returncode, done.stdout) == (0, "sampled True\n"), done.stderr


@pytest.mark.parametrize("kept", ["bpf", "perfmon"])
def test_a_missing_capability_is_reported(public_python, kept, loader):
    done = run_as_nobody(
        public_python, f"--inh-caps=+{kept}", f"--ambient-caps=+{kept}", loader=loader
    )
    missing = {"bpf": "CAP_PERFMON missing", "perfmon": "CAP_BPF missing"}[kept]
    assert done.returncode == 3
    assert missing in done.stdout
    assert f"CAP_{kept.upper()} " not in done.stdout.partition("|")[0]


def test_the_fix_for_missing_privileges_works_as_printed(public_python, restored_sysctl):
    done = run_as_nobody(public_python)
    assert done.returncode == 3
    assert "CAP_BPF and CAP_PERFMON missing" in done.stdout
    assert follow(done.stdout.partition("|")[2]) == "sampled True\n"


def test_the_fix_for_a_limited_bounding_set_names_container_runtime_options(public_python):
    done = run_as_nobody(public_python, "--bounding-set=-bpf,-perfmon")
    assert done.returncode == 3
    assert "--cap-add BPF --cap-add PERFMON" in done.stdout


SAMPLE_FOREVER = """
import os, time
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
sampler = EbpfSampler(SamplerConfig())
sampler.start()
for fd in os.listdir("/proc/self/fdinfo"):
    if os.path.exists(f"/proc/self/fdinfo/{fd}"):
        info = open(f"/proc/self/fdinfo/{fd}").read().split()
        if "prog_id:" in info:
            print(info[info.index("prog_id:") + 1], flush=True)
            break
time.sleep(60)
"""


def program_is_loaded(program_id):
    """Returns whether BPF_PROG_GET_FD_BY_ID (13) finds the program."""
    number = {"x86_64": 321, "aarch64": 280}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("=III116x", program_id, 0, 0)
    fd = libc.syscall(number, 13, attributes, len(attributes))
    if fd >= 0:
        os.close(fd)
        return True
    assert ctypes.get_errno() == errno.ENOENT
    return False


def test_killing_the_sampler_unloads_its_program():
    with subprocess.Popen([sys.executable, "-c", SAMPLE_FOREVER], stdout=subprocess.PIPE) as owner:
        program_id = int(owner.stdout.readline())
        assert program_is_loaded(program_id)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not program_is_loaded(program_id))


FORK = """
import mmap, os, sys, time
from otel_kprofiler.bpf import get_loader
from otel_kprofiler.errors import SamplerError
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

def ours():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{fd}")]
    maps = [line.split()[-1] for line in open("/proc/self/maps")]
    return [name for name in links + maps if "anon_inode" in name]

def sample():
    end, samples = time.monotonic() + 60, []
    while not samples and time.monotonic() < end:
        samples = sampler.drain()
    return len(samples)

config = SamplerConfig(samples_per_second=999, stacks="both")
sampler = EbpfSampler(config, loader=get_loader(sys.argv[1]))
sampler.start()
assert sample() and len(ours()) > 10, ours()
child = os.fork()
if child == 0:
    left = ours()
    try:
        sampler.drain()
    except SamplerError as error:
        left.append(str(error))
    own = EbpfSampler(SamplerConfig(samples_per_second=999, stacks="both"))
    own.start()
    own.close()
    print("child:", left, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent:", sample() > 0)
"""


def test_a_forked_child_holds_no_bpf_maps_and_the_parent_keeps_sampling(loader):
    done = subprocess.run(
        [sys.executable, "-c", FORK, loader], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [
        "child: ['the sampler is not running']",
        "parent: True",
    ], done.stderr


@pytest.mark.long
def test_forking_while_another_thread_drains_neither_hangs_nor_crashes():
    """The child must not use its copies of the drain's lock and memory views."""
    code = """
import os, threading, time
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
sampler = EbpfSampler(SamplerConfig(samples_per_second=4999, stacks="both"))
sampler.start()
going = True
def drain():
    while going:
        sampler.drain()
thread = threading.Thread(target=drain)
thread.start()
for _ in range(50):
    child = os.fork()
    if child == 0:
        os._exit(0 if sampler._attached is None else 1)
    assert os.waitpid(child, 0)[1] == 0
going = False
thread.join()
sampler.close()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "done\n", done.stderr


def spec(path):
    return ObjectSpec(SAMPLER_SOURCE, path, ("kprofiler_sample",), {"ring": 4096})


def test_the_error_for_a_rejected_program_contains_the_verifiers_log(tmp_path):
    data = bytearray(SAMPLER_OBJECT.read_bytes())
    table, size, count = struct.unpack_from("<Q10xHH", data, 40)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    names = headers[struct.unpack_from("<H", data, 62)[0]][4]
    code = next(
        header for header in headers if data[names + header[0] :].startswith(b"perf_event\0")
    )
    data[code[4] : code[4] + 8] = struct.pack("<BBhi", 0x79, 0x50, 0, 0)  # r0 = *(u64 *)(r5 + 0)
    broken = tmp_path / "broken.bpf.o"
    broken.write_bytes(data)
    with pytest.raises(SamplerError, match="Permission denied") as raised:
        LibbpfLoader().load(spec(broken))
    assert "R5 !read_ok" in raised.value.log


def test_an_unsupported_map_type_is_reported_as_a_missing_kernel_feature(tmp_path):
    """For example, old kernels have no BPF ring buffers."""
    ring_type = struct.pack("<III", 0, 3 << 24, 0)  # BTF_KIND_ARRAY
    data = SAMPLER_OBJECT.read_bytes()
    sizes = [
        at + 20
        for at in range(0, len(data) - 24, 4)
        if data[at : at + 12] == ring_type and data[at + 20 : at + 24] == struct.pack("<I", 27)
    ]
    assert len(sizes) == 1
    unknown = tmp_path / "unknown.bpf.o"
    unknown.write_bytes(data[: sizes[0]] + struct.pack("<I", 999) + data[sizes[0] + 4 :])

    class Loader(LibbpfLoader):
        def load(self, spec):
            return super().load(spec._replace(object=unknown))

    with pytest.raises(KernelFeatureError, match="Invalid argument"):
        EbpfSampler(SamplerConfig(), loader=Loader()).start()


def test_loading_a_malformed_bpf_object_is_an_error(tmp_path):
    broken = tmp_path / "broken.bpf.o"
    broken.write_bytes(b"no object")
    with pytest.raises(SamplerError, match=r"opening broken\.bpf\.o failed"):
        LibbpfLoader().load(spec(broken))


def test_the_error_for_a_missing_libbpf_names_its_package(monkeypatch):
    monkeypatch.setattr(libbpf, "_LIBRARY", "libbpf.so.99")
    with pytest.raises(DependencyError, match=r"libbpf\.so\.99") as raised:
        EbpfSampler(SamplerConfig(), loader=LibbpfLoader()).start()
    assert "apt-get install libbpf1" in raised.value.hint
