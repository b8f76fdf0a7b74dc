"""``otel-kprofiler symbolize``: resolve addresses, and find the addresses of symbols."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from otel_kprofiler.cli.symbolize_words import read_words

if TYPE_CHECKING:
    from otel_kprofiler.symbols import SymbolSources


@click.command(name="symbolize")
@click.argument("words", nargs=-1, metavar="ADDR|NAME|- ...")
@click.option(
    "--pid", type=int, help="Resolve addresses in this process, including kernel addresses."
)
@click.option(
    "--elf", "elf_files", multiple=True, metavar="FILE",
    help="Resolve addresses in this file. For vmlinux, .ko files and their debug files, addresses "
    "are RVAs. For other files, addresses are those in the file (SVMAs). With --kallsyms, function "
    "sizes are read from the file. With --payload, names are read from the file. With several "
    "files, write addresses as ID:ADDR, where ID is a build ID, file ID or path.",
)  # fmt: skip
@click.option(
    "--file-offset", "offsets", is_flag=True,
    help="With --elf, addresses are offsets in the file. With --pid, addresses are PATH:OFFSET.",
)  # fmt: skip
@click.option(
    "--payload",
    metavar="FILE",
    help="Symbolize the OTLP profiles in FILE, using files on this host with matching build IDs.",
)
@click.option(
    "-o", "--output", metavar="FILE", help="Output file for --payload, or - for standard output."
)
@click.option("--force", is_flag=True, help="Replace an existing output file.")
@click.option(
    "--lines",
    is_flag=True,
    help="Also show source lines and inlined functions. Needs the dwarf extra.",
)
@click.option(
    "--debug-directory", "directories", multiple=True, metavar="DIR",
    help="Directory to search for debug files. May be repeated. Default: /usr/lib/debug.",
)  # fmt: skip
@click.option(
    "--debuginfod", is_flag=True, help="Fetch debug files from the servers in DEBUGINFOD_URLS."
)
@click.option("--kallsyms", metavar="FILE", help="Use this copy of /proc/kallsyms.")
@click.option("--modules", metavar="FILE", help="With --kallsyms, use this copy of /proc/modules.")
@click.option(
    "--sys-module", metavar="DIR|TAR", help="With --kallsyms, use this copy of /sys/module."
)
@click.option(
    "--notes", metavar="FILE", help="With --kallsyms, use this copy of /sys/kernel/notes."
)
@click.option(
    "--builtin-ranges",
    metavar="FILE",
    help="With --kallsyms, use this copy of modules.builtin.ranges.",
)
@click.option(
    "--kallmodsyms", metavar="FILE", help="With --kallsyms, use this copy of /proc/kallmodsyms."
)
@click.option(
    "--rva", "rvas", multiple=True, metavar="[ID:]ADDR",
    help="With --elf, resolve this address even if it looks like a name.",
)  # fmt: skip
@click.option(
    "--explain",
    is_flag=True,
    help="Also show all names at the address, the section, and why the name was chosen.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(**given: Any) -> None:
    """Resolve hexadecimal addresses, or find the addresses of symbols.

    \b
      otel-kprofiler symbolize ffffffff81234567
      otel-kprofiler symbolize vfs_read+0x10 'ext4_*_read'
      dmesg | grep -A30 'Call Trace' | otel-kprofiler symbolize -
      otel-kprofiler symbolize --pid 1234 7f12a5c98930 malloc
      otel-kprofiler symbolize --elf /usr/bin/node --lines 0x1234
      otel-kprofiler symbolize --elf ext4.ko.xz --rva 0x1234
      otel-kprofiler symbolize --payload profiles.json -o named.json

    Addresses are program counters, so subtract one from a return address. An argument is an address
    if it starts with a digit or has more than eight hexadecimal digits. Kernel symbol names may be
    patterns, and kernel function and module names may have an offset. The command also accepts its
    earlier output on standard input.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    options = Options(**given)
    _check(options)
    sys.exit(0 if _run(options) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments and options of ``symbolize``."""

    words: tuple[str, ...]
    pid: int | None
    elf_files: tuple[str, ...]
    offsets: bool
    payload: str | None
    output: str | None
    force: bool
    lines: bool
    directories: tuple[str, ...]
    debuginfod: bool
    kallsyms: str | None
    modules: str | None
    sys_module: str | None
    notes: str | None
    builtin_ranges: str | None
    kallmodsyms: str | None
    rvas: tuple[str, ...]
    explain: bool
    as_json: bool

    @property
    def copies(self) -> dict[str, str | None]:
        """Returns paths of the copied files, except kallsyms, by parameter of ``from_files``."""
        names = ("modules", "sys_module", "notes", "builtin_ranges", "kallmodsyms")
        return {name: getattr(self, name) for name in names}


def _check(options: Options) -> None:
    in_process, with_copies = options.pid is not None, options.kallsyms is not None
    if not with_copies and any(options.copies.values()):
        raise click.UsageError(
            "--modules, --sys-module and the other options for copied files need --kallsyms"
        )
    if options.rvas and (with_copies or not options.elf_files):
        raise click.UsageError("--rva needs --elf, and cannot be combined with --kallsyms")
    if in_process + with_copies + (options.payload is not None) > 1:
        raise click.UsageError("use only one of --pid, --payload and --kallsyms")
    if in_process and options.elf_files:
        raise click.UsageError("use either --pid or --elf")
    if options.offsets and not (in_process or options.elf_files):
        raise click.UsageError("--file-offset needs --pid or --elf")
    if (options.payload is None) != (options.output is None):
        raise click.UsageError("--payload requires -o, and -o requires --payload")
    has_words = bool(options.words or options.rvas)
    if options.payload is not None and has_words:
        raise click.UsageError("--payload does not accept addresses")
    if options.payload is None and not has_words:
        raise click.UsageError("Missing argument 'ADDR|NAME|- ...'.")


def _run(options: Options) -> bool:
    words, as_json = _words(options.words), options.as_json
    if options.payload is not None and options.output is not None:
        from otel_kprofiler.cli.symbolize_payload import name_payload  # noqa: PLC0415

        return name_payload(
            options.payload, options.output, options.elf_files, _open_sources(options),
            force=options.force, as_json=as_json,
        )  # fmt: skip
    if options.pid is not None:
        from otel_kprofiler.cli.symbolize_process import resolve_in_process  # noqa: PLC0415

        sources = _open_sources(options)
        return resolve_in_process(
            options.pid, words, sources, offsets=options.offsets, as_json=as_json
        )
    if options.elf_files and options.kallsyms is None:
        from otel_kprofiler.cli.symbolize_elf import ElfFiles  # noqa: PLC0415 - imports elftools

        files = ElfFiles(options.elf_files, _open_sources(options), offsets=options.offsets)
        resolved = [files.resolve_rva(word, as_json=as_json) for word in options.rvas]
        resolved += [files.resolve(word, as_json=as_json) for word in words]
        return all(resolved)
    from otel_kprofiler.cli.symbolize_kernel import resolve_in_kernel  # noqa: PLC0415

    return resolve_in_kernel(
        words, options.kallsyms, options.copies, options.elf_files,
        explain=options.explain, as_json=as_json,
    )  # fmt: skip


def _open_sources(options: Options) -> SymbolSources:
    from otel_kprofiler.symbols import DEBUG_DIRECTORIES, SymbolSources, find_servers  # noqa: PLC0415

    servers = find_servers(os.environ) if options.debuginfod else ()
    if options.debuginfod and not servers:
        raise click.UsageError("--debuginfod needs server URLs in DEBUGINFOD_URLS")
    directories = options.directories or DEBUG_DIRECTORIES
    return SymbolSources.open(lines=options.lines, servers=servers, directories=directories)


def _words(words: tuple[str, ...]) -> Iterator[str]:
    for word in words:
        if word == "-":
            yield from read_words(sys.stdin)
        else:
            yield word
