"""The counters of each kind combine the BPF programs' counters with the received samples."""

from otel_kprofiler.bpf import ProgramCounts
from otel_kprofiler.host import EventSpec
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    STACK_OK,
    TRUNCATED_STACKS,
    USER_SIDE,
    LossCause,
    RawSample,
)
from otel_kprofiler.sampling import SamplerConfig, SamplerCounts
from otel_kprofiler.sampling.counting import name_counts, start_counts

FAULTS = EventSpec("page-faults", period=1)
CONFIG = SamplerConfig(events=(FAULTS,))
FIRST, SECOND = list(TRUNCATED_STACKS)[:2]
NOTHING = {"idle": 0, "target": 0, "age": 0, "empty": 0}


def sample(kind, status=STACK_OK):
    collected = ((KERNEL_SIDE, STACK_OK), (USER_SIDE, status))
    return RawSample(kind, 1, 5, 0, 1, 1, 1, 1, b"comm", collected, (b"", b""), None)


def test_samples_and_their_truncated_stacks_are_added_to_the_counts_of_their_kind():
    programs = [ProgramCounts(9, 2, 3, 4, 5, 6, 7), ProgramCounts(4, 0, 0, 0, 0, 0, 0)]
    samples = [sample(ON_CPU), sample(ON_CPU, FIRST), sample(FAULTS.kind, SECOND)]
    ends = [TRUNCATED_STACKS[status].name.lower() for status in (FIRST, SECOND)]
    counts = start_counts(CONFIG)
    for times in (1, 2):
        counts = name_counts(CONFIG, programs, [*samples, sample(ON_CPU, FIRST)], counts)
        assert counts == {
            "on_cpu": SamplerCounts(
                9,
                {LossCause.RING_FULL: 2},
                3 * times,
                {"idle": 3, "target": 4, "age": 5, "empty": 6},
                7,
                {ends[0]: 2 * times},
            ),
            "page_faults": SamplerCounts(4, {}, times, NOTHING, 0, {ends[1]: times}),
        }
