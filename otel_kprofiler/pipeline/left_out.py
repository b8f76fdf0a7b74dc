"""States in one line what is sampled, and what is excluded by settings or missing capabilities."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from otel_kprofiler.sampling import SamplerConfig

_BY_CAPABILITY: Final[Mapping[str, str]] = {
    "CAP_SYS_PTRACE": "user stacks, names and spans of other users' processes",
    "CAP_DAC_READ_SEARCH": "user stacks in files that only their owner may read",
    "CAP_CHECKPOINT_RESTORE": "user stacks in files that were deleted",
}
OF_OTHERS: Final = tuple(_BY_CAPABILITY)
"""Capabilities whose absence truncates the user stacks of other users' processes."""


def describe_sampling(config: SamplerConfig) -> str:
    """Describes rates and stacks: ``19 samples per second on each CPU, kernel stacks``."""
    return ", ".join(_describe_kinds(config))


def _describe_kinds(config: SamplerConfig) -> Iterator[str]:
    stacks = {"both": "kernel and user stacks"}.get(config.stacks, f"{config.stacks} stacks")
    if config.on_cpu:
        yield f"{config.samples_per_second} samples per second on each CPU, {stacks}"
    if config.off_cpu:
        rate = config.off_cpu.samples_per_second
        yield f"{rate} waits per second on each CPU" if rate else "times of waits"
    for event in config.events:
        yield str(event)


def describe_left_out(
    config: SamplerConfig, user_symbols: str, missing: Collection[str] = ()
) -> str:
    """Returns missing data and reasons, prefixed by ``; left out:``; empty if nothing is missing.

    ``user_symbols`` is the value of the ``user_symbols`` setting. ``missing`` lists the
    capabilities in :data:`OF_OTHERS` that this process lacks; empty if it samples only its own
    user's processes.
    """
    parts = []
    if config.stacks == "kernel":
        parts.append("all time in user mode (stacks: kernel)")
    else:
        if config.stacks == "user":
            parts.append("all kernel code (stacks: user)")
        if user_symbols == "off":
            parts.append("user function names (user_symbols: off)")
        parts += [f"{_BY_CAPABILITY[name]} ({name} missing)" for name in missing]
    return "; left out: " + ", ".join(parts) if parts else ""
