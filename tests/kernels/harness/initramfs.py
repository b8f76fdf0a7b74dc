"""The initramfs for a guest: busybox, the drivers for the host's root file system, and a script."""

from __future__ import annotations

import lzma
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.cpio import Archive
from harness.errors import MatrixError
from harness.kernels import KernelFiles
from harness.places import CHECKOUT

# The virtio transport, the 9p file system for the host's root, and overlay to make it writable.
DRIVERS = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
ROOT_TAG, RUN_TAG = "hostroot", "run"
RUN_DIR = "/run/kernel-matrix"

# Nothing is written to the shares, since changes go to an overlay in memory. In the overlay, other
# users may enter the directories above the tests' files, so that tests can run as nobody.
_INIT = f"""#!/bin/busybox sh
export PATH=/bin
b=/bin/busybox
$b mount -t proc proc /proc
for ko in /drivers/*; do $b insmod $ko || echo "cannot load $ko"; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro {ROOT_TAG} /lower
$b mount -t tmpfs tmpfs /upper
$b mkdir /upper/new /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/new,workdir=/upper/work root /root
$b umount /proc
$b mount -t proc proc /root/proc
$b mount -t sysfs sysfs /root/sys
$b mount -t devtmpfs dev /root/dev
$b mkdir -p /root/dev/shm /root/dev/pts
$b mount -t tmpfs tmpfs /root/dev/shm
$b mount -t devpts devpts /root/dev/pts
$b mount -t tmpfs -o mode=755 tmpfs /root/run
$b mount -t tracefs tracefs /root/sys/kernel/tracing
$b mount -t debugfs debugfs /root/sys/kernel/debug
$b mount -t bpf bpf /root/sys/fs/bpf
$b mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
$b mkdir -p /root{RUN_DIR}
{{shares}}
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none {RUN_TAG} \
    /root{RUN_DIR}
exec $b switch_root /root /bin/sh {RUN_DIR}/job.sh
"""

_SHARE = """
$b mkdir -p /{tag} /upper/{tag} /upper/{tag}.work /root{path}
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro {tag} /{tag}
$b mount -t overlay -o lowerdir=/{tag},upperdir=/upper/{tag},workdir=/upper/{tag}.work {tag} \
    /root{path}
"""


def parse_dependencies(modules_dep: str) -> dict[str, list[str]]:
    """Parses ``modules.dep``: the dependencies of each file, in file order."""
    rows = (line.partition(":") for line in modules_dep.splitlines())
    return {path: needed.split() for path, _, needed in rows}


def module_name(path: str) -> str:
    """Returns a module's name from its path, without suffixes and with ``_`` instead of ``-``."""
    return re.sub(r"\.ko(\.\w+)?$", "", path.rpartition("/")[2]).replace("-", "_")


def load_order(dependencies: dict[str, list[str]], wanted: Sequence[str]) -> list[str]:
    """Returns the files for modules and dependencies in load order, without built-in modules."""
    by_name = {module_name(path): path for path in dependencies}
    order: list[str] = []
    for name in wanted:
        path = by_name.get(name)
        if path:
            # depmod lists all transitive dependencies; dependents precede their dependencies
            order += [p for p in (*reversed(dependencies[path]), path) if p not in order]
    return order


def shared_paths(kernel: KernelFiles) -> dict[str, Path]:
    """Returns the host directories shared with a guest that has a separate root, by 9p tag."""
    if kernel.root is None:
        return {}
    return {"checkout": CHECKOUT, "kernel": kernel.work}


def build_initramfs(kernel: KernelFiles) -> bytes:
    """Returns the archive, uncompressed for the fastest boot. Raises MatrixError on failure."""
    busybox = f"{kernel.root}/bin/busybox" if kernel.root else shutil.which("busybox")
    if busybox is None:
        raise MatrixError("no busybox", "run: apt-get install busybox-static")
    archive = Archive()
    for name in ("bin", "dev", "drivers", "lower", "proc", "root", "upper"):
        archive.directory(name)
    archive.character_device("dev/console", 5, 1)
    archive.file("bin/busybox", Path(busybox).read_bytes(), 0o755)
    tree = kernel.modules / kernel.release
    dependencies = parse_dependencies((tree / "modules.dep").read_text())
    for number, path in enumerate(load_order(dependencies, DRIVERS)):
        data = (tree / path).read_bytes()
        if path.endswith(".xz"):
            data = lzma.decompress(data)
        archive.file(f"drivers/{number:02}-{module_name(path)}.ko", data)
    shares = "".join(
        _SHARE.format(tag=tag, path=shlex.quote(str(path)))
        for tag, path in shared_paths(kernel).items()
    )
    archive.file("init", _INIT.format(shares=shares).encode(), 0o755)
    return archive.finish()
