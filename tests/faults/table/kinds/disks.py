"""Files and disks that are full, read-only or removed while the agent writes."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

from tests.faults.table.kinds.spools import AwayReceiver
from tests.faults.table.receivers import FileReceiver, HttpReceiver
from tests.faults.table.scenario import Scenario, wait

FILE, SPOOL = "output file", "disk of a spool"


def mount(run, options="size=8m", name="disk"):
    place = run.directory / name
    place.mkdir(exist_ok=True, mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True)
    run.on_close(lambda: subprocess.run(["umount", "-l", place], check=True))


def remount(run, options, name="disk"):
    subprocess.run(["mount", "-o", f"remount,{options}", run.directory / name], check=True)


def fill_up(directory):
    """Fills a disk completely with a file, and returns the file."""
    filler = directory / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def on_disk(name, options="size=8m"):
    return {"before": lambda run: mount(run, options, name)}


def fill(run, name):
    time.sleep(1)
    filler = fill_up(run.directory / name)
    wait(run)
    filler.unlink()
    time.sleep(1)


def tiny(run):
    """Waits while the agent fills its 128-kB file system, which then remains full."""
    wait(run)


def move_away(run):
    """Moves the file as logrotate does without copytruncate. Later writes go to the moved file."""
    path = run.receiver.path
    time.sleep(1)
    target = path.with_name("old.otlp")
    path.rename(target)
    run.receiver.others.append(target)
    wait(run)


def unlink(run):
    """Removes the file as a cleanup job would. A hard link preserves data written afterwards."""
    path = run.receiver.path
    link = path.with_name("kept.otlp")
    os.link(path, link)
    run.receiver.others.append(link)
    time.sleep(1)
    path.unlink()
    wait(run)


def replace_by_link(run):
    path, link = run.receiver.path, run.receiver.path.with_name("kept.otlp")
    os.link(path, link)
    run.receiver.others.append(link)
    path.unlink()
    path.symlink_to("/etc/hostname")
    wait(run)
    assert Path("/etc/hostname").stat().st_size < 1000
    path.unlink()


def move_directory(run):
    path = run.receiver.path
    time.sleep(1)
    path.parent.rename(run.directory / "elsewhere")
    run.receiver.others.append(run.directory / "elsewhere" / path.name)
    wait(run)


def change_mode(run):
    run.receiver.path.chmod(0)
    run.receiver.path.parent.chmod(0)
    wait(run)
    run.receiver.path.parent.chmod(0o700)


def limit_file_size(run):
    """Sets RLIMIT_FSIZE just above the file's size. By default, SIGXFSZ kills the process."""
    largest = max(run.witness.stat().st_size, run.receiver.path.stat().st_size)
    before = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (largest + 30_000, before[1]))
    wait(run)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, before)
    time.sleep(1)


def to_file(name, fault, **more):
    return Scenario(FILE, name, fault, more.pop("receiver", FileReceiver), **more)


def away(run, fault):
    """Changes the spool while the receiver is down, then brings the receiver back up."""
    time.sleep(1.5)
    fault(run)
    time.sleep(1.5)
    run.config["exporters"][run.exporter].update(HttpReceiver.configure(run.receiver))
    run.reload()
    time.sleep(2)


def remove_segments(run):
    for segment in run.segments:
        segment.unlink()


def remove_lock(run):
    for lock in run.spool.rglob("*lock*"):
        lock.unlink()


def replace_spool_by_link(run):
    run.spool.rename(run.directory / "old")
    run.spool.symlink_to("/tmp")


def open_to_all(run):
    for directory in (run.spool, *run.spool.glob("*")):
        directory.chmod(0o777)


def give_away(run):
    for path in (run.spool, *run.spool.rglob("*")):
        os.chown(path, 65534, 65534)


def append_garbage(run):
    with run.segments[-1].open("ab") as file:
        file.write(os.urandom(5000))


def fill_spool(run):
    filler = fill_up(run.spool)
    wait(run)
    filler.unlink()


def use_up_inodes(run):
    made = 0
    with contextlib.suppress(OSError):
        for made in range(10_000):
            (run.spool / f"{made}.x").touch()
    wait(run)
    for path in run.spool.glob("*.x"):
        path.unlink()


def spooled(name, fault, **more):
    return Scenario(SPOOL, name, partial(away, fault=fault), AwayReceiver, spool=True, **more)


def full_at_start(run):
    mount(run, "size=1m", "spool")
    fill_up(run.spool)


def free_at_last(run):
    wait(run)
    (run.spool / "filler").unlink()
    time.sleep(1)


def writable_at_last(run):
    wait(run)
    remount(run, "rw", "spool")
    time.sleep(1)


IN_SPOOL = on_disk("spool")
SCENARIOS = [
    to_file("disk is temporarily full", partial(fill, name="disk"), **on_disk("disk")),
    to_file("128-kB disk fills up and remains full", tiny, heals=False,
            **on_disk("disk", "size=128k")),
    to_file("file is moved away", move_away),
    to_file("file is removed", unlink),
    to_file("file is replaced by a link to another file", replace_by_link),
    to_file("directory is moved", move_directory, heals=False),
    to_file("file and directory modes change to 0", change_mode),
    to_file("file size is limited", limit_file_size,
            others="the limit is for all files"),
    to_file("directory of rotated files is moved", move_directory, heals=False,
            receiver=lambda: FileReceiver(rotation={"max_megabytes": 1, "max_backups": 2})),
    spooled("directory is removed", lambda run: shutil.rmtree(run.spool)),
    spooled("segments are removed", remove_segments),
    spooled("lock is removed", remove_lock),
    spooled("directory is replaced by a link", replace_spool_by_link),
    spooled("directories are world-writable", open_to_all),
    spooled("all files are chowned to another user", give_away),
    spooled("newest segment is truncated", lambda run: os.truncate(run.segments[-1], 3000)),
    spooled("garbage is appended to the newest segment", append_garbage),
    spooled("disk is temporarily full", fill_spool, **IN_SPOOL),
    spooled("disk runs out of inodes", use_up_inodes, **on_disk("spool", "nr_inodes=40")),
    spooled("disk is full at startup", free_at_last, before=full_at_start),
    spooled("disk is read-only at startup", writable_at_last,
            before=partial(mount, options="size=1m,ro", name="spool")),
    spooled("spool is limited to one megabyte", wait,
            exporter={"sending_queue": {"max_megabytes": 1}}, seconds=10,
            sampler={"samples_per_second": 997}),
    spooled("batches expire after a second", wait,
            exporter={"sending_queue": {"max_age": "1s"}}),
]  # fmt: skip
