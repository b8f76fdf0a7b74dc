"""Builds the perf records for loaded and unloaded ksymbols and BPF programs."""

import struct


def ksymbol(address, name, *, length=64, code=1, removed=False, time_ns=7):
    text = name.encode() + b"\0"
    text += bytes(-len(text) % 8)
    body = struct.pack("=QIHH", address, length, code, removed) + text + struct.pack("=Q", time_ns)
    return struct.pack("=IHH", 17, 0, len(body) + 8) + body


def program(number, tag, *, event=1, time_ns=7):
    body = struct.pack("=HHI8sQ", event, 0, number, bytes.fromhex(tag), time_ns)
    return struct.pack("=IHH", 18, 0, len(body) + 8) + body
