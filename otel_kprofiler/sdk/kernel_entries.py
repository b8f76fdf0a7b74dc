"""Adds the kernel entry (system call, interrupt, …) to a service's samples as an attribute."""

from otel_kprofiler.model import (
    UNKNOWN_ENTRY,
    USER_MODE,
    LabelSet,
    Window,
    WindowSample,
    find_entry,
)
from otel_kprofiler.otlp import KERNEL_ENTRY
from otel_kprofiler.sdk.pacing import Pacer


def name_entries(window: Window) -> Window:
    """Returns the window, with the system call or interrupt of each kernel sample as an attribute.

    User-mode samples, and kernel samples without function names, do not receive this attribute.
    """
    labels_of_stacks: dict[int, LabelSet] = {}  # by id(stack); the window keeps stacks alive

    def describe(sample: WindowSample) -> WindowSample:
        labels = labels_of_stacks.get(id(sample.stack))
        if labels is None:
            entry = find_entry(sample.stack)
            labels = () if entry in {USER_MODE, UNKNOWN_ENTRY} else ((KERNEL_ENTRY, entry),)
            labels_of_stacks[id(sample.stack)] = labels
        return sample._replace(labels=(*sample.labels, *labels)) if labels else sample

    return window.change_samples(describe, Pacer())
