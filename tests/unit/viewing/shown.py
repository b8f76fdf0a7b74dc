"""Converts the displayed and expected contents of a page to a comparable form."""

import contextlib
import json
from collections import Counter

from otel_kprofiler.formats import process_id, process_name, stack_entries
from otel_kprofiler.text import escape_controls
from otel_kprofiler.viewing.query import StoreAnswers
from tests import page
from tests.windows import timed_values


def answer(store, query, now_ns):
    """Returns a store's data for a query, with all columns as lists."""
    answers = StoreAnswers(store.path, title="x", now_ns=lambda: now_ns)
    with contextlib.closing(answers):
        return page.unpacked(json.loads(b"".join(answers(query))))


def shown(data):
    """Returns the values by stack (outermost first), thread, process, CPU, kind and bin."""
    strings, frames, nodes = data["strings"], data["frames"], data["nodes"]

    def frame(at):
        texts = [strings[frames[name][at]] for name in ("name", "module", "reason")]
        return *texts, frames["inlined"][at]

    def path(node):
        return () if node < 0 else (*path(nodes["parent"][node]), frame(nodes["frame"][node]))

    result, paths, rows = Counter(), {}, set()
    samples, threads, processes = data["samples"], data["threads"], data["processes"]
    names = ("node", "thread", "cpu", "kind", "bin", "count")
    for node, thread, cpu, kind, place, count in zip(*map(samples.get, names), strict=True):
        if node not in paths:
            paths[node] = path(node)
        row = paths[node], thread, cpu, kind, place
        assert row not in rows, "equal samples are one entry"
        rows.add(row)
        process = threads["process"][thread]  # processes on two hosts may have the same name
        named = strings[threads["name"][thread]], threads["tid"][thread]
        owner = strings[processes["name"][process]], processes["pid"][process]
        result[paths[node], named, owner, cpu, data["kinds"][kind]["name"], place] += count
    return result


def expected(windows, data, start_ns=0, end_ns=1 << 64):
    """Computes from windows what ``shown`` must return. Each kind must have a single period."""
    result, bin_ns = Counter(), data["bin_ms"] * 1_000_000
    for profile in (profile for window in windows for profile in window.profiles):
        for resource, sample in profile.samples:
            process = process_name(resource, sample.thread_name)
            entries = [
                (*map(escape_controls, (item.label, item.module, item.reason)), int(item.inlined))
                for item in stack_entries(sample.stack)
            ]
            path = ((escape_controls(process), "", "", 0), *entries, *_causes(sample))
            thread = escape_controls(sample.thread_name), sample.tid
            owner = escape_controls(process), process_id(resource)
            for time, value in timed_values(sample):
                if start_ns <= time < end_ns:
                    place = time // bin_ns - data["start_ms"] // data["bin_ms"]
                    result[path, thread, owner, sample.cpu, profile.kind.name, place] += value
    return result


def _causes(sample):
    return [(f"wait: {sample.wait.cause.label}", "", "", 0)] if sample.wait else []
