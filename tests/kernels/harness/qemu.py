"""Boots one guest under qemu and collects its results.

Always uses ``-accel tcg``, because /dev/kvm may be present but unusable inside a virtual machine.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from harness.initramfs import ROOT_TAG, RUN_DIR, RUN_TAG, build_initramfs, shared_paths
from harness.kernels import KernelFiles
from harness.places import CHECKOUT

GUEST_SCRIPT = CHECKOUT / "tests/kernels/guest.sh"
MARKER = re.compile(r"^kernel-matrix: pytest exit (\d+)\s*$", re.MULTILINE)
TAIL_LINES = 40
EMULATOR_FAULT = re.compile(
    r"\] (?:Oops: )?int3: 0000 \[#1\]|panic - not syncing: IO-APIC \+ timer doesn't work"
)
"""Guest crashes that cannot occur on a real machine.

While the kernel patches code, it temporarily writes breakpoints (arch/x86/kernel/alternative.c). An
emulated CPU may hit a breakpoint that has already been removed and is therefore not recognized.
On a busy host, an emulated timer may also miss ticks that the kernel waits for while booting.
"""


@dataclass(frozen=True)
class Boot:
    """A boot configuration of a guest kernel."""

    name: str
    title: str
    cpus: int
    arguments: str = ""


BOOTS: dict[str, Boot] = {
    boot.name: boot
    for boot in (
        Boot("kaslr", "KASLR, 2 CPUs", 2),
        Boot("nokaslr", "no KASLR, 1 CPU", 1, "nokaslr"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """The results of a boot. ``status`` is pytest's exit status, if the guest reported it."""

    status: int | None
    run_dir: Path
    seconds: float
    reason: str

    @property
    def junit(self) -> Path:
        """The path of the test results. The file is missing if the guest did not finish."""
        return self.run_dir / "junit.xml"

    @property
    def console(self) -> str:
        return (self.run_dir / "console.log").read_text(errors="replace")

    @property
    def console_tail(self) -> str:
        return "\n".join(self.console.splitlines()[-TAIL_LINES:])

    @property
    def emulator_failed(self) -> bool:
        """True if the guest crashed in a way that cannot occur on a real machine."""
        return self.status is None and EMULATOR_FAULT.search(self.console) is not None


def parse_status(console: str) -> int | None:
    """Returns the exit status that the guest printed, or None after a panic, hang or power loss."""
    result = MARKER.findall(console)
    return int(result[-1]) if result else None


def qemu_command(kernel: KernelFiles, boot: Boot, run_dir: Path) -> list[str]:
    """Returns the command line for a guest with ``run_dir`` and a read-only host root."""
    share = "local,security_model=none,multidevs=remap"
    machine = kernel.machine
    append = (
        f"console={machine.console} quiet panic=-1 oops=panic apparmor=0 audit=0 {boot.arguments}"
    )
    shares = [
        ("-virtfs", f"{share},path={path},mount_tag={tag},readonly=on")
        for tag, path in shared_paths(kernel).items()
    ]
    return [
        *("setpriv", "--pdeathsig", "KILL"),  # guests exit with the runner, even if it is killed
        *(*machine.emulator, "-accel", "tcg,thread=multi"),
        *("-smp", str(boot.cpus), "-m", "1536M", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-serial", f"file:{run_dir}/console.log"),
        *("-virtfs", f"{share},path={kernel.root or '/'},mount_tag={ROOT_TAG},readonly=on"),
        *("-virtfs", f"{share},path={run_dir},mount_tag={RUN_TAG}"),
        *chain.from_iterable(shares),
        *("-kernel", str(kernel.image), "-initrd", f"{run_dir}/initramfs"),
        *("-append", f"{append} {boot.arguments}"),
    ]


def run_guest(
    kernel: KernelFiles,
    boot: Boot,
    pytest_arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    verbose: bool,
) -> Outcome:
    """Boots a guest, runs pytest in it and powers it off, within ``timeout_s`` seconds."""
    run_dir = kernel.work / f"run-{boot.name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "initramfs").write_bytes(build_initramfs(kernel))
    (run_dir / "job.sh").write_text(_job(kernel, boot, pytest_arguments, environment))
    console = run_dir / "console.log"
    console.touch()
    started = time.monotonic()
    with (run_dir / "qemu.log").open("wb") as log, console.open("rb") as screen:
        guest = subprocess.Popen(
            qemu_command(kernel, boot, run_dir), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            reason = ""
            while guest.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    guest.wait(0.2)
                if verbose:
                    sys.stdout.write(screen.read().decode(errors="replace"))
                    sys.stdout.flush()
                if time.monotonic() - started > timeout_s:
                    reason = f"still running after {timeout_s:.0f} s"
                    break
        finally:
            guest.kill()
            guest.wait()
    status = parse_status(console.read_text(errors="replace"))
    if status is None and not reason:
        reason = f"ended without a result (qemu exit {guest.returncode})\n" + (
            run_dir / "qemu.log"
        ).read_text(errors="replace")
    return Outcome(status, run_dir, time.monotonic() - started, reason.strip())


def _job(
    kernel: KernelFiles, boot: Boot, arguments: Sequence[str], environment: Mapping[str, str]
) -> str:
    """Returns the shell script that the guest runs."""
    variables = {
        **environment,
        "OTEL_KPROFILER_GUEST": f"{kernel.release} {boot.name}",
        "MATRIX_RUN": RUN_DIR,
        "MATRIX_MODULES": str(kernel.modules),
        "MATRIX_SPIN": str(kernel.work / "module"),
        "MATRIX_CHECKOUT": str(CHECKOUT),
        "MATRIX_PYTHON": "/usr/bin/python3" if kernel.root else sys.executable,
    }
    programs = kernel.work / "programs"
    if programs.exists():
        variables["MATRIX_PROGRAMS"] = str(programs)
        variables["KPROFILER_CONTEXT_PROGRAMS"] = str(programs / "contexts")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    script = ["/bin/sh", str(GUEST_SCRIPT), f"--junitxml={RUN_DIR}/junit.xml", *arguments]
    return exports + "exec " + shlex.join(script) + "\n"
