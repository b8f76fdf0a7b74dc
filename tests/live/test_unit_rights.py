"""Each capability of the shipped unit is necessary for user stacks, and together they suffice."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from otel_kprofiler.pipeline import OF_OTHERS
from tests.collector.units import unit_capabilities
from tests.further import further_between
from tests.needs import ROOT
from tests.public import as_nobody, get_public_python
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.live,
    ROOT,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
]

LIBRARY = "volatile long n; void spin(void) { for (;;) n++; }"
PROGRAM = "void spin(void); int main(void) { spin(); return 0; }"
SAMPLE = """
import json, sys, time
from otel_kprofiler.model import USER_SIDE, StackEnd, parse_user_stack
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
pids = tuple(map(int, sys.argv[1:]))
sampler = EbpfSampler(SamplerConfig(samples_per_second=499, stacks="user", target_pids=pids))
sampler.start()
whole = {pid: [] for pid in pids}
until = time.monotonic() + 100
while min(map(len, whole.values())) < 100 and time.monotonic() < until:
    sampler.wait(0.1)
    for sample in sampler.drain():
        end = parse_user_stack(sample.words(USER_SIDE)).end
        whole[sample.tgid].append(end is StackEnd.COMPLETE)
sampler.stop()
print(json.dumps([sum(ends) / len(ends) for ends in whole.values()]))
"""
LACKS = {
    (): (),
    ("CAP_CHECKPOINT_RESTORE",): ("deleted",),
    ("CAP_DAC_READ_SEARCH",): ("private",),
    ("CAP_SYS_PTRACE",): ("elsewhere", "deleted"),
}
"""The libraries that cannot be opened, by missing capability."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Runs several processes as root, each executing code in a different library.

    All users may read the first library, but only root may read the second. The third library is in
    another mount namespace, as in a container, and the fourth is deleted.
    """
    place = tmp_path_factory.mktemp("rights")
    started = {}
    for kind in ("readable", "private", "elsewhere", "deleted"):
        directory = place / kind
        directory.mkdir()
        library, program = directory / "libspin.so", directory / "program"
        for source, target, options in (
            (LIBRARY, library, ("-shared", "-fPIC")),
            (PROGRAM, program, ("-L", directory, "-lspin", f"-Wl,-rpath,{directory}")),
        ):
            command = ["gcc", "-x", "c", "-", "-x", "none", "-O1", "-fomit-frame-pointer"]
            subprocess.run([*command, *options, "-o", target], input=source, text=True, check=True)
        command = ["nice", program]
        if kind == "elsewhere":
            copies = shutil.copytree(directory, place / "copies")
            script = f"mount -t tmpfs none {directory} && cp {copies}/* {directory}"
            command = ["unshare", "-m", "sh", "-c", f"{script} && exec nice {program}"]
        started[kind] = subprocess.Popen(command)
    for directory in (place, *place.parents[:2]):
        directory.chmod(directory.stat().st_mode | 0o055)
    wait_until(
        lambda: all(
            "libspin.so" in Path(f"/proc/{process.pid}/maps").read_text()
            for process in started.values()
        )
    )
    (place / "private/libspin.so").chmod(0o700)
    (place / "deleted/libspin.so").unlink()
    yield {kind: process.pid for kind, process in started.items()}
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "missing", further_between(tuple(LACKS)), ids=lambda names: " ".join(names) or "none"
)
def test_each_capability_in_the_unit_is_needed_to_read_some_files(programs, missing):
    assert set(OF_OTHERS) < set(unit_capabilities())
    given = [name for name in unit_capabilities() if name not in missing]
    rights = as_nobody(*(name.removeprefix("CAP_").lower() for name in given))
    command = [*get_public_python().words, "-c", SAMPLE, *map(str, programs.values())]
    done = subprocess.run(
        [*rights, "--no-new-privs", *command], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    whole = dict(zip(programs, json.loads(done.stdout), strict=True))
    cut = {kind for kind, share in whole.items() if share < 0.5}
    assert cut >= set(LACKS[missing]), whole
    assert missing or not cut, whole
