"""Resources identify processes, and have attributes from /proc."""

import os
import time
from pathlib import Path

import pytest

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access, parse_stat
from otel_kprofiler.model import ON_CPU, ProcessKey, RawSample, Resource
from otel_kprofiler.processes import SERVICE_SOURCES, ProcessResources, read_host_attributes
from otel_kprofiler.processes.owners import parse_user_name
from otel_kprofiler.processes.resources import find_service_name

CONTAINER = "3f2a" * 16
TICK_NS = 10_000_000


def raw(tgid, start_ns, comm=b"main", tid=None):
    return RawSample(ON_CPU, 1, 1, 0, tgid, tid or tgid, start_ns, 0, comm, (), (), None)


@pytest.fixture
def proc(tmp_path):
    """Returns a fake /proc. Tests call the result to add a process."""

    def add(pid, ticks, exe="/usr/bin/server", cgroup="0::/\n", comm="a ) b", *, flags=0, stack=0):
        directory = tmp_path / "proc" / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        rest = " ".join(["S", "1", *["0"] * 4, str(flags), *["0"] * 12, str(ticks)])
        rest = " ".join([rest, *["0"] * 5, str(stack), *["0"] * 24])
        (directory / "stat").write_text(f"{pid} ({comm}) {rest}\n")
        (directory / "cgroup").write_text(cgroup)
        if exe:
            link = directory / "exe"
            link.unlink(missing_ok=True)
            link.symlink_to(exe)

    add.root = str(tmp_path)
    return add


def passwd(root, text="root:x:0:0::/:/bin/sh\nweb:x:33:33::/:/bin/sh\n", cgroup="user.slice"):
    """Writes /etc/passwd and /proc/self/cgroup; by default, the process is not in a container."""
    (Path(root) / "etc").mkdir(exist_ok=True)
    (Path(root) / "etc/passwd").write_text(text)
    (Path(root) / "proc/self").mkdir(parents=True)
    (Path(root) / "proc/self/cgroup").write_text(f"0::/{cgroup}\n")


def resources(proc, **kwargs):
    return ProcessResources(Access(proc.root), Clock(), {"host.name": "h"}, **kwargs)


def test_resource_attributes_include_container_executable_and_process_creation_time(proc):
    proc(5, 300, cgroup=f"0::/kubepods/pod1/cri-containerd-{CONTAINER}.scope\n")
    attributes = resources(proc).get(raw(5, 300 * TICK_NS + 123)).attributes
    assert attributes["process.pid"] == 5
    assert attributes["process.executable.path"] == "/usr/bin/server"
    assert attributes["process.executable.name"] == "server"
    assert attributes["container.id"] == CONTAINER
    assert attributes["process.creation.time"].endswith("Z")
    assert attributes["host.name"] == "h"


def test_processes_that_reuse_a_pid_never_share_a_resource(proc):
    proc(5, 300)
    result = resources(proc)
    old = result.get(raw(5, 100 * TICK_NS, comm=b"gone"))
    new = result.get(raw(5, 300 * TICK_NS))
    assert old is not new
    assert old.attributes["process.executable.name"] == "gone"
    assert "process.executable.path" not in old.attributes
    assert new.attributes["process.executable.name"] == "server"


def program(exec_id, stack_start, comm=b"main", owner=0, tgid=5):
    """Returns a sample from process ``tgid``; all processes have the same start time."""
    sample = raw(tgid, 300 * TICK_NS, comm)
    return sample._replace(exec_id=exec_id, stack_start=stack_start, owner=owner)


def test_each_program_executed_by_a_process_has_a_separate_resource(proc):
    result = resources(proc)
    proc(5, 300, exe="/bin/first", stack=0x7000)
    first = result.get(program(1, 0x7000))
    proc(5, 300, exe="/bin/second", stack=0x9000)
    second = result.get(program(2, 0x9000))
    assert first.attributes["process.executable.path"] == "/bin/first"
    assert second.attributes["process.executable.path"] == "/bin/second"
    assert result.get(program(1, 0x7000)) is first
    assert result.get(program(2, 0)) is second  # the stack start of an exiting process is 0
    assert result.get_of(ProcessKey(5, 300 * TICK_NS)) is second


def test_the_thread_name_is_used_if_exec_has_replaced_the_sampled_program(proc):
    proc(5, 300, exe="/bin/second", stack=0x9000)
    attributes = resources(proc).get(program(1, 0x7000, b"first")).attributes
    assert attributes["process.executable.name"] == "first"
    assert "process.executable.path" not in attributes
    assert attributes["process.parent_pid"] == 1


def test_a_child_runs_its_parents_program_until_exec(proc):
    result = resources(proc)
    proc(4, 300, exe="/bin/shell", comm="sh", stack=0x7000)
    result.get(program(1, 0x7000, b"sh", tgid=4))
    proc(5, 300, exe="/bin/second", stack=0x9000)
    child = result.get(program(1, 0x7000, b"sh"))
    assert child.attributes["process.executable.path"] == "/bin/shell"
    exited = result.get(program(1, 0x7000, b"sh", tgid=6))
    assert exited.attributes["process.executable.path"] == "/bin/shell"
    other = result.get(program(1, 0x7000, b"other", tgid=7))  # unrelated, despite the same exec_id
    assert other.attributes["process.executable.name"] == "other"


def test_the_resource_of_a_program_first_sampled_in_execve_is_read_again(proc):
    new = []
    result = resources(proc, on_new=lambda *one: new.append(one))
    proc(5, 300, exe="/bin/second", stack=0x9000)
    resource = result.get(program(2, 0x8FF0, b"second"))
    assert result.renew([resource]) == {}
    assert result.get(program(2, 0x9000, b"second")) is resource
    renewed = result.renew([resource])[resource]
    assert renewed.attributes["process.executable.path"] == "/bin/second"
    assert [one for _, one in new] == [resource, renewed]
    assert result.get(program(2, 0x9000, b"second")) is renewed


def test_the_owner_attribute_changes_if_a_process_changes_its_user(proc):
    passwd(proc.root)
    proc(5, 300, stack=0x7000)
    result = resources(proc)
    before = result.get(program(1, 0x7000, owner=0))
    after = result.get(program(1, 0x7000, owner=33))
    gone = result.get(program(1, 0x7000, owner=33, tgid=6))
    owners = [one.attributes["process.owner"] for one in (before, after, gone)]
    assert owners == ["root", "web", "web"]


def test_a_fixed_resource_changes_only_if_its_owner_changes(proc):
    passwd(proc.root)
    result = resources(proc)
    for attributes in ({"service.name": "a", "process.owner": "root"}, {"service.name": "a"}):
        resource = Resource(attributes)
        result.fix(5, resource)
        assert result.get(program(1, 0x7000, owner=0)) is resource
        after = result.get(program(9, 0x9000, owner=33))
        assert after.attributes.get("process.owner") in ("web", None)
        assert after.attributes.keys() == resource.attributes.keys()
        assert result.get(program(1, 0x7000, owner=33)) is after


def test_the_resource_of_an_exited_process_is_built_from_the_sample(proc):
    attributes = resources(proc).get(raw(99, 7 * TICK_NS, comm=b"cc1")).attributes
    assert attributes["process.executable.name"] == "cc1"
    assert "process.creation.time" in attributes


def test_reused_pids_are_distinguished_using_proc_if_samples_lack_start_times(proc):
    proc(5, 300)
    result = resources(proc)
    first = result.get(raw(5, None))
    assert result.get(raw(5, None)) is first
    proc(5, 400, exe="/bin/other")
    assert result.get(raw(5, None)) is first  # /proc is not reread within a window
    result.next_window()
    assert result.get(raw(5, None)).attributes["process.executable.name"] == "other"


def test_the_resource_of_a_kernel_thread_is_named_after_the_thread(proc):
    proc(12, 3, exe="")
    result = resources(proc).get(raw(12, 3 * TICK_NS, comm=b"kworker/0:1"))
    assert result.attributes["process.executable.name"] == "kworker/0:1"


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        ("kworker/0:1-events", "kworker/0:1"),
        ("kworker/u8:0+flush-8:0", "kworker/u8:0"),
        ("kworker/0:1H", "kworker/0:1H"),
        ("md-raid+1", "md-raid+1"),
    ],
)
def test_a_kernel_thread_without_samples_is_named_from_proc(proc, comm, name):
    proc(12, 3, exe="", comm=comm, flags=0x208040)
    result = resources(proc)
    resource = result.get_of(ProcessKey(12, 3 * TICK_NS))
    assert resource.attributes["process.executable.name"] == name
    assert result.get_of(ProcessKey(12, 3 * TICK_NS)) is resource
    assert result.get(raw(12, 3 * TICK_NS, comm=name.encode())) is resource


def test_processes_that_exited_without_being_sampled_share_a_resource(proc):
    result = resources(proc)
    sampled = result.get(raw(97, TICK_NS))
    resource = result.get_of(ProcessKey(99, 7 * TICK_NS), has_ended=True)
    assert resource.attributes["otel_kprofiler.ended_processes"] is True
    assert "process.pid" not in resource.attributes
    assert result.get_of(ProcessKey(98, TICK_NS), has_ended=True) is resource
    assert result.get_of(ProcessKey(97, TICK_NS), has_ended=True) is sampled


def test_processes_of_the_same_user_and_program_share_a_resource_until_they_are_read(proc):
    proc(97, 1, comm="main", stack=0x7000)
    resolver = resources(proc)
    parent = raw(97, TICK_NS, comm=b"main")._replace(owner=1000, stack_start=0x7000)
    program = resolver.get(parent).attributes["process.executable.path"]
    children = [parent._replace(tgid=pid, tid=pid) for pid in (98, 99)]
    resource = resolver.get_shared(children[0])
    assert resolver.get_shared(children[1]) is resource
    assert resource.attributes["process.executable.path"] == program
    assert resource.attributes["otel_kprofiler.coarse"] is True
    assert "process.pid" not in resource.attributes
    others = [{"owner": 1001}, {"stack_start": 0x8000}, {"cgroup_id": 5}]
    assert resource not in [resolver.get_shared(parent._replace(**other)) for other in others]


POD = f"/kubepods/pod1/cri-containerd-{CONTAINER}.scope"
NAMES = {"k8s.container.name": "cart", "k8s.pod.name": "shop", "k8s.namespace.name": "default"}


def renew_until(resolver, resource, expected):
    """Renews a shared Resource, repeatedly if necessary, until it has the expected attributes."""
    until_s = time.monotonic() + 30
    while not expected.items() <= resource.attributes.items():
        assert time.monotonic() < until_s, resource.attributes
        time.sleep(0.05)
        resource = resolver.renew([resource]).get(resource, resource)
    return resource


@pytest.mark.system
def test_a_shared_resource_is_renewed_when_its_container_and_names_become_known(proc):
    root = Path(proc.root)
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/cgroup").symlink_to("cgroup:[4026531835]")
    tree = root / "cgroups"
    (root / "proc/self/mountinfo").write_text(f"31 24 0:27 / {tree} rw - cgroup2 none rw\n")
    tree.mkdir()
    resolver = resources(proc, service_sources=SERVICE_SOURCES)
    resolver.get_shared(raw(98, TICK_NS)._replace(cgroup_id=1))  # lists the cgroups
    container = tree / POD.lstrip("/")
    container.mkdir(parents=True)
    sample = raw(99, TICK_NS)._replace(cgroup_id=container.stat().st_ino, owner=0, stack_start=1)
    first = resolver.get_shared(sample)
    assert "container.id" not in first.attributes
    second = renew_until(resolver, first, {"container.id": CONTAINER})
    logs = root / "var/log/containers"
    logs.mkdir(parents=True)
    (logs / f"shop_default_cart-{CONTAINER}.log").touch()
    container.rmdir()
    third = renew_until(resolver, second, {**NAMES, "service.name": "cart"})
    assert second.attributes.items() <= third.attributes.items()
    assert resolver.get_shared(sample) is third
    assert resolver.renew([third]) == {}


def test_the_number_of_shared_resources_is_limited(proc):
    resolver = resources(proc)
    for owner in range(1000):
        resolver.get_shared(raw(98, TICK_NS)._replace(owner=owner, stack_start=1))
    assert len(resolver._shared) <= 256


def test_a_process_without_samples_has_no_name_if_its_pid_was_reused(proc):
    proc(99, 8)
    attributes = resources(proc).get_of(ProcessKey(99, 7 * TICK_NS)).attributes
    assert attributes["process.pid"] == 99
    assert "process.executable.name" not in attributes


def test_kernel_threads_have_an_attribute_that_names_their_kind(proc):
    proc(12, 3, exe="", comm="kworker/0:1-events", flags=0x208040)
    result = resources(proc).get(raw(12, 3 * TICK_NS, comm=b"kworker/0:1")).attributes
    assert result["otel_kprofiler.kernel_thread"] == "kworker"
    assert not {"process.owner", "process.user.id", "process.parent_pid"} & result.keys()
    idle = resources(proc).get(raw(0, None, comm=b"swapper/1")).attributes
    assert idle["otel_kprofiler.kernel_thread"] == "swapper"
    proc(13, 3)
    other = resources(proc).get(raw(13, 3 * TICK_NS)).attributes
    assert "otel_kprofiler.kernel_thread" not in other


def test_a_resource_contains_the_parent_and_owner_of_its_process(proc):
    proc(5, 300)
    passwd(proc.root, f"root:x:0:0::/:/bin/sh\nme:x:{os.geteuid()}:1::/:\n")
    result = resources(proc).get(raw(5, 300 * TICK_NS)).attributes
    assert result["process.parent_pid"] == 1
    assert result["process.owner"] == ("root" if os.geteuid() == 0 else "me")
    assert "process.user.id" not in result


def test_a_user_without_a_name_is_identified_by_number(proc):
    """In a container, /etc/passwd is part of the container's image."""
    proc(5, 300)
    passwd(proc.root, f"me:x:{os.geteuid()}:1::/:\n", cgroup=f"docker/{CONTAINER}")
    result = resources(proc).get(raw(5, 300 * TICK_NS)).attributes
    assert result["process.user.id"] == os.geteuid()
    assert "process.owner" not in result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"root:x:0:0:root:/root:/bin/sh\nweb:x:33:33::/:\n", "web"),
        (b"x:web:330:33::/:\nlast:*:33:1", "last"),
        (b"#web:x:33:33\nweb:33:33\n:x:33:1\n", ""),
        (b"a:x:1:33:33:\n", ""),
        (b"\xff:x:33:1::\n", "\\xff"),
        (b"", ""),
    ],
)
def test_user_names_are_read_from_passwd(text, expected):
    assert parse_user_name(text, 33) == expected


def moved(proc, tgid, cgroup_id):
    return raw(tgid, 300 * TICK_NS)._replace(cgroup_id=cgroup_id)


def test_a_process_that_moves_to_a_container_receives_a_new_resource(proc):
    proc(5, 300, cgroup="0::/system.slice/runtime.service\n")
    result = resources(proc)
    before = result.get(moved(proc, 5, 1))
    assert result.get(moved(proc, 5, 2)) is before  # nothing has changed
    proc(5, 300, cgroup=f"0::/docker/{CONTAINER}\n")
    after = result.get(moved(proc, 5, 3))
    assert "container.id" not in before.attributes
    assert after.attributes["container.id"] == CONTAINER
    assert result.get(moved(proc, 5, 1)) is before
    assert result.renew([before, after]) == {}
    (Path(proc.root) / "proc/5/cgroup").unlink()
    assert result.get(moved(proc, 5, 4)) is after  # the process has exited


def test_the_attributes_of_an_evicted_process_are_read_again(proc):
    proc(5, 300)
    result = resources(proc, capacity=1)
    first = result.get(raw(5, 300 * TICK_NS))
    result.get(raw(6, 1))
    assert not result._running
    assert result.get(raw(5, 300 * TICK_NS)) is not first


@pytest.mark.parametrize(
    ("sources", "expected"),
    [((), ""), (("container",), "cart"), (("unit", "container"), "a"), (("executable",), "server")],
)
def test_services_are_named_from_the_configured_sources(sources, expected):
    attributes = {
        "process.executable.name": "server",
        "systemd.unit.name": "user@1.service",
        "otel_kprofiler.systemd.user_unit.name": "a.service",
        "container.name": "k8s_cart",
        "k8s.container.name": "cart",
    }
    assert find_service_name(attributes, sources) == expected


def test_sessions_are_not_services_and_kernel_thread_names_are_bracketed():
    assert find_service_name({"systemd.unit.name": "session-3.scope"}, ("unit",)) == ""
    thread = {"otel_kprofiler.kernel_thread": "kworker", "process.executable.name": "kworker/0:1"}
    assert find_service_name(thread, SERVICE_SOURCES) == "[kworker]"


def test_a_configured_service_name_takes_precedence_over_all_service_sources(proc):
    proc(5, 300, cgroup="0::/system.slice/web.service\n")
    sample = raw(5, 300 * TICK_NS)
    result = resources(proc, service_sources=("unit",))
    assert result.get(sample).attributes["service.name"] == "web"
    result.rebase({"service.name": "all"}, ("unit",))
    assert result.get(sample).attributes["service.name"] == "all"
    result.rebase({}, ("executable",))
    assert result.get(sample).attributes["service.name"] == "server"


def test_clock_synchronization_does_not_change_the_process_creation_time(proc):
    class Source:
        offset = 10**18

        def boot_ns(self):
            return 10**12

        def unix_ns(self):
            return 10**12 + self.offset

    source = Source()
    clock = Clock(source)
    result = ProcessResources(Access(proc.root), clock, {}, capacity=1)
    before = result.get(raw(5, 10**10)).attributes["process.creation.time"]
    source.offset += 10**9
    clock.sync()
    result.get(raw(6, 1))  # evicts process 5
    assert result.get(raw(5, 10**10)).attributes["process.creation.time"] == before


def test_the_number_of_resources_is_bounded(proc):
    new = []
    result = resources(proc, capacity=2, on_new=lambda key, _: new.append(key.tgid))
    for tgid in (1, 2, 3, 1):
        result.get(raw(tgid, 5))
    assert new == [1, 2, 3, 1]


def test_preset_attributes_are_used_without_reading_the_process(proc):
    proc(5, 300)
    known = {ProcessKey(5, 300 * TICK_NS): {"process.pid": 5, "host.name": "elsewhere"}}
    result = resources(proc, attributes_of=known)
    assert result.get(raw(5, 300 * TICK_NS)).attributes == known[ProcessKey(5, 300 * TICK_NS)]


def test_the_resource_of_the_current_process_matches_proc():
    with open("/proc/self/stat", "rb") as file:
        ticks = parse_stat(file.read()).start_ticks
    sample = raw(os.getpid(), ticks * TICK_NS + 1)
    attributes = ProcessResources(Access(), Clock(), {}).get(sample).attributes
    assert attributes["process.executable.path"] == os.readlink("/proc/self/exe")


@pytest.mark.parametrize("stat", [b"", b"1 (x", b"1 (x) S 1", b"1 (x) " + b"S " * 30])
def test_a_malformed_stat_line_is_rejected(stat):
    with pytest.raises(ValueError):
        parse_stat(stat)


def test_host_attributes_identify_the_host_and_the_kernel(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("abc\n")
    attributes = read_host_attributes(Access(str(tmp_path)))
    assert attributes["host.id"] == "abc"
    assert attributes["os.version"] == os.uname().release


def test_new_common_attributes_apply_to_every_process(proc):
    result = resources(proc)
    assert "a" not in result.get(raw(42, 10**9)).attributes
    result.rebase({"a": "new"})
    assert result.get(raw(42, 10**9)).attributes["a"] == "new"
