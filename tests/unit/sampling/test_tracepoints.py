"""Tracepoint plans list the tracepoints that the kernel has and the locations of their values."""

import mmap
import re
import struct

import pytest

from otel_kprofiler.bpf import KernelTypes
from otel_kprofiler.errors import HostError, KernelFeatureError
from otel_kprofiler.host import Access, parse_event
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.sampling.tracepoints import plan_tracepoints
from tests.bpf_object import Btf


@pytest.fixture
def host(tmp_path):
    """Creates a host with a module. ``block_rq_issue`` passes the queue first, as in Linux 5.10."""
    made, module = Btf(), Btf()
    order = made.add("unsigned int", 1, 4, tail=bytes(4))
    queue = made.add("", 2, made.add("request_queue", 4, 8))
    tail = struct.pack("=III", made.name("__data_len"), order, 8 * 52)
    made.tracepoint("block_rq_issue", queue, made.add("", 2, made.add("request", 4, 64, 1, tail)))
    made.tracepoint("mm_page_alloc", queue, order)
    made.tracepoint("kfree_skb", queue)
    module.tracepoint("of_module")
    directory = tmp_path / "sys/kernel/btf"
    directory.mkdir(parents=True)
    (directory / "vmlinux").write_bytes(made.pack())
    (directory / "module").write_bytes(module.pack())
    return Access(str(tmp_path))


def plan(host, *texts):
    config = SamplerConfig(events=tuple(parse_event(text, 99) for text in texts))
    types = KernelTypes(host.read_bytes("/sys/kernel/btf/vmlinux"))
    return plan_tracepoints(config, lambda: types, host)


def test_tracepoint_values_are_located_by_type_in_this_kernel(host):
    block, page, module = plan(host, "block_rq_issue", "faults", "mm_page_alloc", "of_module")
    assert (block.number, *block.value) == (1, 1, 52, False, 1)
    assert (page.number, *page.value) == (3, 1, None, True, mmap.PAGESIZE)
    assert (module.number, *module.value) == (4, 255, None, False, 1)


def test_events_other_than_tracepoints_are_not_planned_as_tracepoints(host):
    assert plan(host, "faults") == []


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("block_rq_isue", "block_rq_issue"),
        ("kmem_mm_page_alloc", "mm_page_alloc"),
        ("of_modul", "of_module"),
        ("pagefaults", "page-faults"),
    ],
)
def test_the_error_for_an_unknown_tracepoint_suggests_similar_names(host, text, near):
    with pytest.raises(HostError, match=f"no event or tracepoint is named {text}") as e:
        plan(host, text)
    assert e.value.hint.startswith(f"similar names: {near}")


def test_a_value_with_an_unknown_layout_is_an_error(host):
    with pytest.raises(
        KernelFeatureError, match=re.escape("the value of kfree_skb events cannot be located")
    ):
        plan(host, "kfree_skb")


def test_tracepoints_collect_the_same_stacks_as_the_cpu_clock(host):
    (block,) = plan(host, "block_rq_issue")
    for program, by, python in (
        ("kprofiler_sample", 0, 0),
        ("kprofiler_unwind_python", 1, 1),
        ("kprofiler_unwind_5_10", 2, 0),
    ):
        assert struct.unpack("=10Q", block.pack(program))[:4] == (1, 1, by, python)
