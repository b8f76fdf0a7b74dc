"""Holds a kernel lock in one thread for a known time, while other threads wait for the lock.

The holding thread writes a buffer in an unpopulated page to a file. The thread acquires the file's
lock, then blocks in a page fault until this program supplies the page through userfaultfd(2).
"""

import ctypes
import fcntl
import json
import mmap
import os
import platform
import select
import struct
import sys
import tempfile
import threading
import time

SYSTEM_CALL = {"x86_64": 323, "aarch64": 282}[platform.machine()]
_API, _REGISTER, _ZEROPAGE = (
    3 << 30 | size << 16 | 0xAA << 8 | number for number, size in ((0x3F, 24), (0, 32), (4, 32))
)
_MISSING = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def open_faults():
    """Returns a userfaultfd, or raises OSError if the kernel does not support userfaultfd."""
    fd = LIBC.syscall(SYSTEM_CALL, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    fcntl.ioctl(fd, _API, bytearray(struct.pack("=3Q", 0xAA, 0, 0)))
    return fd


def name_thread(name):
    LIBC.prctl(15, name.encode(), 0, 0, 0)


def is_blocked(thread):
    """Returns whether a thread is sleeping in the kernel for a reason other than the GIL."""
    with open(f"/proc/self/task/{thread.native_id}/wchan") as file:
        function = file.read()
    return function != "0" and "futex" not in function


def hold_once(faults, file, waiters, seconds):
    """Holds the file's lock for at least ``seconds`` while all waiters wait for it.

    Returns the holder's thread id, and the duration of each wait in nanoseconds, by thread id.
    """
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = struct.pack("=2Q", address, mmap.PAGESIZE)
    fcntl.ioctl(faults, _REGISTER, bytearray(page + struct.pack("=2Q", _MISSING, 0)))
    holder, waited = [], {}

    def hold():
        name_thread("lock_holder")
        holder.append(threading.get_native_id())
        count = LIBC.pwrite(file, ctypes.c_void_p(address), ctypes.c_size_t(8), ctypes.c_long(0))
        assert count == 8, ctypes.get_errno()

    def wait_for_lock():
        began = time.monotonic_ns()
        os.pwrite(file, b"x", 0)
        waited[threading.get_native_id()] = time.monotonic_ns() - began

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    select.select([faults], [], [])  # wait until the holder faults on the page
    os.read(faults, 32)
    for _ in range(waiters):
        threads.append(threading.Thread(target=wait_for_lock))
        threads[-1].start()
    while not all(map(is_blocked, threads)):
        time.sleep(0.001)
    time.sleep(seconds)
    fcntl.ioctl(faults, _ZEROPAGE, bytearray(page + struct.pack("=2Q", 0, 0)))
    for thread in threads:
        thread.join()
    return holder[0], waited


def main(times, waiters, seconds):
    """Prints the thread ids of holders and waiters, and how long each waiter's write took."""
    name_thread("lock_waiter")
    faults = open_faults()
    with tempfile.TemporaryFile() as file:
        rounds = [hold_once(faults, file.fileno(), waiters, seconds) for _ in range(times)]
    holders, waits = zip(*rounds, strict=True)
    flat = {tid: wait for part in waits for tid, wait in part.items()}
    result = {"holders": holders, "waiters": [*flat], "waits_ns": [*flat.values()]}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
