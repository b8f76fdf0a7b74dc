"""Child processes are granted memory according to the cgroup v1 and v2 limits."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.host.child_memory import (
    MemoryGrant,
    MemoryLeft,
    find_memory_left,
    grant_memory,
    limit_memory,
)

pytestmark = pytest.mark.system

MIB = 1 << 20
MOUNTS = {
    "v1": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "v2": "31 23 0:28 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
LINES = {"v1": "4:memory:{path}\n1:cpu:/\n", "v2": "0::{path}\n"}
MOUNT = {"v1": "sys/fs/cgroup/memory", "v2": "sys/fs/cgroup"}
NAMES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}


@pytest.fixture(params=["v1", "v2"])
def version(request):
    return request.param


@pytest.fixture
def tree(tmp_path, version):
    """Returns a function that creates a cgroup tree containing this process."""

    def write(path, limits, root="/", **others):
        proc = tmp_path / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(LINES[version].format(path=path))
        (proc / "mountinfo").write_text(MOUNTS[version].format(root=root))
        limit, usage, cache = NAMES[version]
        for below, (most, used, cached) in limits.items():
            directory = tmp_path / MOUNT[version] / below
            directory.mkdir(parents=True, exist_ok=True)
            (directory / limit).write_text(f"{most}\n")
            (directory / usage).write_text(f"{used}\n")
            (directory / "memory.stat").write_text(f"cache 12345\n{cache} {cached}\n")
        for name, content in others.items():
            (tmp_path / MOUNT[version] / name.replace("__", "/").replace("_", ".")).write_text(
                content
            )
        return Access(str(tmp_path))

    return write


def test_usage_in_the_current_cgroup_excludes_the_page_cache(tree, version):
    files = tree("/unit", {"unit": (256 * MIB, 100 * MIB, 30 * MIB)})
    path = f"/{MOUNT[version]}/unit/{NAMES[version][0]}"
    assert find_memory_left(files) == MemoryLeft(186 * MIB, path, 256 * MIB)


def test_the_cgroup_with_the_least_memory_left_sets_the_limit(tree, version):
    limits = {
        "a/b": (256 * MIB, 50 * MIB, 0),
        "a": (400 * MIB, 390 * MIB, 0),
        "": (1 << 40, MIB, 0),
    }
    left = find_memory_left(tree("/a/b", limits))
    assert left == MemoryLeft(10 * MIB, f"/{MOUNT[version]}/a/{NAMES[version][0]}", 400 * MIB)


def test_a_containers_cgroup_mount_is_rooted_at_the_containers_cgroup(tree):
    limits = {"": (256 * MIB, 6 * MIB, 0)}
    assert find_memory_left(tree("/", limits)).count_bytes == 250 * MIB
    assert find_memory_left(tree("/docker/abc", limits, "/docker/abc")).count_bytes == 250 * MIB
    assert find_memory_left(tree("/docker/other", limits, "/docker/abc")) is None


@pytest.mark.parametrize("most", ["max", str((1 << 63) - 4096)])
def test_children_are_not_limited_by_default(tree, most):
    files = tree("/unit", {"unit": (most, MIB, 0)})
    assert find_memory_left(files) is None
    assert grant_memory(300 * MIB, files) == MemoryGrant(300 * MIB, None)


def test_memory_high_also_counts_as_a_memory_limit(tree, version):
    if version == "v1":
        pytest.skip("cgroup v1 has no limit that throttles")
    files = tree("/u", {"u": (256 * MIB, 0, 0)}, u__memory_high=f"{128 * MIB}\n")
    assert find_memory_left(files) == MemoryLeft(
        128 * MIB, "/sys/fs/cgroup/u/memory.high", 128 * MIB
    )


def test_a_child_is_granted_half_of_the_memory_that_is_not_granted_to_other_children(tree):
    files = tree("/u", {"u": (256 * MIB, 56 * MIB, 0)})
    child = subprocess.Popen(["sleep", "60"])
    try:
        first = grant_memory(150 * MIB, files)
        assert first.count_bytes == 100 * MIB
        with limit_memory(child.pid, first):
            assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
            # sleep(1) uses less than a MiB of its limit
            assert 50 * MIB <= grant_memory(150 * MIB, files).count_bytes < 51 * MIB
        assert grant_memory(150 * MIB, files) == first
        assert grant_memory(99 * MIB, files) == MemoryGrant(99 * MIB, None)
    finally:
        child.kill()
        child.wait()
    text = first.describe("raise this")
    assert text.startswith("the 100 MiB limit, half of what /sys/fs/cgroup/")
    assert "(256 MiB) leaves; raise it: the unit's MemoryHigh and MemoryMax" in text
    assert MemoryGrant(9 * MIB, None).describe("raise this") == "the 9 MiB limit; raise this"


TAKE = "import sys; sys.stdin.read(1); bytearray(200 << 20); print('taken')"


def test_a_child_cannot_allocate_more_memory_than_granted():
    for most, output in ((100 * MIB, b""), (300 * MIB, b"taken\n")):
        child = subprocess.Popen(
            [sys.executable, "-c", TAKE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with limit_memory(child.pid, MemoryGrant(most, None)):
            assert child.communicate(b"1")[0] == output


def test_limiting_an_exited_child_is_not_an_error():
    child = subprocess.Popen(["true"])
    child.wait()
    with limit_memory(child.pid, MemoryGrant(MIB, None)):
        assert grant_memory(MIB, Access(tempfile.gettempdir())) == MemoryGrant(MIB, None)
