"""Samples from a service contain the sampled thread's kernel entry."""

import json

from otel_kprofiler.model import KERNEL_SIDE, USER_SIDE, Form, Frame, Line, Stack, WindowSample
from otel_kprofiler.otlp import decode_windows, encode_window
from otel_kprofiler.sdk.kernel_entries import name_entries
from tests.windows import make_window

KEY = "otel_kprofiler.kernel.entry"
GATE = "entry_SYSCALL_64_after_hwframe"


def sample(labels, side, *names):
    frames = [Frame(None, 1, (Line(name),), 0, side) for name in names]
    return WindowSample(Stack.from_frames(frames), 1, "t", 0, None, (10,), (), labels)


def window_of(*samples):
    return make_window(0, 100, ({"process.pid": 1}, list(samples)), taken=4)


WINDOW = window_of(
    sample((("tenant", "a"),), KERNEL_SIDE, "vfs_read", "__x64_sys_read", GATE),
    sample((), KERNEL_SIDE, "clear_page_erms", "asm_exc_page_fault"),
    sample((), KERNEL_SIDE, "unknown_function"),
    sample((), USER_SIDE, "main"),
)


def test_samples_taken_in_the_kernel_have_a_kernel_entry():
    labels = [one.labels for _, one in name_entries(WINDOW).samples]
    assert labels == [(("tenant", "a"), (KEY, "read")), ((KEY, "page fault"),), (), ()]


def test_receivers_receive_the_kernel_entry_as_an_attribute():
    (batch,) = encode_window(name_entries(WINDOW), form=Form.JSON).batches
    dictionary = json.loads(batch.payload)["dictionary"]
    strings = dictionary["stringTable"]
    values = [
        one["value"]["stringValue"]
        for one in dictionary["attributeTable"]
        if strings[one.get("keyStrindex", 0)] == KEY
    ]
    assert values == ["read", "page fault"]
    (result,) = decode_windows(batch.payload)
    assert [one.labels for _, one in result.samples] == [(("tenant", "a"),), (), (), ()]
