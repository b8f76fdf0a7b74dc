"""``otel-kprofiler symbolize --elf``: resolve an RVA by file id, as backends do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import click

from otel_kprofiler.cli.terminal import say
from otel_kprofiler.errors import HostError
from otel_kprofiler.symbols import ElfMatch, ElfSymbols


def open_files(paths: Iterable[str]) -> dict[str, ElfSymbols]:
    """Open ELF files; returns them by file id, build id and path."""
    found = {}
    for path in paths:
        try:
            symbols = ElfSymbols(path)
        except OSError as error:
            raise HostError(f"cannot read {path}: {error.strerror}") from error
        for key in (path, symbols.build_id, symbols.file_id):
            if key:
                found[str(key)] = symbols
    return found


def name_rva(files: Mapping[str, ElfSymbols], word: str, *, as_json: bool) -> bool:
    """Print the function at ``RVA`` or ``ID:RVA``, where ID is a file id or build id.

    Returns:
        Whether a function was found.
    """
    key, _, number = word.rpartition(":")
    try:
        rva = int(number, 16)
    except ValueError:
        raise click.UsageError(f"{word} is not a hexadecimal RVA") from None
    different = {id(symbols): symbols for symbols in files.values()}
    if key:
        symbols = files.get(key)
        if symbols is None:
            say(f"{word}: no file has this id", err=True)
            return False
    elif len(different) > 1:
        raise click.UsageError(f"{word} is ambiguous with several files: use FILE_ID:RVA")
    else:
        (symbols,) = different.values()
    match = symbols.find(rva)
    say(_as_json(symbols, rva, match) if as_json else _as_text(symbols, rva, match))
    return match is not None


def _as_text(symbols: ElfSymbols, rva: int, match: ElfMatch | None) -> str:
    place = f"{symbols.name}+{rva:#x}"
    if match is None:
        return f"{place}  [no function]"
    section = f"{match.section}+{match.section_offset:#x}"
    return f"{place}  {match.line.function}+{rva - match.start:#x}  {section}"


def _as_json(symbols: ElfSymbols, rva: int, match: ElfMatch | None) -> str:
    return json.dumps(
        {
            "module": symbols.name,
            "build_id": symbols.build_id,
            "file_id": symbols.file_id,
            "rva": f"{rva:#x}",
            "function": match and match.line.function,
            "system_name": (match and match.line.system_name) or None,
            "offset": match and rva - match.start,
            "names": list(match.names) if match else [],
            "section": match and match.section,
            "section_offset": match and f"{match.section_offset:#x}",
        }
    )
