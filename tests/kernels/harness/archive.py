"""Accesses Debian's archive with apt, for this machine's release or another release.

apt always verifies signatures. For another release, apt uses a separate configuration, separate
lists and an empty package database in the cache, and does not modify this machine's files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import MatrixError

_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FORMER = {
    "Debian": "http://archive.debian.org/debian/",
    "Debian-Security": "http://archive.debian.org/debian-security/",
}
"""Archive URLs for unsupported releases, by the label that apt uses."""

_MERGED = ("bin", "lib", "lib64", "sbin")
"""The top-level directories that are symbolic links into /usr."""
_FRESH_S = 3600
"""The maximum age of package lists that are used without an update, in seconds."""


def call(command: Sequence[str], **options: str | Path | Mapping[str, str]) -> str:
    """Runs a command, and returns its output. Raises MatrixError with the output on failure."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    if done.returncode:
        raise MatrixError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


@dataclass(frozen=True)
class Archive:
    """The packages in a release. ``options`` are the apt options that select the release."""

    options: tuple[str, ...] = ()

    def update(self) -> None:
        call(["apt-get", *self.options, "-o", "APT::Update::Error-Mode=any", "update"])

    def dependencies(self, package: str, pattern: str) -> list[str]:
        """Returns a package's matching dependencies. Raises MatrixError for an unknown package."""
        wanted = re.compile(r"^\s*\|?Depends: (" + pattern + r")$", re.MULTILINE)
        return wanted.findall(call(["apt-cache", *self.options, "depends", package]))

    def version(self, package: str) -> str:
        shown = call(["apt-cache", *self.options, "show", "--no-all-versions", package])
        return re.findall(r"^Version: (\S+)$", shown, re.MULTILINE)[0]

    def download(self, packages: Sequence[str], folder: Path) -> None:
        self._fetch(["download", *packages], folder)

    def download_source(self, package: str, folder: Path) -> None:
        """Downloads a package's source (see ``with_sources``). Raises MatrixError."""
        self._fetch(["source", "--download-only", package], folder)

    def _fetch(self, words: Sequence[str], folder: Path) -> None:
        # User _apt cannot write to the folder; signatures are verified anyway.
        sandbox = "APT::Sandbox::User=" + ("root" if os.geteuid() == 0 else "")
        call(["apt-get", *self.options, "-o", sandbox, *words], cwd=folder)

    def unpack(self, packages: Sequence[str], root: Path) -> None:
        """Unpacks packages and their dependencies, without running their scripts.

        The archive must have been opened by :func:`open_release`. Raises MatrixError.
        """
        for name in _MERGED:
            (root / "usr" / name).mkdir(parents=True)
            (root / name).symlink_to(f"usr/{name}")
        debs = root / "debs"
        (debs / "partial").mkdir(parents=True)
        options = [f"-oDir::Cache::Archives={debs}", "-oAPT::Install-Recommends=false"]
        call(["apt-get", *self.options, *options, "-y", "--download-only", "install", *packages])
        for deb in sorted(debs.glob("*.deb")):
            # Unlike `dpkg-deb -x`, this keeps /lib as a link to /usr/lib.
            pipe = 'dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --keep-directory-symlink'
            call(["sh", "-c", pipe, "sh", str(deb), str(root)])
        shutil.rmtree(debs)


def open_release(
    release: str, home: Path, architecture: str = "", *, with_sources: bool = False
) -> Archive:
    """Opens the archive for another release or architecture, including its security updates.

    Tries this machine's mirror first, then the archive of former releases. Raises MatrixError if no
    reachable archive has the release.

    Args:
        home: the directory for apt's files, outside of the checkout.
        architecture: Debian's name for the architecture; empty for this machine's architecture.
    """
    for place in ("lists/partial", "cache/archives/partial"):
        (home / place).mkdir(parents=True, exist_ok=True)
    (home / "status").touch()
    machine = {"APT::Architecture": architecture, "APT::Architectures": architecture}
    archive = Archive(
        tuple(
            f"-o{key}={value}"
            for key, value in {
                **(machine if architecture else {}),
                "Dir::Etc::SourceList": home / "sources.list",
                "Dir::Etc::SourceParts": "-",
                "Dir::Etc::Preferences": "-",
                "Dir::Etc::PreferencesParts": "-",
                "Dir::State": home,
                "Dir::State::Status": home / "status",
                "Dir::Cache": home / "cache",
                "Acquire::Check-Valid-Until": "false",
                "Acquire::Languages": "none",
                "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
            }.items()
        )
    )
    lists = list(home.glob("lists/*Release"))
    if lists and time.time() - max(path.stat().st_mtime for path in lists) < _FRESH_S:
        return archive
    errors = []
    for addresses in (_mirrors(), _FORMER):
        lines = [
            f"{kind} [signed-by={_KEYS}] {addresses[label]} {suite} main\n"
            for kind in ("deb", "deb-src")[: 1 + with_sources]
            for label, suite in (("Debian", release), ("Debian-Security", f"{release}-security"))
            if label in addresses
        ]
        (home / "sources.list").write_text("".join(lines))
        try:
            archive.update()
        except MatrixError as error:
            errors.append(str(error))
            if not list(home.glob("lists/*Release")):  # files from an earlier run can be reused
                continue
        return archive
    raise MatrixError(f"no archive has Debian {release}:\n" + "\n".join(errors))


def _mirrors() -> dict[str, str]:
    """Returns the URLs of the archives that apt uses on this machine, by label."""
    lines = call(["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)"]).splitlines()
    known = dict(line.split(" ", 1) for line in lines if " " in line)
    return {label: known[label] for label in _FORMER if label in known}
