"""Breaks the package on purpose, one rule at a time, and expects a kernel test to fail.

    python tests/kernels/mutations.py            # all mutations, one boot each
    python tests/kernels/mutations.py --list
    python tests/kernels/mutations.py NAME …

The checkout is never touched: each mutation is applied to a copy of the package, which the guest
then uses instead of the original. Exits with 0 if every mutation was caught.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import MatrixError
from harness.places import cache_dir
from harness.qemu import BOOTS
from harness.results import FAILED, Result, read_junit
from run import BOOT_TIMEOUT_S, CHECKOUT, Session

PACKAGE = CHECKOUT / "otel_kprofiler"


@dataclass(frozen=True)
class Mutation:
    """Replaces the only ``old`` with ``new``, which breaks a rule that ``test`` checks."""

    name: str
    broken: str
    file: str
    old: str
    new: str
    test: str
    kernel: str = "6.12"
    boot: str = "kaslr"


MUTATIONS: dict[str, Mutation] = {
    mutation.name: mutation
    for mutation in (
        Mutation(
            "section-range",
            "a module is [address, address + size)",
            "symbols/kernel/load.py",
            "ranges = ranges_from_sections(module_files.sections, table, limit)",
            'ranges = (AddressRange(base, base + listed.size, ".text"),)',
            "test_every_module_function_matches_the_elf_files",
        ),
        Mutation(
            "clone",
            "symbols of freed init functions replace those of their module",
            "symbols/kernel/kallsyms.py",
            "if name in self._blocks:",
            "if name in ():",
            "test_every_module_function_matches_the_elf_files",
        ),
        Mutation(
            "base",
            "RVAs are relative to the first executable page, not to .text",
            "symbols/kernel/load.py",
            'base = module_files.sections.get(".text") or listed.address',
            'base = module_files.sections.get(".exit.text") or listed.address',
            "test_the_call_chain_in_a_module_is_resolved",
        ),
        Mutation(
            "time",
            "every sample is resolved with the newest symbols",
            "symbols/kernel/symbolizer.py",
            "if time_ns >= view.since_ns:\n                return view.generation",
            "if time_ns >= 0:\n                return view.generation",
            "test_samples_before_and_after_a_module_reload_have_the_correct_names",
        ),
        Mutation(
            "caller",
            "return addresses are not adjusted",
            "symbols/kernel/snapshot.py",
            "addresses = [pc - 1 for pc in pcs]",
            "addresses = list(pcs)",
            "test_the_call_chain_in_a_module_is_resolved",
        ),
        Mutation(
            "hotplug",
            "a CPU that comes back keeps its dead event",
            "host/event_per_cpu.py",
            "for cpu in sorted(online - self._events.keys()):",
            "for cpu in () if self._events else sorted(online):",
            "test_a_cpu_taken_offline_and_brought_back_online_is_sampled_again",
        ),
        Mutation(
            "blink",
            "an event is never found dead",
            "sampling/events.py",
            "return times is not None and times == event.times",
            "return False",
            "test_a_cpu_that_is_briefly_offline_between_checks_is_sampled_again",
        ),
        Mutation(
            "hidden",
            "zero addresses are taken for missing modules",
            "symbols/kernel/snapshot.py",
            "reason = Unresolved.HIDDEN if self.hidden else Unresolved.UNMAPPED",
            "reason = Unresolved.UNMAPPED",
            "test_frames_report_that_their_symbols_are_hidden",
        ),
        Mutation(
            "out-of-line",
            "pages of kprobes are not modules",
            "symbols/kernel/kallsyms.py",
            '("__builtin__ftrace", "__builtin__kprobes")',
            '("__builtin__ftrace",)',
            "test_kprobe_pages_and_trampolines_are_named",
        ),
        Mutation(
            "out-of-line-records",
            "records of trampolines and kprobe pages are ignored",
            "tracking/ksymbol_records.py",
            "{1: ModuleKind.BPF, 2: ModuleKind.OUT_OF_LINE}",
            "{1: ModuleKind.BPF}",
            "test_ftrace_trampolines_are_tracked_through_ksymbol_records",
        ),
        Mutation(
            "uevent-rescan",
            "lost announcements go unnoticed",
            "tracking/module_watch.py",
            "again, self._rescan, self._asked = self._rescan, False, False",
            "again, self._rescan, self._asked = False, False, False",
            "test_module_code_is_resolved_even_if_its_uevent_was_lost",
        ),
    )
}


def mutate(text: str, mutation: Mutation) -> str:
    """Returns the mutated text, or raises MatrixError unless ``old`` occurs exactly once."""
    count = text.count(mutation.old)
    if count != 1:
        raise MatrixError(
            f"{mutation.name}: {mutation.file} has its text {count} times, not once",
            "adapt the mutation to the code",
        )
    return text.replace(mutation.old, mutation.new)


def write_mutant(mutation: Mutation, package: Path, target: Path) -> None:
    """Copies the package to ``target`` with the mutation applied, or raises MatrixError."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(package, target)
    file = target / mutation.file
    file.write_text(mutate(file.read_text(), mutation))
    # Python would reuse a compiled file if the mutated source had the same mtime and size.
    for cached in target.rglob("__pycache__"):
        if cached.parent == file.parent:
            shutil.rmtree(cached)


def is_caught(results: Sequence[Result], test: str) -> bool:
    """Returns whether the named test ran and failed."""
    return any(r.outcome == FAILED and test in r.test for r in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="list the mutations and exit")
    parser.add_argument("--timeout", type=float, default=BOOT_TIMEOUT_S, help="seconds per boot")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the console")
    options = parser.parse_args()
    chosen = [MUTATIONS[name] for name in options.names or MUTATIONS]
    survivors = []
    session = Session(timeout_s=options.timeout, verbose=options.verbose)
    for mutation in chosen:
        if options.list:
            print(f"{mutation.name}: {mutation.broken} ({mutation.test})")
            continue
        overlay = cache_dir() / "mutant" / "otel_kprofiler"
        write_mutant(mutation, PACKAGE, overlay)
        outcome = session.boot(
            session.get_files(mutation.kernel),
            BOOTS[mutation.boot],
            expression=mutation.test,
            overlay=overlay,
        )
        caught = is_caught(read_junit(outcome.junit), mutation.test)
        print(f"{mutation.name}: {'caught' if caught else 'SURVIVED'}, {outcome.seconds:.0f} s")
        if not caught:
            survivors.append(mutation.name)
            print(outcome.reason + "\n" + outcome.console_tail)
        sys.stdout.flush()
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MatrixError as error:
        sys.exit(f"error: {error}\nfix: {error.hint}")
