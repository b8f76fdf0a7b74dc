"""A log line lists the data missing from profiles due to settings or missing capabilities."""

import pytest

from otel_kprofiler.pipeline import OF_OTHERS, describe_left_out, describe_sampling
from otel_kprofiler.sampling import OffCpuConfig, SamplerConfig

PTRACE = "user stacks, names and spans of other users' processes (CAP_SYS_PTRACE missing)"
RESTORE = "user stacks in files that were deleted (CAP_CHECKPOINT_RESTORE missing)"


CAPABILITIES = ("CAP_SYS_PTRACE", "CAP_CHECKPOINT_RESTORE")


@pytest.mark.parametrize(
    ("stacks", "user_symbols", "missing", "expected"),
    [
        ("both", "names", (), ""),
        ("both", "lines", (), ""),
        ("both", "off", (), "; left out: user function names (user_symbols: off)"),
        ("kernel", "names", OF_OTHERS, "; left out: all time in user mode (stacks: kernel)"),
        ("user", "names", (), "; left out: all kernel code (stacks: user)"),
        ("both", "names", CAPABILITIES, f"; left out: {PTRACE}, {RESTORE}"),
    ],
)
def test_each_omission_is_listed_with_its_reason(stacks, user_symbols, missing, expected):
    assert describe_left_out(SamplerConfig(stacks=stacks), user_symbols, missing) == expected


def test_the_summary_states_the_sampling_rates_and_the_recorded_stacks():
    both = SamplerConfig(samples_per_second=19, stacks="both", off_cpu=OffCpuConfig())
    assert describe_sampling(both) == (
        "19 samples per second on each CPU, kernel and user stacks, 20 waits per second on each CPU"
    )
