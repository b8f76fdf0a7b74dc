"""The container, pod and unit of a process are determined, even from inside a cgroup namespace."""

import json

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.processes.places import Places

ID, OTHER = "4f79" * 16, "0b1c" * 16
UID = "ccf19bc6-503b-4dd0-b33d-e5717fe6613c"
POD = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope"
INITIAL = "cgroup:[4026531835]"
KTHREAD = "2 (kthreadd) S 0 0 0 0 -1 2129984 " + "0 " * 40


@pytest.fixture
def host(tmp_path):
    """Returns a function that writes a file below a temporary root directory."""

    def write(path, text):
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(namespace):
        (tmp_path / "proc/self/ns").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/ns/cgroup").symlink_to(namespace)

    write.link = link
    write.root = tmp_path
    write.now = 0.0
    write.places = lambda: Places(Access(str(tmp_path)), lambda: write.now)
    return write


def test_pod_names_are_available_once_the_kubelet_has_written_them(host):
    host("/proc/5/cgroup", f"0::{POD}\n")
    places = host.places()
    first = places.read(5)
    assert first == {"container.id": ID, "k8s.pod.uid": UID}
    host(f"/var/log/containers/shop-7f-x_default_cart-{ID}.log", "")
    assert not places.name(first)  # too soon after the last lookup
    host.now = 1.5
    names = {
        "k8s.container.name": "cart",
        "k8s.pod.name": "shop-7f-x",
        "k8s.namespace.name": "default",
    }
    assert places.name(first) == names
    assert places.read(5) == {**first, **names}


def test_missing_container_names_are_looked_up_at_increasing_intervals(host):
    host("/proc/5/cgroup", f"0::/docker/{ID}\n")
    places = host.places()
    attributes = places.read(5)
    for host.now in range(1, 400):
        assert not places.name(attributes)
    host(f"/var/lib/docker/containers/{ID}/config.v2.json", json.dumps({"Name": "/web"}))
    host.now += 20
    assert not places.name(attributes)
    host.now += 60
    assert places.name(attributes) == {"container.name": "web"}


def mount(uid, name):
    root = f"/var/lib/kubelet/pods/{uid}/containers/{name}/0a1b2c3d"
    return f"90 80 8:1 {root} /dev/termination-log rw - ext4 /dev/sda1 rw\n"


def test_a_kubelet_mount_identifies_a_container_only_if_the_pod_matches(host):
    for pid, uid in ((5, UID), (6, UID.replace("c", "d"))):
        host(f"/proc/{pid}/cgroup", f"0::{POD.replace(ID, f'{pid:064x}')}\n")
        host(f"/proc/{pid}/mountinfo", mount(uid, "cart"))
    places = host.places()
    assert places.read(5)["k8s.container.name"] == "cart"
    assert "k8s.container.name" not in places.read(6)


def test_system_and_user_units_are_identified(host):
    host("/proc/5/cgroup", "0::/system.slice/nginx.service\n")
    host("/proc/6/cgroup", "0::/user.slice/user-7.slice/user@7.service/app.slice/a.service\n")
    places = host.places()
    assert places.read(5) == {"systemd.unit.name": "nginx.service"}
    assert places.read(6) == {
        "systemd.unit.name": "user@7.service",
        "otel_kprofiler.systemd.user_unit.name": "a.service",
    }


def test_reading_an_exited_process_raises_os_error(host):
    with pytest.raises(OSError):
        host.places().read(5)


def cgroups(host, root, *paths):
    """Mounts a cgroup hierarchy with cgroups at the given paths, and returns the cgroup ids."""
    tree = host.root / "cgroups"
    for path in paths:
        (tree / path.lstrip("/")).mkdir(parents=True)
    host("/proc/self/mountinfo", f"31 24 0:27 {root} {tree} rw - cgroup2 none rw\n")
    return [(tree / path.lstrip("/")).stat().st_ino for path in paths]


def test_a_cgroup_id_identifies_the_container_or_unit_of_an_exited_process(host):
    host.link(INITIAL)
    container, unit = cgroups(host, "/", f"/system.slice/docker-{ID}.scope/a", "/a.slice/b.service")
    places = host.places()
    assert places.find(container) == {"container.id": ID}
    assert places.find(unit) == {"systemd.unit.name": "b.service"}
    assert places.find(0) == {}


def test_cgroup_lookups_are_rate_limited(host):
    host.link(INITIAL)
    cgroups(host, "/")
    places = host.places()
    assert places.find(12345) == {}
    (late,) = cgroups(host, "/", f"/docker/{ID}")
    assert places.find(late) == {}
    host.now = 2.0
    assert places.find(late) == {"container.id": ID}


def test_containers_outside_the_cgroup_namespace_are_found_by_relative_path(host):
    host.link("cgroup:[4026532999]")
    host("/proc/5/cgroup", f"0::/../cri-containerd-{ID}.scope\n")
    host("/proc/6/cgroup", "0::/../nginx.service\n")
    host("/proc/self/mountinfo", "")
    places = host.places()
    assert places.read(5) == {"container.id": ID}
    assert places.read(6) == {}  # ambiguous: a unit on the host or in a container


def test_mounts_identify_the_container_in_a_private_cgroup_namespace(host):
    host.link("cgroup:[4026532999]")
    host("/proc/5/cgroup", "0::/\n")
    host("/proc/6/cgroup", "0::/../..\n")
    root = f"/var/lib/docker/containers/{ID}/hostname"
    host("/proc/self/mountinfo", f"9 8 8:1 {root} /etc/hostname rw - ext4 /dev/sda1 rw\n")
    places = host.places()
    assert places.read(5) == {"container.id": ID}
    assert places.read(6) == {}


def test_mounts_identify_the_pod_in_its_namespace(host):
    host.link("cgroup:[4026532999]")
    host("/proc/5/cgroup", "0::/\n")
    host("/proc/self/mountinfo", mount(UID, "cart"))
    assert host.places().read(5) == {"k8s.pod.uid": UID, "k8s.container.name": "cart"}


def test_the_hosts_cgroups_identify_containers_and_pods_from_inside_a_namespace(host):
    host.link("cgroup:[4026532999]")
    host("/proc/2/stat", KTHREAD)
    host("/proc/2/cgroup", "0::/../../..\n")
    host("/proc/5/cgroup", "0::/\n")
    (own,) = cgroups(host, "/../../..", POD)
    assert host.places().read(5, own) == {"container.id": ID, "k8s.pod.uid": UID}


def test_units_are_not_identified_from_a_partial_cgroup_hierarchy(host):
    host.link("cgroup:[4026532999]")
    host("/proc/2/stat", KTHREAD)
    host("/proc/2/cgroup", "0::/../..\n")
    host("/proc/5/cgroup", "0::/a.service\n")
    (own,) = cgroups(host, "/", "/a.service")
    assert host.places().read(5, own) == {}
