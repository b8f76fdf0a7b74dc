"""Process context (OTEP 4719): format, read protocol, forks and Resources."""

import contextlib
import ctypes
import gc
import itertools
import os
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import Access
from otel_kprofiler.model import ON_CPU, ProcessKey, RawSample
from otel_kprofiler.otlp import ProcessContext, decode_process_context, encode_process_context
from otel_kprofiler.processes import ProcessContexts, ProcessResources, read_process_context
from otel_kprofiler.processes.published_context import parse_context_addresses
from otel_kprofiler.sdk import process_context
from otel_kprofiler.sdk.process_context import (
    publish_process_context,
    publish_thread_keys,
    withdraw_process_context,
)
from tests.commands import run_python
from tests.further import further
from tests.fuse import mounted
from tests.raising import raising
from tests.raw_forks import raw_fork, run_in_child
from tests.waiting import wait_until

pytestmark = pytest.mark.system

# The header and payload published by the C implementation in OpenTelemetry's sig-profiling.
C_REFERENCE = (
    Path(__file__).parents[2] / "data" / "process_context" / "c-reference.bin"
).read_bytes()
MAPS = "7f0000000000-7f0000001000 r--p 00000000 fe:00 12 /usr/lib/libc.so.6\n"
TICK_NS = 10_000_000
ADDRESS = 0x4000
PAYLOAD_AT = 0x8000


@pytest.fixture(autouse=True)
def nothing_published():
    publish_thread_keys(None)  # earlier tests in this process may have started thread contexts
    yield
    withdraw_process_context()


def own_header():
    (address,) = parse_context_addresses(Path("/proc/self/maps").read_bytes())
    return address, ctypes.string_at(address, 32)


def test_the_process_context_payload_follows_the_specification():
    assert encode_process_context(ProcessContext({"service.name": "my-svc"}, {"k": 1})) == (
        b"\x0a\x1a" b"\x0a\x18" b"\x0a\x0cservice.name" b"\x12\x08\x0a\x06my-svc"
        b"\x12\x07" b"\x0a\x01k" b"\x12\x02\x18\x01"
    )  # fmt: skip


def test_every_type_of_attribute_survives_a_round_trip():
    resource = {"s": "käse", "t": True, "n": -(1 << 63), "f": -0.5, "l": ("x", ""), "e": ()}
    resource |= {"ln": (80, -443), "lt": (True, False), "lf": (0.5,)}
    context = ProcessContext(resource, {"extra": "1"})
    assert decode_process_context(encode_process_context(context)) == context


def test_the_process_context_header_has_the_layout_of_version_2():
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    publish_process_context({"service.name": "a"})
    _, header = own_header()
    payload = encode_process_context(ProcessContext({"service.name": "a"}, {}))
    assert header[:8] == b"OTEL_CTX"
    assert struct.unpack("=II", header[8:16]) == (2, len(payload))
    at_ns, pointer = struct.unpack("=QQ", header[16:])
    assert before <= at_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert ctypes.string_at(pointer, len(payload)) == payload


def test_a_process_context_is_updated_in_place_with_a_later_timestamp():
    publish_process_context({"service.name": "a"})
    address, first = own_header()
    publish_process_context({"service.name": "b", "list": ["x"], "mixed": [1, "x"]})
    assert own_header()[0] == address
    assert struct.unpack("=Q", own_header()[1][16:24]) > struct.unpack("=Q", first[16:24])
    assert read_process_context(os.getpid()).resource == {"service.name": "b", "list": ("x",)}


def test_contexts_published_by_the_c_implementation_are_decoded():
    context = decode_process_context(C_REFERENCE[32:])
    assert context.resource["service.name"] == "my-service"
    assert context.resource["deployment.environment.name"] == "prod"
    assert context.extra["threadlocal.attribute_key_map"] == (
        "http_route", "http_method", "user_id",
    )  # fmt: skip


def test_a_withdrawn_context_is_not_read():
    publish_process_context({"service.name": "a"})
    withdraw_process_context()
    assert read_process_context(os.getpid()) is None


def test_a_reader_never_observes_a_torn_update():
    publish_process_context({"n": "0", "same": "0"})
    code = (
        "import os, sys\n"
        "from otel_kprofiler.processes import read_process_context\n"
        "pid, seen = int(sys.argv[1]), set()\n"
        "print('ready', flush=True)\n"
        "os.set_blocking(0, False)\n"
        "while os.getppid() == pid and sys.stdin.buffer.raw.read(1) is None:\n"
        "    context = read_process_context(pid)\n"
        "    if context is None: continue\n"
        "    assert context.resource['n'] == context.resource['same'], context\n"
        "    assert set(context.resource['n']) == {context.resource['n'][0]}, context\n"
        "    seen.add(context.resource['n'])\n"
        "    if len(seen) == 50: print('it read while contexts changed', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout.readline() == "ready\n"
        for update in itertools.count():
            text = str(update % 10) * (1 + update % 977)
            publish_process_context({"n": text, "same": text})
            if update % 1000 == 0:
                time.sleep(0.001)  # allows the reader to run even on one CPU
                if update >= 40_000 and select.select([reader.stdout], [], [], 0)[0]:
                    break
        output, _ = reader.communicate()  # closes the reader's input
    assert reader.returncode == 0, "an assertion about what it read"
    assert output.startswith("it read while contexts changed")


def test_a_child_republishes_the_context_with_its_own_instance_id():
    publish_process_context({"service.name": "a", "service.instance.id": "parent"})
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(send, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(receive, 1)
    context = read_process_context(pid)
    os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    for fd in (receive, send):
        os.close(fd)
    assert status == 9  # not a segmentation fault
    assert context.resource["service.name"] == "a"
    assert len(context.resource["service.instance.id"]) == 36
    assert read_process_context(os.getpid()).resource["service.instance.id"] == "parent"


def test_a_child_of_a_publishing_parent_exits_cleanly():
    code = (
        "import gc, os, sys\n"
        "from otel_kprofiler.sdk import publish_process_context\n"
        "publish_process_context({'service.name': 'a'})\n"
        "pid = os.fork()\n"
        "gc.collect()\n"
        "sys.exit(0 if not pid else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    run_python(code)


@pytest.mark.parametrize("first", ["publish", *further("withdraw", "nothing")])
def test_a_child_forked_by_c_code_does_not_modify_its_parents_context(first):
    publish_process_context({"service.name": "parent"})

    def child():
        if first == "publish":
            publish_process_context({"service.name": "child"})
        elif first == "withdraw":
            withdraw_process_context()
        gc.collect()
        context = read_process_context(os.getpid())
        return context and context.resource["service.name"]

    assert run_in_child(raw_fork, child) == ("child" if first == "publish" else "None", 0)
    assert read_process_context(os.getpid()).resource["service.name"] == "parent"


PUBLISH_ON_AN_OLD_KERNEL = """
import os
from otel_kprofiler.sdk import publish_process_context, read_process_context

create = os.memfd_create

def old_kernel(name, flags):
    if flags & 8:  # MFD_NOEXEC_SEAL
        raise OSError(22, "Invalid argument")
    print("created")
    return create(name, flags)

os.memfd_create = old_kernel
publish_process_context({"service.name": "a"})
print(read_process_context(os.getpid()).resource["service.name"])
"""


def test_kernels_without_the_noexec_seal_are_supported():
    assert run_python(PUBLISH_ON_AN_OLD_KERNEL) == "created\na\n"


def test_failing_to_name_the_process_context_mapping_is_an_error(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", raising(OSError(1, "Operation not permitted")))
    monkeypatch.setattr(process_context, "_name_mapping", lambda address: False)
    monkeypatch.setattr(process_context, "_publisher", process_context._Publisher())
    with pytest.raises(HostError, match="neither a memfd nor a name"):
        publish_process_context({"service.name": "a"})


# Contexts are read from a simulated /proc, where mem is a sparse file.


@pytest.fixture
def process(tmp_path):
    def write(pid=5, ticks=300, name="/memfd:OTEL_CTX (deleted)", mode="rw-p", mapped=0, **header):
        directory = tmp_path / "proc" / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        rest = " ".join(["S", *["0"] * 18, str(ticks), str(mapped), *["0"] * 29])
        (directory / "stat").write_text(f"{pid} (x) {rest}\n")
        (directory / "cgroup").write_text("0::/\n")
        (directory / "maps").write_text(
            MAPS + f"{ADDRESS:x}-{ADDRESS + 4096:x} {mode} 00000000 00:01 7 {name}\n"
        )
        payload = header.pop(
            "payload", encode_process_context(ProcessContext({"service.name": "svc"}, {}))
        )
        values = {
            "signature": b"OTEL_CTX", "version": 2, "size": len(payload), "at": 77,
            "pointer": PAYLOAD_AT,
        } | header  # fmt: skip
        memory = bytearray(PAYLOAD_AT) + payload
        memory[ADDRESS : ADDRESS + 32] = struct.pack("=8sIIQQ", *values.values())
        (directory / "mem").write_bytes(memory)
        return directory

    write.root = str(tmp_path)
    return write


def found(process, pid=5):
    context = read_process_context(pid, Access(process.root))
    return dict(context.resource) if context else None


@pytest.mark.parametrize(
    "name",
    ["[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX", "/memfd:OTEL_CTX (deleted)"],
)
def test_every_possible_name_of_the_context_mapping_is_recognized(process, name):
    process(name=name)
    assert found(process) == {"service.name": "svc"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "/tmp/OTEL_CTX"},
        {"mode": "r-xp"},
        {"signature": b"OTEL_CTY"},
        {"version": 1},
        {"version": 3},
        {"size": 0},
        {"size": 65537, "payload": bytes(65537)},
        {"size": 5000},
        {"at": 0},
        {"pointer": 0xFFFF_FFFF_FFFF_0000},
        {"pointer": 0x7FFF_FFFF_FFFF_FFF0},
        {"payload": b"\x0a\xff\xff\xff\xff\x7f"},
        {"payload": b"\x0a\x05\x0a\x03\x0a\x01\xff"},
        {"payload": b"\xff" * 40},
    ],
)
def test_an_invalid_header_or_payload_yields_no_context(process, wrong):
    process(**wrong)
    assert not found(process)


def test_exited_and_unreadable_processes_have_no_context(process):
    assert found(process, pid=6) is None


def test_decoding_garbage_raises_only_value_error():
    for cut in range(len(C_REFERENCE) - 32):
        data = bytearray(C_REFERENCE[32:])
        data[cut] ^= 0xFF
        for payload in (bytes(data), C_REFERENCE[32 : 32 + cut]):
            with contextlib.suppress(ValueError):
                decode_process_context(payload)


def raw(tgid, start_ns):
    return RawSample(ON_CPU, 1, 1, 0, tgid, tgid, start_ns, 0, b"x", (), (), None)


@pytest.fixture
def resources(process):
    contexts = ProcessContexts(Access(process.root), first_look_s=0.01, answer_timeout_s=60)
    made = ProcessResources(Access(process.root), Clock(), {"host.name": "h"}, contexts=contexts)
    yield made
    made.close()


def close_window(resources, *seen):
    renewed = resources.renew(seen)
    return [renewed.get(resource, resource) for resource in seen]


def test_a_published_service_name_reaches_the_resource_within_one_window(process, resources):
    process()
    sample = raw(5, 300 * TICK_NS)
    (closed,) = close_window(resources, resources.get(sample))
    assert closed.attributes["service.name"] == "svc"
    assert closed.attributes["host.name"] == "h"
    assert resources.get(sample) is closed
    assert close_window(resources, closed) == [closed]


def test_new_and_changed_contexts_take_effect_in_the_next_window(process, resources):
    directory = process(name="/tmp/other")
    sample = raw(5, 300 * TICK_NS)
    (before,) = close_window(resources, resources.get(sample))
    assert "service.name" not in before.attributes
    process()

    def read_name():  # processes without a context are scanned less often
        (after,) = close_window(resources, resources.get(sample))
        return after.attributes.get("service.name")

    assert wait_until(read_name) == "svc"
    payload = encode_process_context(ProcessContext({"service.name": "new", "host.name": "x"}, {}))
    process(at=78, payload=payload)
    (changed,) = close_window(resources, resources.get(sample))
    assert changed.attributes["service.name"] == "new"
    assert changed.attributes["host.name"] == "h"  # a process cannot override it
    (directory / "maps").write_text(MAPS)  # the process has executed another program
    (directory / "mem").write_bytes(b"")
    close_window(resources, resources.get(sample))  # the window has the previous program's samples
    (gone,) = close_window(resources, resources.get(sample))
    assert "service.name" not in gone.attributes


def test_a_reused_pid_does_not_inherit_the_context(process, resources):
    directory = process()
    close_window(resources, resources.get(raw(5, 300 * TICK_NS)))
    process(ticks=400, name="/tmp/other", signature=b"12345678")
    (new,) = close_window(resources, resources.get(raw(5, 400 * TICK_NS)))
    assert "service.name" not in new.attributes
    assert directory.exists()


def test_an_exited_process_keeps_its_service_name_until_the_window_closes(process, resources):
    directory = process()
    first = resources.get(raw(5, 300 * TICK_NS))
    wait_until(lambda: resources._contexts._known)
    for name in ("mem", "maps", "stat"):
        (directory / name).unlink()
    (closed,) = close_window(resources, first)
    assert closed.attributes["service.name"] == "svc"
    assert not resources._contexts._known


def test_processes_without_a_context_are_read_less_often_the_longer_they_run(process, monkeypatch):
    now_s = [1.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("otel_kprofiler.processes.contexts.time", clock)
    directory = process(name="/tmp/other")
    (directory / "environ").write_bytes(b"OTEL_SERVICE_NAME=first\0")
    contexts = ProcessContexts(Access(process.root), first_look_s=0, answer_timeout_s=60)
    key = ProcessKey(5, 300 * TICK_NS)

    def read_name_at(seconds):
        now_s[0] = seconds
        return contexts.look([key])[key]["service.name"]

    contexts.expect(key)
    assert read_name_at(2) == read_name_at(42) == "first"  # the next read is at 62 s
    process()
    with monkeypatch.context() as early:
        early.setattr(contexts._calls, "call", raising(AssertionError("it was read too early")))
        assert read_name_at(61) == "first"
    assert read_name_at(63) == "svc"
    contexts.close()


def test_the_environment_is_read_again_once_another_program_is_sampled(process):
    directory = process(name="/tmp/other")
    (directory / "environ").write_bytes(b"HOME=/root\0")
    contexts = ProcessContexts(Access(process.root), first_look_s=0, answer_timeout_s=60)
    key = ProcessKey(5, 300 * TICK_NS)
    contexts.expect(key)
    assert contexts.look([key]) == {}
    (directory / "environ").write_bytes(b"OTEL_SERVICE_NAME=svc\0")
    contexts.expect(key)  # after execve(2)
    assert contexts.look([key]) == {key: {"service.name": "svc"}}
    contexts.close()


@pytest.mark.parametrize("last", ["environ", "exe"])
def test_nothing_is_kept_of_a_process_that_is_replaced_while_it_is_read(process, last):
    directory = process(name="/tmp/other")
    (directory / "environ").write_bytes(b"OTEL_SERVICE_NAME=other\0")
    (directory / "exe").symlink_to("/bin/other")

    class Files(Access):
        def _replace(self, path):
            if path.endswith(last):
                process(ticks=400, name="/tmp/other")

        def open_fd(self, path):
            self._replace(path)
            return super().open_fd(path)

        def read_link(self, path):
            self._replace(path)
            return super().read_link(path)

    contexts = ProcessContexts(Files(process.root), first_look_s=0, answer_timeout_s=60)
    key = ProcessKey(5, 300 * TICK_NS)
    contexts.expect(key)
    assert contexts.look([key]) == {}
    assert contexts._programs == {}
    contexts.close()


def test_a_context_read_times_out_if_process_memory_is_unresponsive(process, tmp_path, caplog):
    caplog.set_level("INFO")
    directory = process()
    (directory / "mem").unlink()
    os.mkfifo(directory / "mem")  # open(2) blocks until a writer opens the FIFO
    contexts = ProcessContexts(Access(process.root), first_look_s=0, answer_timeout_s=0.05)
    key = ProcessKey(5, 300 * TICK_NS)
    contexts.expect(key)
    started = time.monotonic()
    assert contexts.look([key]) == {}
    assert contexts.look([key]) == {}
    assert time.monotonic() - started < 30
    assert len([r for r in caplog.records if "not read in time" in r.message]) == 1
    contexts.close()
    os.close(os.open(directory / "mem", os.O_RDWR))


def test_contexts_are_read_while_a_read_of_another_process_hangs(process, tmp_path):
    keys = [ProcessKey(pid, 300 * TICK_NS) for pid in (5, 6, 7)]
    released = []
    hanging, *_ = [process(pid=key.tgid) for key in keys]
    content = (hanging / "mem").read_bytes()
    (hanging / "mem").unlink()
    with mounted(tmp_path / "fuse", {"mem": content}, cached=False) as fuse:
        (hanging / "mem").symlink_to(fuse.point / "mem")
        fuse.freeze("read")
        contexts = ProcessContexts(Access(process.root), first_look_s=0, answer_timeout_s=30)
        contexts.follow_threads(SimpleNamespace(release=released.append))
        contexts.expect(keys[0])
        assert contexts.look(keys[:1]) == {}
        for key in keys[1:]:
            contexts.expect(key)
        assert list(contexts.look(keys)) == keys[1:]
        fuse.thaw()
        wait_until(lambda: list(contexts.look(keys)) == keys)
        fuse.freeze("read")
        assert list(contexts.look(keys)) == keys
        assert keys[0] in contexts._calls._users
        (hanging / "stat").write_text((hanging / "stat").read_text().replace("300", "400"))
        contexts._threads._registered[keys[0].tgid] = keys[0]
        assert list(contexts.look(keys)) == keys, "it was forgotten in the window of its end"
        assert released == [keys[0].tgid]
        assert list(contexts.look(keys)) == keys[1:]
        contexts.close()
        fuse.thaw()


def test_a_process_cannot_override_its_container_host_or_unit(process, resources):
    claims = {
        "container.id": "c" * 64, "container.name": "db", "k8s.pod.uid": "u", "host.id": "h",
        "systemd.unit.name": "a.service",
        "otel_kprofiler.stream.taken": 7, "service.name": "svc", "hostname.of.mine": "ok",
    }  # fmt: skip
    process(payload=encode_process_context(ProcessContext(claims, {})))
    (closed,) = close_window(resources, resources.get(raw(5, 300 * TICK_NS)))
    taken = {name: value for name, value in closed.attributes.items() if name in claims}
    assert taken == {"service.name": "svc", "hostname.of.mine": "ok"}


def test_a_context_with_too_many_values_is_truncated(process, resources):
    claims = {"list": ("x",) * 100, **{f"k{number:03}": 1 for number in range(300)}}
    process(payload=encode_process_context(ProcessContext(claims, {})))
    (closed,) = close_window(resources, resources.get(raw(5, 300 * TICK_NS)))
    assert [name for name in closed.attributes if name in claims] == [
        "list", *[f"k{number:03}" for number in range(28)]
    ]  # fmt: skip


def test_contexts_of_all_processes_share_one_limit(process):
    payload = encode_process_context(ProcessContext({"service.name": "x" * 16000}, {}))
    keys = [ProcessKey(pid, 300 * TICK_NS) for pid in range(1, 1201)]
    for key in keys:
        process(pid=key.tgid, payload=payload)
    contexts = ProcessContexts(Access(process.root), first_look_s=0, answer_timeout_s=60)
    for key in keys:
        contexts.expect(key)
    published = contexts.look(keys)
    contexts.close()
    assert 0 < len(published) * len(payload) <= 16 * 1024 * 1024


def test_if_the_reader_thread_cannot_start_one_warning_is_logged_and_no_context_is_read(
    process, monkeypatch, caplog
):
    process()
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    contexts = ProcessContexts(Access(process.root))
    key = ProcessKey(5, 300 * TICK_NS)
    contexts.expect(key)
    contexts.expect(key)
    assert contexts.look([key]) == {}
    assert len([r for r in caplog.records if "can't start new thread" in r.message]) == 1


def test_mappings_are_read_again_if_their_size_changes_and_from_time_to_time(process, monkeypatch):
    contexts = ProcessContexts(Access(process.root))
    key = ProcessKey(5, 300 * TICK_NS)
    process(name="/tmp/other", mapped=8192)
    assert contexts._read_claims(key) is None
    process(mapped=8192)
    assert contexts._read_claims(key) is None, "the mappings were read"
    process(mapped=12288)
    assert contexts._read_claims(key).attributes == {"service.name": "svc"}

    process(name="/tmp/other", mapped=12288, at=78)
    assert contexts._read_claims(key) is None
    process(mapped=12288)
    monkeypatch.setattr("otel_kprofiler.processes.contexts._MAX_PAUSE_S", 0.0)
    assert contexts._read_claims(key).attributes == {"service.name": "svc"}


def test_a_context_that_is_published_again_in_the_same_memory_is_read(process):
    contexts = ProcessContexts(Access(process.root))
    key = ProcessKey(5, 300 * TICK_NS)
    process(mapped=8192, at=0)
    assert contexts._read_claims(key) is None
    process(mapped=8192)
    assert contexts._read_claims(key).attributes == {"service.name": "svc"}


def test_environment_variables_name_a_service_until_it_publishes_a_name(process, resources):
    directory = process(name="/tmp/other")
    environ = b"OTEL_RESOURCE_ATTRIBUTES=service.name=env,service.version=1\0"
    (directory / "environ").write_bytes(environ)
    resource = resources.get(raw(5, 300 * TICK_NS))
    (resource,) = close_window(resources, resource)
    assert resource.attributes["service.name"] == "env"
    assert resource.attributes["service.version"] == "1"
    process()
    deadline = time.monotonic() + 60  # processes without a context are scanned less often
    while resource.attributes["service.name"] == "env":
        assert time.monotonic() < deadline
        (resource,) = close_window(resources, resource)
    assert resource.attributes["service.name"] == "svc"
    assert "service.version" not in resource.attributes


def test_a_service_without_a_published_name_is_named_by_a_configured_source(process, resources):
    directory = process(name="/tmp/other")
    resources.rebase({}, ("executable",))
    (directory / "exe").symlink_to("/usr/bin/web")
    (resource,) = close_window(resources, resources.get(raw(5, 300 * TICK_NS)))
    assert resource.attributes["service.name"] == "web"
