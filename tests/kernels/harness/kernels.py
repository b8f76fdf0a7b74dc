"""The kernels in the test matrix, and how to obtain their files.

Packages are downloaded and unpacked but not installed, so root is not needed and the machine's
kernel is not touched. The newest version available from apt is used.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.archive import Archive, call, open_release
from harness.errors import MatrixError
from harness.machines import AARCH64, X86_64, Machine, build_root
from harness.places import cache_dir


@dataclass(frozen=True)
class KernelFiles:
    """The files of one kernel.

    Attributes:
        version: the version of the package, such as ``6.1.192-2``.
        release: the output of ``uname -r``.
        modules: the guest's ``/lib/modules``, with ``modules.dep``.
        headers: directory for ``make -C`` when building a module; None if headers are unavailable.
        root: the guest's root directory; None for the host's root directory.
    """

    name: str
    version: str
    release: str
    image: Path
    modules: Path
    headers: Path | None
    work: Path
    machine: Machine = X86_64
    root: Path | None = None

    @property
    def title(self) -> str:
        """The kernel series, followed by the page size if that is not 4 KiB."""
        pages = re.search(r"-(\d+)k$", self.name)
        return f"Linux {self.name.partition('-')[0]}" + (f", {pages[1]} KiB pages" if pages else "")


@dataclass(frozen=True)
class DebianKernel:
    """A Debian kernel, identified by the packages that depend on its newest image and headers.

    Attributes:
        package: the suffix of the package names after ``linux-image-`` and ``linux-headers-``.
        release: the code name of its Debian release; empty for this machine's release.
        boots: the names of the boots in which it is tested; empty for all boots.
        tests: the names of the test files to run, without ``test_`` and ``.py``; empty for all
            files.
        machine: the machine type; if it is not the host's, ``release`` is required.
    """

    name: str
    package: str
    release: str = ""
    boots: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    machine: Machine = X86_64

    @property
    def series(self) -> str:
        """The kernel series, such as ``6.12``."""
        return self.name.partition("-")[0]

    def get(self) -> KernelFiles:
        """Downloads and unpacks files missing from the cache, or raises MatrixError."""
        foreign = "" if self.machine is X86_64 else self.machine.architecture
        archive = Archive()
        if self.release:
            name = "-".join(filter(None, ("apt", self.release, foreign)))
            archive = open_release(self.release, cache_dir() / name, foreign)
        image, headers = (
            _find_dependency(archive, prefix + self.package, prefix + r"\S+")
            for prefix in ("linux-image-", "linux-headers-")
        )
        release = image.removeprefix("linux-image-")
        if not release.startswith(self.series + "."):
            raise MatrixError(
                f"linux-image-{self.package} has version {release} here, not {self.series}",
                "run the matrix on Debian 12, whose archive has this kernel",
            )
        version = archive.version(image)
        sources = archive.dependencies(headers, r"linux-headers-\S+")
        tools = archive.dependencies(headers, r"linux-kbuild-\S+")
        home = cache_dir() / self.name / version.replace(":", "_")
        root = home / "root"
        if not root.exists():
            # The kbuild tools run on the host, even if the headers are for another architecture.
            host = Archive() if foreign else archive
            _unpack([(archive, [image, headers, *sources]), (host, tools)], root)
        return KernelFiles(
            self.name,
            version,
            release,
            root / "boot" / f"vmlinuz-{release}",
            root / "lib/modules",
            root / "usr/src" / headers,
            home,
            self.machine,
            build_root(self.machine, archive) if foreign else None,
        )


@dataclass(frozen=True)
class DirectoryKernel:
    """A kernel in a directory: ``bzImage``, ``lib/modules/RELEASE`` and optionally ``headers``."""

    name: str
    path: Path
    release: str = ""
    boots: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    machine: Machine = X86_64

    def get(self) -> KernelFiles:
        """Finds the files, or raises MatrixError if the directory's layout differs."""
        modules = self.path / "lib/modules"
        releases = sorted(os.listdir(modules)) if modules.is_dir() else []
        if len(releases) != 1 or not (self.path / "bzImage").exists():
            raise MatrixError(
                f"{self.path} is not a kernel directory",
                "put bzImage and lib/modules/RELEASE (exactly one) into it",
            )
        headers = self.path / "headers"
        return KernelFiles(
            self.name,
            releases[0],
            releases[0],
            self.path / "bzImage",
            modules,
            headers if headers.exists() else None,
            cache_dir() / self.name,
        )


Kernel = DebianKernel | DirectoryKernel

_COMMON = ("boot", "sampler", "symbols", "unwinding", "python_frames", "thread_contexts", "waits")
_ARM64 = (*_COMMON, "spin", "events", "record", "agent")


def _arm64(name: str, package: str) -> DebianKernel:
    return DebianKernel(name, package, "bookworm", ("kaslr",), _ARM64, AARCH64)


KERNELS: dict[str, Kernel] = {
    row.name: row
    for row in (
        DebianKernel("5.10", "amd64", "bullseye", ("kaslr",), (*_COMMON, "dump", "events")),
        DebianKernel("6.1", "amd64"),
        DebianKernel("6.12", "6.12-amd64"),
        _arm64("6.1-arm64", "arm64"),
        _arm64("6.12-arm64", "6.12-arm64"),
        _arm64("6.12-arm64-16k", "6.12-arm64-16k"),
    )
}


def get_kernel(name: str) -> Kernel:
    """Returns the kernel called ``name``. A name with a slash is a path to a directory."""
    if "/" in name:
        path = Path(name).absolute()
        return DirectoryKernel(path.name, path)
    if name not in KERNELS:
        raise MatrixError(f"no kernel {name}", f"use {', '.join(KERNELS)}, or a directory")
    return KERNELS[name]


def install_tools(machines: Iterable[Machine]) -> None:
    """Installs missing tools for booting guests, or raises MatrixError if not root."""
    needed = {"busybox": "busybox-static", "depmod": "kmod", "make": "make", "dpkg-deb": "dpkg"}
    for machine in machines:
        needed[machine.emulator[0]] = machine.package
        needed[machine.compiler] = machine.compiler_package
    # depmod's directory is only in root's PATH
    os.environ["PATH"] += ":/usr/sbin"
    missing = [package for tool, package in needed.items() if not shutil.which(tool)]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid():
        raise MatrixError(f"missing: {', '.join(missing)}", f"run: sudo {' '.join(command)}")
    call(["apt-get", "update"])
    call(command)


def _find_dependency(archive: Archive, package: str, pattern: str) -> str:
    try:
        result = archive.dependencies(package, pattern)
    except MatrixError as error:
        if os.geteuid():
            raise MatrixError(f"apt does not know {package}", "run: sudo apt-get update") from error
        archive.update()
        result = archive.dependencies(package, pattern)
    if not result:
        raise MatrixError(f"{package} depends on no kernel package")
    return result[0]


def _unpack(packages: Sequence[tuple[Archive, Sequence[str]]], root: Path) -> None:
    """Downloads, unpacks and indexes packages. ``root`` is renamed into place when complete."""
    partial = root.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    debs = partial / "debs"
    debs.mkdir(parents=True)
    for archive, names in packages:
        print(f"downloading {' '.join(names)}", flush=True)
        archive.download(names, debs)
    for deb in debs.iterdir():
        call(["dpkg-deb", "-x", str(deb), str(partial)])
    shutil.rmtree(debs)
    for release in os.listdir(partial / "lib/modules"):
        call(["depmod", "-b", str(partial), release])
    for makefile in _own_makefiles(partial / "usr/src"):
        text = makefile.read_text()
        makefile.write_text(text.replace("include /usr/src/", f"include {root}/usr/src/"))
    partial.rename(root)


def _own_makefiles(sources: Path) -> Iterator[Path]:
    """Returns the stub makefiles, which include a makefile by its installation path."""
    return (path for path in sources.glob("linux-headers-*/Makefile") if path.stat().st_size < 200)
