"""The machine types to test: how to emulate them, and the root directory for their guests.

A guest with the host's machine type uses the host's root directory. A guest of another type needs
programs and libraries built for it: Debian packages and wheels are unpacked into a directory in the
cache. Files in this directory are never executed on the host.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import hashlib
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.archive import Archive, call
from harness.places import CHECKOUT, cache_dir

_PACKAGES = (
    *("bash", "busybox-static", "coreutils", "dash", "findutils", "grep", "iproute2", "kmod"),
    *("libelf1", "libbpf1", "libstdc++6", "mount", "procps", "python3", "util-linux"),
)
_REQUIREMENTS = ("pytest", "pytest-timeout", "zstandard")
"""The packages that the tests import in addition to the package's dependencies."""
_PYTHON = "3.11"
"""The Python version in Debian 12."""


@dataclass(frozen=True)
class Machine:
    """A machine type to emulate.

    Attributes:
        name: the name that ``uname -m`` prints.
        architecture: Debian's name of the architecture.
        emulator: the emulator's command line, including processor and board options.
        variants: the compiler options for each build of a program, by name.
    """

    name: str
    architecture: str
    emulator: tuple[str, ...]
    package: str
    console: str
    compiler: str
    compiler_package: str
    make: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"chains": ()})


X86_64 = Machine(
    "x86_64",
    "amd64",
    ("qemu-system-x86_64", "-cpu", "max"),
    "qemu-system-x86",
    "ttyS0",
    "gcc-12",
    "gcc-12",
)
AARCH64 = Machine(
    "aarch64",
    "arm64",
    # Emulating the architected pointer authentication algorithm would dominate the run time.
    # Few processors support 52-bit addresses; without them, signatures start at bit 47 or 48.
    ("qemu-system-aarch64", "-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on,lpa2=off"),
    "qemu-system-arm",
    "ttyAMA0",
    "aarch64-linux-gnu-gcc-12",
    "gcc-12-aarch64-linux-gnu",
    ("ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"),
    # Debian 12 does not sign return addresses, but later releases do. The
    # instruction that authenticates an address and returns to it requires ARMv8.3.
    {
        "chains": (),
        "chains-signed": ("-mbranch-protection=standard",),
        "chains-signed-8.3": ("-mbranch-protection=pac-ret+leaf", "-march=armv8.3-a"),
    },
)


def build_root(machine: Machine, archive: Archive) -> Path:
    """Returns a machine type's Debian root, building it unless cached; raises MatrixError."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *_REQUIREMENTS]
    key = hashlib.sha256(repr((_PACKAGES, requirements)).encode()).hexdigest()[:12]
    root = cache_dir() / f"root-{machine.architecture}-{key}"
    if not root.exists():
        partial = root.with_name("partial-root")
        shutil.rmtree(partial, ignore_errors=True)
        print(f"building a root for {machine.name}", flush=True)
        _make_root(archive, partial)
        _install_wheels(machine, requirements, partial)
        partial.rename(root)
    return root


def _make_root(archive: Archive, root: Path) -> None:
    archive.unpack(_PACKAGES, root)
    for name in ("dev", "proc", "run", "sys", "tmp"):
        (root / name).mkdir(exist_ok=True)
    # ``sh`` is created by package scripts, which are not run.
    if not (root / "usr/bin/sh").exists():
        (root / "usr/bin/sh").symlink_to("dash")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")


def _install_wheels(machine: Machine, requirements: Sequence[str], root: Path) -> None:
    platforms = [f"manylinux{name}_{machine.name}" for name in ("2014", "_2_17", "_2_28", "_2_34")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--no-compile"]
    command += [f"--platform={name}" for name in platforms]
    command += [f"--python-version={_PYTHON}", "--implementation=cp"]
    command += [f"--target={root}/usr/lib/python3/dist-packages", *requirements]
    call(command)
    # Compile bytecode here, since this takes minutes in the guest.
    if sys.version_info[:2] == tuple(map(int, _PYTHON.split("."))):
        compiled = [f"{root}/usr/lib/python{_PYTHON}", f"{root}/usr/lib/python3/dist-packages"]
        options = ["-q", "--invalidation-mode=unchecked-hash", "-s", str(root), "-p", "/"]
        call([sys.executable, "-m", "compileall", *options, *compiled])
