"""Reloads of changed or invalid configurations while the agent runs."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.table.run import merge
from tests.faults.table.scenario import Scenario
from tests.servers import free_port

BROKEN, CHANGED = "broken configuration", "reload"


def broken(write):
    """Returns a fault that reloads an invalid file, which is ignored, and then a valid file."""

    def fault(run):
        time.sleep(1)
        run.config_path.unlink()
        write(run.config_path)
        for _ in range(3):
            run.process.send_signal(signal.SIGHUP)
            time.sleep(0.7)
        if run.config_path.is_dir():
            run.config_path.rmdir()
        run.config_path.unlink(missing_ok=True)
        run.reload()
        time.sleep(1)

    return fault


def text(content):
    data = content if isinstance(content, bytes) else content.encode()
    return lambda path: path.write_bytes(data)


def sparse(path):
    path.touch()
    os.truncate(path, 1 << 30)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)
FILES = {
    "is missing": lambda path: None,
    "is empty": text(""),
    "is not YAML": text("a: [b, {"),
    "is not UTF-8": text(b"a: \xff\xfe\xfa"),
    "contains an unknown key": text("receivers: {kprofiler: {samples_per_secnd: 5}}"),
    "specifies a rate of -1": text("receivers: {kprofiler: {samples_per_second: -1}}"),
    "has aliases that expand to 3 billion values": text(BOMB),
    "has 100,000 levels of nesting": text("[" * 100_000),
    "contains a YAML tag that creates Python objects": text(
        "!!python/object/apply:os.system [reboot]"),
    "contains 1 GiB of zeros": sparse,
    "is a directory": lambda path: path.mkdir(),
    "is a FIFO": os.mkfifo,
    "is a link to itself": lambda path: path.symlink_to(path.name),
    "is a terminal device": lambda path: path.symlink_to("/dev/ptmx"),
    "is random bytes": lambda path: path.write_bytes(os.urandom(4096)),
    "is truncated": text('{"receivers": {"kprofiler": {"samples_per_second": 9'),
    "refers to an exporter that does not exist":
        text("service: {pipelines: {profiles: {exporters: [x]}}}"),
}  # fmt: skip


def changed(*changes):
    """Returns a fault that applies each change alone to the first configuration, and reloads it."""

    def fault(run):
        first = run.config
        for change in changes:
            run.config = merge(first, change(run) if callable(change) else change)
            run.reload()
            time.sleep(1.2)
        run.config = first
        run.reload()
        time.sleep(1.2)

    return fault


def sampler(**values):
    return {"receivers": {"kprofiler": values}}


def exporters(*names):
    """Selects exporters for a reload. ``-`` denotes the scenario's exporter."""

    def change(run):
        ids = [run.exporter if name == "-" else name for name in names]
        return {"service": {"pipelines": {"profiles": {"exporters": ids}}}}

    return change


def another(run):
    name = "otlp_http/away"
    new = {name: {"endpoint": f"http://127.0.0.1:{free_port()}", "timeout": "1s"}}
    ids = [run.exporter, "file/witness", name]
    return {"exporters": new, "service": {"pipelines": {"profiles": {"exporters": ids}}}}


def exporter(**settings):
    return changed(lambda run: {"exporters": {run.exporter: settings}})


def storm(run):
    for _ in range(30):
        run.reload()
        time.sleep(0.1)
    time.sleep(2)


def while_frozen(run):
    run.process.send_signal(signal.SIGSTOP)
    for _ in range(100):
        run.reload()
    time.sleep(1)
    run.process.send_signal(signal.SIGCONT)
    time.sleep(2)


def occupied(run):
    return {"service": {"health": {"endpoint": "{}:{}".format(*run.receiver.address)}}}


KEEPS = "the agent samples others, or none"
SCENARIOS = [
    *[Scenario(BROKEN, f"file {name}", broken(write)) for name, write in FILES.items()],
    Scenario(CHANGED, "same configuration reloaded 30 times in three seconds", storm),
    Scenario(CHANGED, "100 reloads while the agent is frozen", while_frozen, others=KEEPS),
    Scenario(CHANGED, "rate changed to 1, 997 and 19",
             changed(*(sampler(samples_per_second=n) for n in (1, 997, 19))), others=KEEPS),
    Scenario(CHANGED, "captured stacks changed to kernel, user and both",
             changed(*(sampler(stacks=s) for s in ("kernel", "user"))), others=KEEPS),
    Scenario(CHANGED, "symbol names turned off and on", changed(sampler(user_symbols="off"))),
    Scenario(CHANGED, "Python frames turned off and on",
             changed(sampler(python_frames=0), sampler(python_frames=127))),
    Scenario(CHANGED, "ring enlarged fourfold", changed(sampler(map_scale_factor=2))),
    Scenario(CHANGED, "targets changed to a nonexistent process",
             changed(sampler(target_pids=[4194303])), others=KEEPS),
    Scenario(CHANGED, "window length changed to 200 ms and 5 s",
             changed(*(sampler(reporter_interval=t) for t in ("200ms", "5s")))),
    Scenario(CHANGED, "Resource granularity changed to executable and service",
             changed(*(sampler(resources=r) for r in ("executable", "service"))), others=KEEPS),
    Scenario(CHANGED, "unreachable receiver added", changed(another)),
    Scenario(CHANGED, "queue shortened to one batch", exporter(sending_queue={"queue_size": 1})),
    Scenario(CHANGED, "messages limited to 64 KiB", exporter(max_message_bytes=65536)),
    Scenario(CHANGED, "health endpoint moved to an address that is in use", changed(occupied)),
    Scenario(CHANGED, "off-CPU sampling disabled, then enabled with wakers", alone=True,
             fault=changed(
        sampler(off_cpu={"enabled": False}), sampler(off_cpu={"enabled": True, "wakers": True}))),
    Scenario(CHANGED, "exporters removed and added again",
             changed(exporters("file/witness"))),
]  # fmt: skip
