"""``otel-kprofiler symbolize --pid``: resolve addresses, names and file offsets in a process."""

from collections.abc import Iterable, Sequence

import click

from otel_kprofiler.cli.symbolize_output import parse_address, print_resolution
from otel_kprofiler.cli.symbolize_words import parse_place
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import (
    KernelResolver,
    ProcessesResolver,
    Resolution,
    Symbolizer,
    SymbolSources,
    find_process,
)


def resolve_in_process(
    pid: int, words: Iterable[str], sources: SymbolSources, *, offsets: bool, as_json: bool
) -> bool:
    """Print the functions at addresses in a process, or the addresses of functions.

    ``words`` are addresses or names, or, if ``offsets`` is set, paths with file offsets
    (``PATH:OFFSET``). With ``as_json``, one JSON object is printed per line. Returns whether every
    word was resolved.
    """
    if find_process(pid, Access()) is None:
        raise HostError(f"there is no process {pid}", hint="list processes with ps or pgrep")
    processes = ProcessesResolver(symbols=sources)
    every = True
    with Symbolizer(kernel=KernelResolver(), user=processes) as symbolizer:
        for word in words:
            if offsets:
                resolutions = processes.find_offset(*_parse_place(word), pid)
            elif (address := parse_address(word)) is not None:
                resolutions = symbolizer.resolve([address], pid)
            else:
                resolutions = symbolizer.find(word, pid)
                if not resolutions and (place := parse_place(word)):
                    starts = [function.address for function in symbolizer.find(place.name, pid)]
                    resolutions = symbolizer.resolve(
                        [start + place.offset for start in starts], pid
                    )
            every = _print(word, resolutions, as_json=as_json) and every
    return every


def _parse_place(word: str) -> tuple[str, int]:
    path, _, number = word.rpartition(":")
    offset = parse_address(number)
    if not path or offset is None:
        raise click.UsageError(f"{word} is not PATH:OFFSET with a hexadecimal offset")
    return path, offset


def _print(word: str, resolutions: Sequence[Resolution], *, as_json: bool) -> bool:
    if not resolutions:
        say(f"{word}: not found in the process", err=True)
    named = [print_resolution(resolution, as_json=as_json) for resolution in resolutions]
    return bool(named) and all(named)
