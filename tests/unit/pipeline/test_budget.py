"""Stacks are reduced only for processes that exceed their budgets."""

import struct

import pytest

from otel_kprofiler.clock import Clock, SystemTime
from otel_kprofiler.model import (
    COARSE,
    KERNEL_SIDE,
    ON_CPU,
    STACK_OK,
    STACK_OVER_BUDGET,
    USER_SIDE,
    RawSample,
    Resource,
    Stack,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window
from otel_kprofiler.pipeline import WindowSchedule
from otel_kprofiler.pipeline.budget import (
    COARSE_LABELS,
    CONTEXT_BYTE_NS,
    GROUP_NS,
    GROUP_SHARE,
    MAX_PROCESSES,
    ROOT_CGROUP_ID,
    SHARE,
    YOUNG_NS,
    ProcessBudgets,
)
from otel_kprofiler.pipeline.windows import WindowBuilder
from otel_kprofiler.symbols import StackResolver

NOISY, GOOD = 10, 20
SECOND_NS = 1_000_000_000
KERNEL = struct.pack("=Q", 0xFFFFFFFF81000000)
SHARED = Resource({"process.executable.name": "shared", COARSE: True})
COLLECTED = ((KERNEL_SIDE, STACK_OK), (USER_SIDE, STACK_OK))


class Time:
    ns = SECOND_NS

    def __call__(self):
        return self.ns


class CostlyStacks:
    """A resolver that takes some time for each new stack."""

    cost_ns = 10_000_000

    def __init__(self, time):
        self.stacks = StackResolver({})
        self.find_all = self.stacks.find_all
        self.time, self.resolved = time, []

    def resolve(self, sample):
        if self.find_all([sample]) == [None]:
            self.resolved.append(sample)
            self.time.ns += self.cost_ns
        return self.stacks.resolve(sample)


class CostlyResources:
    """Fake Resources whose lookup takes ``cost_ns`` for each new program."""

    cost_ns = 10_000_000

    def __init__(self, time):
        self.time, self.known, self.newest = time, {}, {}

    def find(self, sample):
        return self.known.get(sample.process)

    def find_newest(self, sample):
        return self.newest.get(sample.process.process)

    def get_shared(self, sample):
        return SHARED

    def get(self, sample):
        self.time.ns += self.cost_ns
        name = f"exe-{sample.tgid}-{sample.exec_id}"
        result = Resource({"process.pid": sample.tgid, "process.executable.name": name})
        self.known[sample.process] = self.newest[sample.process.process] = result
        return result


def user_stack(number):
    return struct.pack("=BBHHHQ", 0, 0, 1, 1, 0xFFFF, 15 << 56 | number + 1)


def sample(tgid, number=0, exec_id=0, comm=b"thread", *, age_ns=2 * YOUNG_NS, owner=1000):
    return RawSample(
        ON_CPU, 1, 1, 0, tgid, tgid + 1, 1 - age_ns, 0, comm, COLLECTED,
        (KERNEL, user_stack(number)), None, exec_id=exec_id, owner=owner,
    )  # fmt: skip


class Parts:
    def __init__(self):
        self.time = Time()
        self.stacks, self.resources = CostlyStacks(self.time), CostlyResources(self.time)
        self.budgets = ProcessBudgets(self.stacks, self.resources, now_ns=self.time)
        self.windows = WindowBuilder(
            Clock(SystemTime()),
            WindowSchedule(SECOND_NS),
            start_boot_ns=0,
            period_ns=1,
            budgets=self.budgets,
        )

    def add(self, one):
        (stack,), resource = self.budgets.resolve([one])
        self.windows.add([one], [stack], resource)
        return stack, resource

    def close(self):
        """Closes the window, and returns each sample's stack, thread, name, labels and count."""
        (profile,) = self.windows.close(2).profiles
        return {
            group.resource.attributes["process.executable.name"]: [
                (one.stack, one.tid, one.thread_name, one.labels, len(one.timestamps_unix_ns))
                for one in group.samples
            ]
            for group in profile.resources
        }


@pytest.fixture
def parts():
    return Parts()


def statuses(stack):
    return {side.kind: side.status for side in stack.sides}


def test_new_stacks_from_a_noisy_process_are_reduced_to_kernel_frames(parts):
    for number in range(200):
        stack, _ = parts.add(sample(NOISY, number))
    assert statuses(stack) == {KERNEL_SIDE: STACK_OK, USER_SIDE: STACK_OVER_BUDGET}
    assert [len(side.frames) for side in stack.sides] == [1, 0]
    whole = SECOND_NS // CostlyStacks.cost_ns
    assert whole <= len(parts.stacks.resolved) <= 1.2 * whole, "the budget was not used"
    assert parts.budgets.coarse["stack"] == 200 - len(parts.stacks.resolved) + 1
    good, _ = parts.add(sample(GOOD, 1000))
    assert statuses(good) == {KERNEL_SIDE: STACK_OK, USER_SIDE: STACK_OK}


def test_new_stacks_with_cached_frames_are_reduced_too(parts):
    def find_all(samples, *, makes=True):
        parts.time.ns += len(samples) * CostlyStacks.cost_ns * makes
        return [Stack() if makes else None for _ in samples]

    parts.stacks.find_all = find_all
    for number in range(200):
        stack, _ = parts.add(sample(NOISY, number))
    assert statuses(stack)[USER_SIDE] == STACK_OVER_BUDGET
    assert 200 - parts.budgets.coarse["stack"] <= 1.2 * SECOND_NS // CostlyStacks.cost_ns
    assert parts.add(sample(GOOD, 1000))[0].sides == ()


def test_identifying_a_process_is_charged_to_its_budget_but_resolves_no_stacks(parts):
    given, began_ns = sample(GOOD), parts.time.ns
    parts.budgets.identify([given, given])
    assert parts.time.ns - began_ns == parts.resources.cost_ns
    assert not parts.stacks.resolved
    assert parts.add(given)[1].attributes["process.pid"] == GOOD
    parts.budgets.identify(sample(NOISY, exec_id=number) for number in range(1000))
    assert parts.budgets.coarse["resource"]
    assert parts.budgets.coarse["stack"] == 0


def test_pausing_the_host_does_not_exhaust_the_resource_budget(parts):
    parts.resources.cost_ns = 5 * SECOND_NS
    parts.add(sample(GOOD, age_ns=1))
    _, other = parts.add(sample(GOOD + 1, age_ns=1))
    assert other is not SHARED
    assert parts.budgets.coarse["resource"] == 0


def test_known_stacks_of_a_noisy_process_remain_complete(parts):
    first, _ = parts.add(sample(NOISY, 0))
    for number in range(200):
        parts.add(sample(NOISY, number))
    before = parts.budgets.coarse["stack"]
    assert before
    assert parts.add(sample(NOISY, 0))[0] is first
    assert parts.budgets.coarse["stack"] == before


def test_budgets_refill_over_time(parts):
    for number in range(200):
        parts.add(sample(NOISY, number))
    assert parts.budgets.coarse["stack"]
    parts.time.ns += 20 * SECOND_NS
    stack, _ = parts.add(sample(NOISY, 300))
    assert statuses(stack)[USER_SIDE] == STACK_OK


@pytest.mark.system
def test_the_long_term_cost_of_a_process_is_limited_to_its_budget(parts):
    start_ns, spent_ns, number = parts.time.ns, 0, 0
    while parts.time.ns < start_ns + 1000 * SECOND_NS:
        before_ns = parts.time.ns
        parts.add(sample(NOISY, number := number + 1))
        spent_ns += parts.time.ns - before_ns
        parts.time.ns += CostlyStacks.cost_ns
    assert spent_ns <= 1000 * SECOND_NS * SHARE + 2 * SECOND_NS


def test_a_process_that_renames_itself_is_named_after_its_executable(parts):
    count = 2 * SECOND_NS // GROUP_NS
    for number in range(count):
        parts.add(sample(NOISY, comm=b"%d" % number))
    parts.add(sample(GOOD, comm=b"good thread"))
    by_process = parts.close()
    (coarse,) = [one for one in by_process[f"exe-{NOISY}-0"] if one[3]]
    assert coarse[1:4] == (NOISY, f"exe-{NOISY}-0", COARSE_LABELS)
    assert sum(one[4] for one in by_process[f"exe-{NOISY}-0"]) == count, "no sample is lost"
    assert coarse[4] == parts.budgets.coarse["group"] > count // 4
    assert [one[1:] for one in by_process[f"exe-{GOOD}-0"]] == [(GOOD + 1, "good thread", (), 1)]


def test_thread_context_attributes_are_charged_to_the_budget_by_size(parts):
    attributes = b"\1" + bytes([0, 250]) + bytes(250) + bytes([1, 250])
    count = SECOND_NS // GROUP_NS
    for number in range(count):
        context = attributes + b"%250d" % number
        parts.add(sample(NOISY)._replace(context=context))
    most = SECOND_NS // (CONTEXT_BYTE_NS * len(context))
    assert 0.9 * most <= count - parts.budgets.coarse["group"] <= most
    (coarse,) = [samples for samples in parts.close()[f"exe-{NOISY}-0"] if samples[3]]
    assert coarse[3] == COARSE_LABELS


def test_a_process_that_execs_constantly_keeps_the_same_resource(parts):
    for number in range(200):
        _, resource = parts.add(sample(NOISY, exec_id=number))
    assert parts.budgets.coarse["resource"] > 50
    assert resource is parts.add(sample(NOISY, exec_id=500))[1]
    _, good = parts.add(sample(GOOD))
    assert good.attributes["process.executable.name"] == f"exe-{GOOD}-0"


def storm(parts, count=1000, first=1000, age_ns=1):
    """Adds processes, each with a unique program, name and stack. Returns their Resources."""
    return [
        parts.add(sample(tgid, number=tgid, exec_id=tgid, comm=b"%d" % tgid, age_ns=age_ns))[1]
        for tgid in range(first, first + count)
    ]


def test_short_lived_processes_share_a_budget(parts):
    began_ns = parts.time.ns
    resources = storm(parts)
    spent_ns = parts.time.ns - began_ns
    assert spent_ns <= SECOND_NS + GROUP_SHARE * spent_ns + 3 * CostlyStacks.cost_ns
    assert resources[0] is not SHARED
    assert resources[-100:] == [SHARED] * 100
    assert parts.budgets.coarse["resource"] == resources.count(SHARED)
    by_process = parts.close()
    (coarse,) = [samples for samples in by_process["shared"] if samples[3]]
    assert coarse[1:4] == (0, "shared", COARSE_LABELS)
    assert sum(samples[4] for group in by_process.values() for samples in group) == 1000


@pytest.mark.parametrize("other", [{"age_ns": 2 * YOUNG_NS}, {"owner": 1001}], ids=str)
def test_short_lived_processes_do_not_consume_the_budgets_of_other_processes(parts, other):
    if "age_ns" in other:
        parts.add(sample(GOOD))
    storm(parts)
    stack, resource = parts.add(sample(GOOD, 5, comm=b"good thread", **other))
    assert statuses(stack)[USER_SIDE] == STACK_OK
    assert resource is not SHARED
    (good,) = [samples for samples in parts.close()[f"exe-{GOOD}-0"] if samples[2] == "good thread"]
    assert good[3] == ()


def test_long_lived_processes_in_the_root_cgroup_have_separate_budgets(parts):
    for tgid in range(1000, 3000):
        taken = sample(tgid, number=tgid, exec_id=tgid, age_ns=2 * YOUNG_NS)
        assert parts.add(taken._replace(cgroup_id=ROOT_CGROUP_ID))[1] is not SHARED
    assert not parts.budgets.coarse.total()


def test_processes_already_old_at_their_first_sample_share_a_budget(parts):
    assert SHARED in storm(parts, 2000, age_ns=2 * YOUNG_NS)


def test_stacks_are_not_reduced_if_process_budgets_are_disabled():
    parts = Parts()
    parts.budgets = ProcessBudgets(
        parts.stacks, parts.resources, is_limiting=False, now_ns=parts.time
    )
    for number in range(300):
        (stack,), _ = parts.budgets.resolve([sample(NOISY, number)])
        assert parts.budgets.admit(sample(NOISY), Resource({}))
    assert statuses(stack)[USER_SIDE] == STACK_OK
    assert not any(parts.budgets.coarse.values())


def test_the_number_of_remembered_processes_is_bounded(parts):
    for tgid in range(2 * MAX_PROCESSES):
        parts.budgets.admit(sample(tgid, owner=tgid), Resource({}))
    assert len(parts.budgets._shares) == len(parts.budgets._groups) == MAX_PROCESSES


def test_samples_exceeding_the_budget_are_marked_in_the_payload(parts):
    for number in range(200):
        parts.add(sample(NOISY, number))
    (batch,) = encode_window(parts.windows.close(2)).batches
    assert check_payload(batch.payload) == []
    (decoded,) = decode_windows(batch.payload)
    (group,) = decoded.profiles[0].resources
    coarse = [one for one in group.samples if one.labels == COARSE_LABELS]
    assert {len(one.timestamps_unix_ns) for one in coarse} > {1}
    assert STACK_OVER_BUDGET in {statuses(one.stack)[USER_SIDE] for one in coarse}


def test_samples_attributed_to_a_shared_resource_have_no_thread_id_or_name(parts):
    """The budget may recover between looking up a sample's Resource and looking up its group."""
    parts.budgets.resolve([sample(NOISY)])
    while (resolved := parts.budgets.resolve([sample(NOISY, exec_id=1, owner=2000)]))[
        1
    ] is not SHARED:
        parts.resources.known.clear()
        parts.resources.newest.clear()
    parts.time.ns += 10 * SECOND_NS
    taken = sample(NOISY, exec_id=1, owner=2000)
    parts.windows.add([taken], *resolved)
    parts.windows.add([taken._replace(tid=NOISY + 5, comm=b"other")], *resolved)
    assert parts.budgets.coarse["group"] == 2
    ((_, *thread, count),) = parts.close()["shared"]
    assert (thread, count) == ([0, "shared", COARSE_LABELS], 2)
    assert parts.budgets.admit(taken, Resource({"process.pid": NOISY}))
