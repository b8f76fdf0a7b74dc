"""Containers are listed with the names that their runtimes assign, and with their cgroups."""

import json

import pytest

from otel_kprofiler.host import (
    Access,
    Container,
    ProcessStat,
    find_containers,
    find_descendants,
    parse_mount_points,
    parse_stat,
)

DOCKER, PODMAN, POD = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def host(tmp_path):
    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/1/cgroup", "0::/init.scope\n")
    write("proc/10/cgroup", f"0::/system.slice/docker-{DOCKER}.scope\n")
    write("proc/11/cgroup", f"0::/system.slice/docker-{DOCKER}.scope/init.scope\n")
    write("proc/20/cgroup", f"12:pids:/libpod_parent/libpod-{PODMAN}\n0::/\n")
    write("proc/30/cgroup", f"0::/kubepods.slice/pod1.slice/cri-containerd-{POD}.scope\n")
    write(f"var/lib/docker/containers/{DOCKER}/config.v2.json", json.dumps({"Name": "/web"}))
    write(
        "var/lib/containers/storage/overlay-containers/containers.json",
        json.dumps([{"id": PODMAN, "names": ["db"]}, {"id": "d"}]),
    )
    write(f"var/log/containers/shop-7f-x_default_cart-{POD}.log", "")
    return Access(str(tmp_path))


def test_containers_are_listed_with_their_names_and_cgroups(host):
    docker, podman, pod = find_containers(host)
    assert docker[:3] == (DOCKER, ("web",), f"/system.slice/docker-{DOCKER}.scope")
    assert sorted(docker.pids) == [10, 11]
    # Malformed rows for another container do not hide the name.
    assert podman == (PODMAN, ("db",), "", (20,))
    assert pod.names == ("cart", "shop-7f-x", "shop-7f-x/cart")


def test_a_container_outside_the_cgroup_namespace_is_reported_without_a_cgroup_path(tmp_path):
    (tmp_path / "proc/40").mkdir(parents=True)
    (tmp_path / "proc/40/cgroup").write_text(f"0::/../docker-{DOCKER}.scope\n")
    assert find_containers(Access(str(tmp_path))) == [Container(DOCKER, (), "", (40,))]


def test_a_container_is_selected_by_name_or_id_prefix(host):
    docker, _, pod = find_containers(host)
    assert docker.is_called("web")
    assert docker.is_called("aaaa")
    assert not docker.is_called("aaa")
    assert not docker.is_called("we")
    assert pod.is_called("shop-7f-x/cart")


def test_mount_points_of_a_file_system_type_are_listed():
    mounts = (
        b"30 24 0:26 / /proc rw - proc proc rw\n"
        b"31 24 0:27 / /c/cpu rw shared:9 - cgroup cgroup rw,cpu\n"
        b"32 24 0:28 /../.. /c/a\\040b rw,nosuid shared:10 master:1 - cgroup2 x rw\n"
        b"cut\n"
    )
    assert parse_mount_points(mounts, "cgroup2") == [("/c/a b", "/../..")]
    assert parse_mount_points(mounts, "tmpfs") == []


def test_a_stat_line_with_parentheses_in_the_name_is_parsed():
    line = b"7 (a) (b) Z 3 " + b" ".join(b"%d" % number for number in range(5, 60))
    expected = ProcessStat(
        3,
        has_ended=True,
        start_ticks=22,
        name=b"a) (b",
        stack_start=28,
        cpu_ticks=14 + 15,
        mapped_bytes=23,
    )
    assert parse_stat(line) == expected
    with pytest.raises(ValueError, match="too few"):
        parse_stat(b"7 (a) S 3")


def test_descendants_include_grandchildren():
    processes = {
        pid: ProcessStat(parent, False, 0)
        for pid, parent in {1: 0, 2: 1, 3: 2, 4: 2, 5: 4, 6: 1, 7: 7}.items()
    }
    assert find_descendants(processes, [2]) == {3, 4, 5}
    assert find_descendants(processes, [4, 2]) == {3, 5}
    assert find_descendants(processes, [7]) == set()
