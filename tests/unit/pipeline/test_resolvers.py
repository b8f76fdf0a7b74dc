"""User-supplied resolvers are combined with the built-in resolvers."""

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.model import (
    KERNEL_SIDE,
    STACK_TRUNCATED,
    USER_SIDE,
    Frame,
    FrameSource,
    Line,
    ProcessKey,
    Side,
    StackEnd,
    Unresolved,
    find_user_addresses,
    pack_user_stack,
)
from otel_kprofiler.pipeline import WindowSchedule, replay
from otel_kprofiler.recording import Recording, RecordingFacts, RecordingWriter
from otel_kprofiler.sampling import SamplerCounts
from tests.records import in_ring, pack_record

OFFSET_NS = 1_790_000_000_000_000_000
LOOP = 0x7F0000001000
RECORDS = [  # time, process id, start of the process
    (100, 7, 1),
    (110, 8, 2),
    (120, 7, 1),
    (130, 7, 90),  # the pid has been reused
]


def ring_record(time_ns, pid, started_ns):
    user = pack_user_stack(
        StackEnd.COMPLETE,
        [(LOOP, None, FrameSource.REGISTERS), (LOOP + 8, None, FrameSource.TABLE)],
    )
    ids = {"start_ns": started_ns, "tgid": pid, "tid": pid}
    frames = (0xFFFFFFFF81000010,)
    return in_ring(pack_record(time_ns, frames, kernel=8, user=len(user), **ids) + user)


@pytest.fixture
def recording(tmp_path):
    (tmp_path / "host/proc").mkdir(parents=True)
    (tmp_path / "host/proc/kallsyms").write_text(
        "ffffffff81000000 T _text\nffffffff81000000 T work\nffffffff81001000 T _etext\n"
    )
    writer = RecordingWriter(str(tmp_path / "a.kprofile"))
    writer.capture(Access(str(tmp_path / "host")))
    writer.add_records(b"".join(ring_record(*each) for each in RECORDS), 200)
    writer.add_resources({ProcessKey(pid, at): {"process.pid": pid} for _, pid, at in RECORDS})
    count = len(RECORDS)
    counts = {"on_cpu": SamplerCounts(count, {}, count, {})}
    writer.finish(RecordingFacts(OFFSET_NS, 1000, 127, 500, counts))
    opened = Recording(str(tmp_path / "a.kprofile"))
    yield opened
    opened.close()


class Names:
    """A resolver that names each function after its process, for samples from a given time on."""

    def __init__(self, known_from_ns=0):
        self.known_from_ns = known_from_ns
        self.resolved = []
        self.closed = False

    def state(self, sample):
        return sample.process, sample.time_ns >= self.known_from_ns

    def resolve(self, raw, state):
        process, known = state
        self.resolved.append((process, known))
        lines = (Line(f"loop of {process.tgid} since {process.start_time_ns}"),) if known else ()
        reason = None if known else Unresolved.NOT_YET_KNOWN
        addresses = find_user_addresses(raw.words)
        frames = [Frame(None, address, lines, 0, USER_SIDE, reason) for address in addresses]
        return Side(USER_SIDE, tuple(frames), STACK_TRUNCATED)

    def finish(self, timeout_s):
        pass

    def advance(self, now_boot_ns):
        return now_boot_ns

    def close(self):
        self.closed = True


def play(recording, **resolvers):
    windows = []
    replay(recording, WindowSchedule(10**10), windows.append, **resolvers).close()
    stacks = {
        time - OFFSET_NS: sample.stack
        for window in windows
        for _, sample in window.samples
        for time in sample.timestamps_unix_ns
    }
    return [stacks[time] for time, _, _ in RECORDS]


def functions(stack):
    return [frame.function for frame in stack.frames]


def test_identical_addresses_are_resolved_separately_in_each_process(recording):
    names = Names()
    first, other, again, reused = play(recording, resolvers={USER_SIDE: names})
    assert functions(first) == ["work", "loop of 7 since 1", "loop of 7 since 1"]
    assert functions(other) == ["work", "loop of 8 since 2", "loop of 8 since 2"]
    assert functions(reused) == ["work", "loop of 7 since 90", "loop of 7 since 90"]
    assert again is first
    assert len(names.resolved) == 3, "equal questions are asked once"
    results = [(side.kind, side.status) for side in first.sides]
    assert results == [(KERNEL_SIDE, 0), (USER_SIDE, STACK_TRUNCATED)]
    assert names.closed


def test_addresses_are_resolved_as_of_the_samples_timestamp(recording):
    before, _, after, _ = play(recording, resolvers={USER_SIDE: Names(known_from_ns=115)})
    assert functions(before) == ["work", "", ""]
    assert before.frames[1].unresolved is Unresolved.NOT_YET_KNOWN
    assert functions(after) == ["work", "loop of 7 since 1", "loop of 7 since 1"]


def test_user_frames_remain_raw_addresses_if_there_is_no_user_resolver(recording):
    first, other, again, reused = play(recording)
    assert first is other is again is reused
    results = [(frame.address, frame.unresolved) for frame in first.frames[1:]]
    assert results == [(LOOP, Unresolved.USER_ADDRESS), (LOOP + 7, Unresolved.USER_ADDRESS)]
