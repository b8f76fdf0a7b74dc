"""``otel-kprofiler symbolize``: resolve addresses, and find the addresses of symbols."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click

from otel_kprofiler.cli.terminal import say
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import Explanation, Match, Symbolizer
from otel_kprofiler.tracking import IteratedKallsyms

_MAX_PROBLEMS: Final = 10
_HOST_PATHS: Final = {
    "modules": "/proc/modules",
    "sys_module": "/sys/module",
    "notes": "/sys/kernel/notes",
    "builtin_ranges": "/lib/modules",
    "kallmodsyms": "/proc/kallmodsyms",
}


@click.command(name="symbolize")
@click.argument("words", nargs=-1, metavar="ADDR|NAME|- ...")
@click.option("--kallsyms", metavar="FILE", help="Use this copy of /proc/kallsyms.")
@click.option("--modules", metavar="FILE", help="With --kallsyms: a copy of /proc/modules.")
@click.option("--sys-module", metavar="DIR|TAR", help="With --kallsyms: a copy of /sys/module.")
@click.option("--notes", metavar="FILE", help="With --kallsyms: a copy of /sys/kernel/notes.")
@click.option(
    "--builtin-ranges", metavar="FILE", help="With --kallsyms: a copy of modules.builtin.ranges."
)
@click.option("--kallmodsyms", metavar="FILE", help="With --kallsyms: a copy of /proc/kallmodsyms.")
@click.option(
    "--elf",
    "elf_files",
    multiple=True,
    metavar="FILE",
    help="Resolve relative addresses in this vmlinux, .ko or debug file; with --kallsyms, read"
    " sizes of functions from it. Repeatable.",
)
@click.option(
    "--rva",
    "rvas",
    multiple=True,
    metavar="[ID:]ADDR",
    help="With --elf: relative address; with several files, prefixed by file id or build id.",
)
@click.option("--explain", is_flag=True, help="Show every name at the address, and the reason.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(
    *,
    words: tuple[str, ...],
    kallsyms: str | None,
    modules: str | None,
    sys_module: str | None,
    notes: str | None,
    builtin_ranges: str | None,
    kallmodsyms: str | None,
    elf_files: tuple[str, ...],
    rvas: tuple[str, ...],
    explain: bool,
    as_json: bool,
) -> None:
    """Resolve hexadecimal kernel addresses, or find the addresses of a symbol.

    \b
      otel-kprofiler symbolize ffffffff81234567
      otel-kprofiler symbolize vfs_read
      cat addresses | otel-kprofiler symbolize -
      otel-kprofiler symbolize --elf ext4.ko.xz --rva 0x1234 0x5678

    Addresses are program counters: subtract one from a return address.
    """  # noqa: D301 - \b tells click not to wrap the paragraph
    copies = {
        "modules": modules,
        "sys_module": sys_module,
        "notes": notes,
        "builtin_ranges": builtin_ranges,
        "kallmodsyms": kallmodsyms,
    }
    if kallsyms is None and any(copies.values()):
        raise click.UsageError("copies of other files need --kallsyms")
    if rvas and (kallsyms or not elf_files):
        raise click.UsageError("--rva needs --elf, and cannot be combined with --kallsyms")
    if not words and not rvas:
        raise click.UsageError("Missing argument 'ADDR|NAME|- ...'.")
    if elf_files and not kallsyms:
        from otel_kprofiler.cli.symbolize_elf import (  # noqa: PLC0415 - imports elftools
            name_rva,
            open_files,
        )

        files = open_files(elf_files)
        every = [name_rva(files, word, as_json=as_json) for word in (*rvas, *_words(words))]
        sys.exit(0 if all(every) else 1)
    symbolizer = _open(kallsyms, {**copies, "elf": elf_files})
    if symbolizer.hidden:
        say(f"note: {symbolizer.hidden.value}; see otel-kprofiler doctor", err=True)
    omitted = [_HOST_PATHS[name] for name, path in copies.items() if kallsyms and not path]
    _print_problems(symbolizer, omitted)
    found = True
    for word in _words(words):
        address = _parse_address(word)
        if address is None:
            matches = symbolizer.find(word)
            found = found and bool(matches)
            for match in matches:
                say(_match_text(match, as_json))
            if not matches:
                say(f"{word}: no such symbol", err=True)
        else:
            say(_address_text(symbolizer.explain(address), explain, as_json))
    sys.exit(0 if found else 1)


def _open(kallsyms: str | None, copies: Mapping[str, Any]) -> Symbolizer:
    if kallsyms is None:
        return Symbolizer.live(IteratedKallsyms(Access()))
    try:
        return Symbolizer.from_files(kallsyms=kallsyms, **copies)
    except OSError as error:
        raise HostError(f"cannot read {error.filename}: {error.strerror}") from error


def _print_problems(symbolizer: Symbolizer, omitted: list[str]) -> None:
    """Print problems with the files, except those that were not given."""
    expected = tuple(omitted) + (("/proc/version",) if omitted else ())
    problems = [problem for problem in symbolizer.problems if not problem.startswith(expected)]
    for problem in problems[:_MAX_PROBLEMS]:
        say(f"note: {problem}", err=True)
    if len(problems) > _MAX_PROBLEMS:
        say(f"note: and {len(problems) - _MAX_PROBLEMS} more problems", err=True)


def _words(words: tuple[str, ...]) -> Iterator[str]:
    for word in words:
        if word == "-":
            for line in sys.stdin:
                yield from line.split()
        else:
            yield word


def _parse_address(word: str) -> int | None:
    try:
        address = int(word, 16)
    except ValueError:
        return None
    # Names such as "add" or "face" are hexadecimal too; no kernel address is that short.
    return address if word.lower().startswith("0x") or len(word) > 8 else None


def _address_text(known: Explanation, explain: bool, as_json: bool) -> str:
    frame = known.frame
    module = frame.module
    if as_json:
        return json.dumps(_as_dict(known))
    place = f"{module.name}+{frame.address:#x}" if module else "unknown"
    name = f"{frame.function}+{frame.offset:#x}" if frame.lines else f"[{known.reason}]"
    build_id = f"build-id {module.build_id}" if module and module.build_id else "no build id"
    lines = [f"{known.address:#x}  {name}  {place}{_brackets(frame.builtin)}  {build_id}"]
    if explain:
        lines.append(f"  why: {known.reason}")
        if known.section:
            lines.append(f"  section: {known.section}")
        if known.names:
            lines.append(f"  names: {' '.join(known.names)}")
            lines.append(f"  symbol: {known.start:#x} to {known.end:#x}")
        lines += [f"  freed init function: {freed.name}" for freed in known.freed]
    return "\n".join(lines)


def _as_dict(known: Explanation) -> dict[str, Any]:
    frame = known.frame
    module = frame.module
    return {
        "address": f"{known.address:#x}",
        "module": module and module.name,
        "build_id": module and module.build_id,
        "file_id": module and module.file_id,
        "rva": f"{frame.address:#x}" if module else None,
        "builtin": list(frame.builtin),
        "function": frame.function or None,
        "system_name": (frame.lines[-1].system_name or None) if frame.lines else None,
        "offset": frame.offset,
        "names": list(known.names),
        "section": known.section or None,
        "unresolved": frame.unresolved.value if frame.unresolved else None,
        "reason": known.reason,
    }


def _match_text(match: Match, as_json: bool) -> str:
    module = match.module.name if match.module else None
    if as_json:
        return json.dumps(
            {
                "name": match.name,
                "address": f"{match.address:#x}",
                "module": module,
                "rva": f"{match.rva:#x}" if module else None,
                "builtin": list(match.builtin),
            }
        )
    place = f"{module}+{match.rva:#x}" if module else "no module"
    return f"{match.address:#x}  {match.name}  {place}{_brackets(match.builtin)}"


def _brackets(modules: Sequence[str]) -> str:
    return "".join(f" [{name}]" for name in modules)
