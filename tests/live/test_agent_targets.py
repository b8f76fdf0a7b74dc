"""The agent identifies containers, pods and systemd units, and samples only its targets."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from otel_kprofiler.host import Access, find_cgroup_root
from otel_kprofiler.otlp import read_profiles
from tests.agents import Agent
from tests.further import further_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300), pytest.mark.usefixtures("sampling_host")]

CONFIG = """
receivers:
  kprofiler: {{samples_per_second: 499, stacks: both, reporter_interval: 1s, {targets}}}
exporters: {{file: {{path: {path}}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file]}}}}}}
"""
WAIT_S = 120
VERSION_1 = "/sys/fs/cgroup/cpu"
LOOP = "while :; do :; done"
UID = "ccf19bc6-503b-4dd0-b33d-e5717fe6613c"
POD = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
UNIT = f"kprofiler-test-{os.getpid()}.service"


def container_id(number):
    return f"c{number:07x}{os.getpid():056x}"


FORMS = {
    "docker": "docker/{}",
    "dockerscope": "system.slice/docker-{}.scope",
    "containerd": POD + "/cri-containerd-{}.scope",
    "podfs": f"kubepods/besteffort/pod{UID}/{{}}",
    "crio": POD + "/crio-{}.scope/container",
    "podman": "machine.slice/libpod-{}.scope/container",
    "podmanfs": "libpod_parent/libpod-{}",
    "ecs": "ecs/73bd0b8c4a9e4f7e8a0b1c2d3e4f5a6b/{}",
    "nested": f"docker/{container_id(99)}/docker/{{}}",
}
"""Cgroup path formats used by container runtimes, by the name of the process in the cgroup."""


@pytest.fixture
def place(tmp_path):
    """Returns a function that starts a copy of the shell under another name in a new cgroup."""
    root = find_cgroup_root(Access())
    if root is None or os.geteuid() != 0:
        pytest.skip("needs root and a cgroup v2 hierarchy")
    started, made = [], []

    def make(path):
        directory = Path(VERSION_1 if path.startswith("v1/") else root.path)
        path = path.removeprefix("v1/")
        for part in path.split("/"):
            directory /= part
            try:
                directory.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                pytest.skip(f"cannot create a cgroup: {error}")
            made.append(directory)
        return directory

    def start(name, path="", *prefix, script=LOOP):
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        if not program.exists():
            shutil.copy(shutil.which("sh"), program)
        command = [*prefix, program, "-c", script]
        if path:
            enter = f'echo $$ > {make(path)}/cgroup.procs && exec "$@"'
            command = ["sh", "-c", enter, "sh", *command]
        started.append(subprocess.Popen(["nice", *command], start_new_session=True))
        return started[-1]

    start.make = make
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()

    def is_removed(directory):
        with contextlib.suppress(OSError):  # the cgroup's processes may still be exiting
            directory.rmdir()
        return not directory.exists()

    for directory in reversed(made):
        wait_until(lambda place=directory: is_removed(place))


@pytest.fixture
def agent(tmp_path, place):
    """Returns a function that starts an agent and returns a reader of process attributes.

    The agent exits before the cgroups are removed.
    """
    running = []

    def start(targets="", prefix=()):
        path = tmp_path / f"profiles-{len(running)}.otlp.jsonl"
        running.append(Agent(tmp_path, CONFIG.format(path=path, targets=targets), prefix=prefix))

        def read():
            windows = read_profiles(str(path)) if path.exists() and path.stat().st_size else []
            return [
                group.resource.attributes
                for window in windows
                for profile in window.profiles
                for group in profile.resources
                if group.samples
            ]

        read.agent, read.path = running[-1], path
        return read

    yield start
    for each in running:
        if each.process.returncode is None:
            each.stop()


def wait_for(read, is_there):
    result = []

    def is_met():
        result[:] = read()
        return is_there(result)

    def say():
        return sorted({str(each.get("process.executable.name")) for each in result})

    read.agent.wait_until(is_met, WAIT_S, say)
    return result


def by_name(found):
    return {
        one["process.executable.name"]: one for one in found if "process.executable.name" in one
    }


@pytest.mark.long
def test_samples_have_the_correct_container_under_every_runtime(agent, place):
    expected = {}
    for number, (name, form) in enumerate(FORMS.items()):
        expected[name] = container_id(number)
        place(name, form.format(expected[name]))
    # ``private`` runs in a separate cgroup namespace, as in a container.
    expected["private"] = container_id(50)
    place("private", f"docker/{expected['private']}", "unshare", "--cgroup")
    place("monitor", f"machine.slice/libpod-conmon-{container_id(51)}.scope")
    place("service", f"system.slice/{UNIT}")
    place("outside")
    names = {*expected, "monitor", "service", "outside"}
    result = by_name(wait_for(agent(), lambda result: names <= by_name(result).keys()))
    assert {name: result[name].get("container.id") for name in names} == {
        **dict.fromkeys(names),
        **expected,
    }
    in_pod = {name for name in names if result[name].get("k8s.pod.uid") == UID}
    assert in_pod == {"containerd", "podfs", "crio"}
    assert result["service"]["systemd.unit.name"] == UNIT
    assert result["service"]["process.owner"] == "root"
    assert result["service"]["process.parent_pid"] == os.getpid()
    assert "systemd.unit.name" not in result["dockerscope"]


@pytest.mark.long
def test_processes_that_exit_immediately_are_attributed_to_their_container(agent, place):
    """The sample's cgroup id identifies the container, since /proc no longer lists the process."""
    brief = "while :; do ( i=0; while [ $i -lt 500 ]; do i=$((i+1)); done ); done"
    place("spawns", f"docker/{container_id(1)}", script=brief)

    def exited(found):
        return [one for one in found if "process.parent_pid" not in one and one.get("process.pid")]

    result = wait_for(
        agent(f"target_containers: [{container_id(1)}]"),
        lambda result: any("container.id" in one for one in exited(result)),
    )
    assert {one.get("container.id", container_id(1)) for one in result} == {container_id(1)}


TARGETS = {
    "container": (f"containers: [{container_id(1)[:12]}]", f"docker/{container_id(1)}"),
    "pod": (f"pods: [{UID}]", f"{POD}/cri-containerd-{container_id(1)}.scope"),
    "unit": (f"units: [{UNIT.removesuffix('.service')}]", f"system.slice/{UNIT}"),
}


@pytest.mark.parametrize("kind", further_of(TARGETS, ("pod",)))
def test_targets_selected_by_name_are_sampled_if_they_start_after_the_agent(kind, agent, place):
    targets, path = TARGETS[kind]
    other = path.replace(container_id(1), container_id(2)).replace(UID.replace("-", "_"), "0" * 32)
    place("beside", other.replace("kprofiler-test", "another-test"))
    place("outside")
    read = agent(f"target_{targets}")
    time.sleep(2)  # other processes are running, but no target
    assert read() == []
    place("inside", path)
    place("private", path, "unshare", "--cgroup")
    place("below", f"{path}/below")
    result = wait_for(read, lambda result: {"inside", "private", "below"} <= by_name(result).keys())
    # The cgroup also contains unshare and the shell that enters the cgroup.
    assert by_name(result).keys() <= {"inside", "private", "below", "dash", "sh", "bash", "unshare"}


@pytest.mark.long
@pytest.mark.skipif(not Path(VERSION_1, "cgroup.procs").exists(), reason="needs version 1")
def test_cgroup_v1_containers_are_sampled_by_process(agent, place):
    """Descendants are sampled at once, and processes joining the cgroup are sampled within 1 s."""
    for number, name in ((1, "early"), (2, "beside")):
        place(name, f"v1/docker/{container_id(number)}")
    place("outside")
    read = agent(f"target_containers: [{container_id(1)}]")
    wait_for(read, lambda result: "early" in by_name(result))
    place("late", f"v1/docker/{container_id(1)}")
    result = by_name(wait_for(read, lambda result: "late" in by_name(result)))
    assert {result[name]["container.id"] for name in ("early", "late")} == {container_id(1)}
    assert not {"beside", "outside"} & result.keys()


@pytest.mark.long
def test_a_name_filter_can_be_changed_by_a_reload(agent, place):
    for name in ("one", "another", "third"):
        place(name)
    read = agent("target_comms: [one, another]")
    result = wait_for(read, lambda result: {"one", "another"} <= by_name(result).keys())
    assert by_name(result).keys() == {"one", "another"}
    place("inside", f"docker/{container_id(1)}")
    targets = f"target_containers: [{container_id(1)}]"
    read.agent.configure(CONFIG.format(path=read.path, targets=targets))
    read.agent.reload()
    wait_for(read, lambda result: "inside" in by_name(result))
    assert "third" not in by_name(read())


@pytest.mark.long
def test_an_agent_in_a_cgroup_namespace_identifies_containers(agent, place):
    """In a container, the agent may see its own cgroup as the root cgroup."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    own = place.make(f"docker/{container_id(3)}")
    place("inside", f"docker/{container_id(1)}")
    place("sibling", f"docker/{container_id(3)}")
    place("beside", f"{POD}/cri-containerd-{container_id(2)}.scope")
    enter = ["sh", "-c", f'echo $$ > {own}/cgroup.procs && exec unshare --cgroup "$@"', "sh"]
    read = agent(prefix=enter)
    names = {"inside", "sibling", "beside"}
    result = by_name(wait_for(read, lambda result: names <= by_name(result).keys()))
    assert {name: result[name].get("container.id") for name in names} == {
        "inside": container_id(1),
        "sibling": container_id(3),
        "beside": container_id(2),
    }
    assert result["beside"]["k8s.pod.uid"] == UID
    read.agent.stop()
    read = agent(f"target_containers: [{container_id(1)}]", prefix=enter)
    result = wait_for(read, lambda result: "inside" in by_name(result))
    assert by_name(result).keys() == {"inside"}
