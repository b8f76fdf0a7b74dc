"""Cgroup paths are recognized in every form that runtimes and systemd create."""

import pytest

from otel_kprofiler.host import CgroupNames, parse_cgroup, parse_cgroup_path
from otel_kprofiler.host.cgroup_names import parse_unified_path

ID, OTHER = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970", "0b1c" * 16
UID = "ccf19bc6-503b-4dd0-b33d-e5717fe6613c"
SLICED = UID.replace("-", "_")
HASH = "05b3ee07a2bd47e795997961201f20dd"
TASK = "73bd0b8c4a9e4f7e8a0b1c2d3e4f5a6b"
KUBEPODS = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable"
USER, OF_USER = "/user.slice/user-1000.slice/user@1000.service", {"unit": "user@1000.service"}

CONTAINERS = {
    # Docker: cgroupfs, cgroupfs with a configured parent, systemd, rootless
    f"/docker/{ID}": {},
    f"/build/jobs/{ID}": {},
    f"/{ID}": {},
    f"/system.slice/docker-{ID}.scope": {},
    f"/system.slice/docker-{ID}.scope/init.scope": {},
    f"{USER}/user.slice/docker-{ID}.scope": OF_USER,
    # containerd: nerdctl, and the CRI plugin with each cgroup driver and with a mix of both
    f"/kubepods/burstable/pod{UID}/{ID}": {"pod": UID},
    f"/kubepods/pod{UID}/{ID}": {"pod": UID},
    f"/kubelet/kubepods/besteffort/pod{UID}/{ID}": {"pod": UID},
    f"{KUBEPODS}-pod{SLICED}.slice/cri-containerd-{ID}.scope": {"pod": UID},
    f"/kubepods.slice/kubepods-pod{SLICED}.slice/cri-containerd-{ID}.scope": {"pod": UID},
    f"/system.slice/containerd.service/kubepods-burstable-pod{SLICED}.slice:cri-containerd:{ID}": {
        "pod": UID,
        "unit": "containerd.service",
    },
    f"{KUBEPODS}-pod{SLICED}.slice:cri-containerd:{ID}": {"pod": UID},
    f"/default/{ID}": {},
    f"/system.slice/nerdctl-{ID}.scope": {},
    # CRI-O: systemd with runc and with crun, cgroupfs
    f"{KUBEPODS}-pod{SLICED}.slice/crio-{ID}.scope": {"pod": UID},
    f"{KUBEPODS}-pod{SLICED}.slice/crio-{ID}.scope/container": {"pod": UID},
    f"/kubepods/besteffort/pod{UID}/crio-{ID}": {"pod": UID},
    # static pods
    f"{KUBEPODS}-pod{HASH}.slice/cri-containerd-{ID}.scope": {"pod": HASH},
    f"/kubepods/burstable/pod{HASH}/{ID}": {"pod": HASH},
    # podman: systemd with and without a pod, rootless, cgroupfs, below a unit
    f"/machine.slice/libpod-{ID}.scope/container": {},
    f"/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{ID}.scope": {},
    f"{USER}/user.slice/libpod-{ID}.scope/container": OF_USER,
    f"/libpod_parent/libpod-{ID}": {},
    f"/libpod_parent/{OTHER}/libpod-{ID}": {},
    f"/system.slice/web.service/libpod-payload-{ID}": {"unit": "web.service"},
    f"{USER}/app.slice/web.service/libpod-payload-{ID}": OF_USER | {"user_unit": "web.service"},
    # Amazon ECS
    f"/ecs/{TASK}/{ID}": {},
    f"/ecs/production/{TASK}/{ID}": {},
    f"/ecstasks.slice/ecstasks-{TASK}.slice/docker-{ID}.scope": {},
    # nested: Docker in Docker, a kind node, systemd in a container
    f"/docker/{OTHER}/docker/{ID}": {},
    f"/docker/{OTHER}/kubelet/kubepods/burstable/pod{UID}/{ID}": {"pod": UID},
    f"/system.slice/docker-{OTHER}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod"
    f"{SLICED}.slice/cri-containerd-{ID}.scope": {"pod": UID},
    f"/docker/{ID}/system.slice/nginx.service": {},
    # as read from another cgroup namespace
    f"/../cri-containerd-{ID}.scope": {},
    f"/../../kubepods-burstable-pod{SLICED}.slice/cri-containerd-{ID}.scope": {"pod": UID},
    f"/../{ID}": {},
}

OTHERS = {
    "/": {},
    "/..": {},
    "/../../..": {},
    "/init.scope": {"unit": "init.scope"},
    "/system.slice": {},
    "/system.slice/nginx.service": {"unit": "nginx.service"},
    "/system.slice/system-postgresql.slice/postgresql@16-main.service": {
        "unit": "postgresql@16-main.service"
    },
    "/system.slice/systemd-udevd.service/udev": {"unit": "systemd-udevd.service"},
    r"/system.slice/dev-disk\x2dby.service": {"unit": r"dev-disk\x2dby.service"},
    "/system.slice/_cpu.service": {"unit": "cpu.service"},
    "/../nginx.service": {},
    f"{USER}/init.scope": OF_USER | {"user_unit": "init.scope"},
    f"{USER}/app.slice/app-x.slice/app-x-12.scope": OF_USER | {"user_unit": "app-x-12.scope"},
    "/user.slice/user-1000.slice/session-3.scope": {"unit": "session-3.scope"},
    "/machine.slice/machine-debian.scope": {"unit": "machine-debian.scope"},
    "/lxc.payload.web/system.slice/nginx.service": {},
    # processes outside containers: in a pod's own cgroup, and helpers such as conmon
    f"{KUBEPODS}-pod{SLICED}.slice": {"pod": UID},
    f"{KUBEPODS}-pod{SLICED}.slice/crio-conmon-{ID}.scope": {
        "pod": UID,
        "unit": f"crio-conmon-{ID}.scope",
    },
    f"/machine.slice/libpod-conmon-{ID}.scope": {"unit": f"libpod-conmon-{ID}.scope"},
    f"/system.slice/{ID}.service": {"unit": f"{ID}.service"},
    # paths that resemble container paths, and siblings of container paths
    f"/run-{ID}.scope": {"unit": f"run-{ID}.scope"},
    f"/kubepods/burstable/pod{SLICED}/x": {"pod": UID},
    **{
        path: {}
        for path in [
            *(f"/docker/{ID}abc", f"/docker/{ID[:-1]}", f"/docker/{ID.upper()}"),
            *(f"/libpod_parent/{ID}", f"/libpod_parent/{ID}/conmon"),
            *(f"/machine.slice/machine-libpod_pod_{ID}.slice", f"/system.slice/{ID}.timer"),
            *(f"/{TASK}", f"/{TASK}-1234567890", f"/ecs/{TASK}", "/kubepods/burstable/podcast"),
            *(f"/kubepods/pod{UID.replace('-', '_', 1)}", f"/my-pod{UID}"),
        ]
    },
}


@pytest.mark.parametrize("path", CONTAINERS)
def test_container_paths_are_recognized(path):
    assert parse_cgroup_path(path) == CgroupNames(container=ID)._replace(**CONTAINERS[path])


@pytest.mark.parametrize("path", OTHERS)
def test_cgroup_paths_outside_containers_yield_no_container_id(path):
    assert parse_cgroup_path(path) == CgroupNames()._replace(**OTHERS[path])


def test_fargate_container_ids_with_a_suffix_are_recognized():
    assert parse_cgroup_path(f"/ecs/{TASK}/{TASK}-1234567890").container == f"{TASK}-1234567890"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("0::/\n", {}),
        (f"0::/docker/{ID}\n", {"container": ID}),
        (f"0::/docker/{ID} (deleted)\n", {"container": ID}),
        # cgroup v1, and a hybrid hierarchy without cgroup v2 controllers
        (f"11:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n", {"container": ID}),
        (f"4:memory:/docker/{ID}\n3:cpu,cpuacct:/\n0::/\n", {"container": ID}),
        (
            f"2:cpu:/docker/{ID}\n1:name=systemd:/system.slice/web.service\n",
            {"container": ID, "unit": "web.service"},
        ),
        # several hierarchies: cgroup v2 takes precedence, followed by name=systemd
        (f"5:pids:/docker/{OTHER}\n0::/docker/{ID}\n", {"container": ID}),
        (f"5:pids:/docker/{OTHER}\n1:name=systemd:/docker/{ID}\n", {"container": ID}),
        # malformed lines
        (f"0::docker/{ID}\n0:/docker/{ID}\nx\n::\n", {}),
        (f"0:cpu:/a:b/{ID}\n", {"container": ID}),
    ],
)
def test_the_most_specific_cgroup_hierarchy_is_used(text, expected):
    assert parse_cgroup(text.encode()) == CgroupNames()._replace(**expected)


def test_the_cgroup_v2_path_is_parsed():
    assert parse_unified_path(b"3:cpu:/a\n0::/b:c (deleted)\n") == "/b:c"
    assert parse_unified_path(b"3:cpu:/a\n") == ""
