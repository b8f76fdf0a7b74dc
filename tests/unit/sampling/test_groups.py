"""Sampling a container, pod or unit selects the correct cgroups and processes."""

import json

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.sampling import GroupFollower, Groups, SamplerConfig

ID, OTHER = "4f79" * 16, "0b1c" * 16
UID = "ccf19bc6-503b-4dd0-b33d-e5717fe6613c"
POD = f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
INITIAL = "cgroup:[4026531835]"
NOTHING = ((1, 0),)


@pytest.fixture
def host(tmp_path):
    """Returns a fake host with cgroup v2; tests call the host to write a file."""
    tree = tmp_path / "tree"
    tree.mkdir()

    def write(path, text=""):
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cgroup(path):
        directory = tree / path
        directory.mkdir(parents=True, exist_ok=True)
        return path.count("/") + 1, directory.stat().st_ino

    def mounts(*more):
        lines = [f"31 24 0:27 / {tree} rw - cgroup2 none rw", *more, ""]
        write("/proc/self/mountinfo", "\n".join(lines))

    def follow(loader="libbpf", **groups):
        return GroupFollower(
            Access(str(tmp_path)), Groups(**groups), loader=loader, monotonic=lambda: write.now
        )

    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/cgroup").symlink_to(INITIAL)
    write.cgroup, write.mounts, write.follow, write.tree = cgroup, mounts, follow, tree
    write.now = 0.0
    write("/proc/sys/kernel/osrelease", "6.1.0\n")
    mounts()
    return write


V1 = "40 24 0:30 / /sys/fs/cgroup/cpu rw - cgroup none rw,cpu"


def cgroups(follower):
    config = follower.apply(SamplerConfig())
    assert config.target_pids == ()
    return config.target_cgroups


def pids(follower, **more):
    config = follower.apply(SamplerConfig(**more))
    assert config.target_cgroups == ()
    return config.target_pids


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"containers": (ID[:12],)}, [f"docker/{ID}"]),
        ({"containers": ("web",)}, [f"docker/{ID}"]),
        ({"containers": (ID[:3],)}, []),
        ({"containers": ("shop-1/cart",)}, [f"{POD}/crio-{OTHER}.scope"]),
        ({"containers": ("cart", "web")}, [f"docker/{ID}", f"{POD}/crio-{OTHER}.scope"]),
        ({"pods": (UID,)}, [POD]),
        ({"pods": ("shop-1",)}, [POD]),
        ({"pods": ("default/shop-1",)}, [POD]),
        ({"pods": ("kube-system/shop-1",)}, []),
        ({"units": ("nginx",)}, ["system.slice/nginx.service"]),
        ({"units": ("nginx.service", "session-3.scope")}, ["system.slice/nginx.service"]),
        ({"units": ("ssh",), "pods": (UID,)}, [POD]),
    ],
)
def test_the_targets_topmost_cgroups_are_selected(host, groups, expected):
    made = {
        path: host.cgroup(path)
        for path in (
            f"docker/{ID}", f"docker/{ID}/nginx.service", f"docker/{'d' * 64}",
            POD, f"{POD}/crio-{OTHER}.scope", f"{POD}/crio-{OTHER}.scope/container",
            "system.slice/nginx.service", "user.slice/nginx.slice",
        )
    }  # fmt: skip
    host(f"/var/lib/docker/containers/{ID}/config.v2.json", json.dumps({"Name": "/web"}))
    host(f"/var/log/containers/shop-1_default_cart-{OTHER}.log")
    (host.tree.parent / f"var/log/pods/default_shop-1_{UID}").mkdir(parents=True)
    follower = host.follow(**groups)
    follower.look()
    assert set(cgroups(follower)) == ({made[path] for path in expected} or set(NOTHING))


def test_new_and_exited_targets_are_detected_once_a_second(host):
    follower = host.follow(units=("a",))
    follower.look()
    assert cgroups(follower) == NOTHING
    unit = host.cgroup("a.service")
    assert not follower.look()
    host.now = 1.5
    assert follower.look()
    assert cgroups(follower) == (unit,)
    host.now = 3.0
    assert not follower.look()
    (host.tree / "a.service").rmdir()
    host.now = 4.5
    assert follower.look()
    assert cgroups(follower) == NOTHING


def test_a_container_name_published_after_the_start_is_matched(host):
    follower = host.follow(containers=("web",))
    made = host.cgroup(f"docker/{ID}")
    follower.look()
    assert cgroups(follower) == NOTHING
    host(f"/var/lib/docker/containers/{ID}/config.v2.json", json.dumps({"Name": "/web"}))
    host.now = 1.5
    assert follower.look()
    assert cgroups(follower) == (made,)


def test_cgroup_v1_containers_are_tracked_per_process(host):
    host.mounts(V1)
    host("/proc/5/cgroup", f"2:cpu:/docker/{ID}\n0::/\n")
    host("/proc/6/cgroup", f"2:cpu:/docker/{OTHER}\n0::/\n")
    host("/sys/kernel/btf/vmlinux")
    follower = host.follow(containers=(ID,))
    follower.look()
    assert pids(follower) == (5,)
    assert follower.apply(SamplerConfig()).target_descendants
    host("/proc/7/cgroup", f"2:cpu:/docker/{ID}\n0::/\n")
    host.now = 1.5
    assert follower.look()
    assert pids(follower) == (5, 7)
    assert pids(follower, target_pids=(6, 7)) == (7,)
    assert pids(follower, target_pids=(6,)) == (1 << 22 | 1,)  # no process has this id


def test_targets_on_a_hybrid_host_are_filtered_by_cgroup_if_all_are_in_cgroup_v2(host):
    host.mounts(V1)
    made = host.cgroup(f"docker/{ID}")
    host("/proc/5/cgroup", f"2:cpu:/docker/{ID}\n0::/docker/{ID}/below\n")
    follower = host.follow(containers=(ID,))
    follower.look()
    assert cgroups(follower) == (made,)
    host("/proc/6/cgroup", f"2:cpu:/docker/{ID}\n0::/\n")
    host.now = 1.5
    assert follower.look()
    assert pids(follower) == (5, 6)


def test_processes_are_tracked_by_pid_if_the_cgroup_filter_cannot_be_used(host):
    """bcc lacks the filter, and the BPF program checks only the topmost 15 cgroup levels."""
    host("/proc/5/cgroup", "0::/a.service\n")
    host.cgroup("a.service")
    follower = host.follow(loader="bcc", units=("a",))
    follower.look()
    assert pids(follower) == (5,)
    deep = "/".join("abcdefghijklmnop") + f"/docker-{ID}.scope"
    host.cgroup(deep)
    host("/proc/6/cgroup", f"0::/{deep}\n")
    follower = host.follow(containers=(ID,))
    follower.look()
    assert pids(follower) == (6,)


def test_nothing_is_sampled_if_no_process_matches(host):
    follower = host.follow(loader="bcc", units=("a",))
    follower.look()
    assert pids(follower) == (1 << 22 | 1,)
