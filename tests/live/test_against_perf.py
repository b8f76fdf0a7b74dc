"""Compares a recording of this host with a ``perf`` recording made under the same load."""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from programs import recording

from otel_kprofiler.host import Access
from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols import KernelSymbolizer
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.long]

SECONDS = 1
"""CPU seconds used by each part of the load; the elapsed time is longer on a busy machine."""

# From tools/perf/Documentation/perf.data-file-format.txt (header), uapi/linux/perf_event.h and
# tools/lib/perf/include/perf/event.h (records).
PERF_FILE_DATA = 40
RECORD_KSYMBOL, RECORD_BPF_EVENT, RECORD_STAT_ROUND = 17, 18, 77

# Kernel functions expected under the load, by subsystem; at least three of each must be sampled.
AREAS = {
    "file system": r"vfs_\w+|ext4_\w+|xfs_\w+|btrfs_\w+|ovl_\w+|generic_\w+|filemap_\w+|"
    r"__filemap_\w+|shmem_\w+|ksys_(read|write)|do_sys_open\w*|path_openat|link_path_walk|"
    r"folio_\w+|pagecache_\w+|do_unlinkat",
    "scheduler": r"__?schedule|schedule_\w+|try_to_wake_up|pick_next_\w+|enqueue_\w+|dequeue_\w+|"
    r"finish_task_switch|default_wake_function|ttwu_\w+|update_\w*load\w*|wake_up_\w+|"
    r"sched_\w+|update_curr|__wake_up_\w+|select_task_rq_\w+",
    "page faults": r"handle_mm_fault|__handle_mm_fault|exc_page_fault|asm_exc_page_fault|"
    r"do_user_addr_fault|do_anonymous_page|do_fault\w*|do_wp_page|wp_page_copy|"
    r"do_cow_fault|do_read_fault|filemap_map_pages|clear_page_\w+|clear_huge_page|set_pte_range|"
    r"lock_vma_under_rcu|vma_alloc_folio\w*|next_uptodate_folio|el0_da|do_page_fault",
}


def hide_programs_loaded(data):
    """Changes KSYMBOL and BPF_EVENT records in ``perf.data`` so that perf script ignores them.

    If several profilers listen, KSYMBOL and BPF_EVENT records are longer than their headers state,
    and perf script stops at the first such record. Other tests load BPF programs concurrently.
    """
    content = bytearray(data.read_bytes())
    start, size = struct.unpack_from("<QQ", content, PERF_FILE_DATA)
    at = start
    while at < start + size:
        kind, _, length = struct.unpack_from("<IHH", content, at)
        if kind in (RECORD_KSYMBOL, RECORD_BPF_EVENT):
            struct.pack_into("<I", content, at, RECORD_STAT_ROUND)
        at += length
    data.write_bytes(content)


def read_cpu_times(pid):
    """Returns each child's CPU time in seconds, including that of its exited children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stats = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2] for child in children]
    ticks = os.sysconf("SC_CLK_TCK")
    return [sum(map(int, stat.split()[11:15])) / ticks for stat in stats]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed (package linux-perf)")
    directory = tmp_path_factory.mktemp("perf")
    folded, data = directory / "x.folded", directory / "perf.data"
    load = subprocess.Popen([sys.executable, "-m", "benchmarks.mixed_load", "600"])
    with recording("-F", "499", "-d", "600s", "-o", folded) as record:
        perf = subprocess.Popen(
            ["perf", "record", "-q", "-e", "cpu-clock", "-F", "499", "-a", "-g",
             "-o", data, "--", "sh", "-c", "echo sampling; read end"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        line = perf.stdout.readline()
        assert line == "sampling\n", perf.communicate()[1]
        start = read_cpu_times(load.pid)
        wait_until(
            lambda: all(
                end - begin > SECONDS
                for begin, end in zip(start, read_cpu_times(load.pid), strict=True)
            ),
            seconds=120,
        )
        _, perf_errors = perf.communicate("\n")
        record.send_signal(signal.SIGINT)
        _, errors = record.communicate(timeout=60)
        assert record.returncode == 0, errors
    load.kill()
    load.wait()
    assert perf.returncode == 0, perf_errors
    hide_programs_loaded(data)
    script = subprocess.run(
        ["perf", "script", "-F", "ip,sym", "-i", data], capture_output=True, text=True, check=True
    )
    frames = re.findall(r"^\s+([0-9a-f]{16}) (\S+)", script.stdout, re.MULTILINE)
    # Padding before a function is attributed to the function.
    kernel = {
        (int(ip, 16), name.removeprefix("__pfx_")) for ip, name in frames if ip.startswith("ffff")
    }
    stacks = [line.rsplit(" ", 1)[0].split(";") for line in folded.read_text().splitlines()]
    return {frame.removesuffix("_[k]") for stack in stacks for frame in stack}, kernel


@pytest.mark.parametrize("area", AREAS)
def test_functions_in_every_part_of_the_kernel_have_the_names_that_perf_reports(profiled, area):
    functions, kernel = profiled
    pattern = re.compile(AREAS[area])
    ours = {name for name in functions if pattern.fullmatch(name)}
    theirs = {name for _, name in kernel}
    assert len(ours & theirs) >= 3, (ours, sorted(theirs))


def test_addresses_sampled_by_perf_resolve_to_the_names_that_perf_reports(profiled):
    """Names may differ only where several symbols share an address."""
    _, kernel = profiled
    symbolizer = KernelSymbolizer.live(Access())
    wrong = []
    for ip, name in kernel:
        if name == "[unknown]":
            continue
        (frame,) = symbolizer.resolve_addresses([ip])
        if frame.unresolved is Unresolved.FREED_INIT:
            continue  # perf uses the preceding symbol, but ``record`` uses none
        line = frame.lines[-1] if frame.lines else None
        if line and name in {line.function, line.system_name}:
            continue
        aliases = symbolizer.explain(ip).names
        if name not in aliases:
            wrong.append((hex(ip), name, frame.function, aliases))
    assert len(kernel) > 300
    assert not wrong
