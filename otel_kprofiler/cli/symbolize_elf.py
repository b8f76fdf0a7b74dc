"""``otel-kprofiler symbolize --elf``: resolve RVAs in kernel files and SVMAs in other files."""

import json
from collections.abc import Iterable, Iterator
from typing import Protocol

import click

from otel_kprofiler.cli.symbolize_output import parse_address, print_resolution
from otel_kprofiler.cli.symbolize_words import parse_place
from otel_kprofiler.cli.terminal import FILE_FIX, say
from otel_kprofiler.elf import ElfError
from otel_kprofiler.errors import HostError, KProfilerError
from otel_kprofiler.symbols import ElfMatch, ElfResolver, ElfSymbols, SymbolSources, is_kernel_file


class _File(Protocol):
    def keys(self) -> Iterator[str | None]:
        """Yields the file's identifiers: build id and file id."""

    def show(self, number: int, *, as_json: bool) -> bool:
        """Print the function at an address. Return False if no function contains the address."""

    def find_starts(self, name: str) -> Iterator[int]:
        """Yields the addresses denoted by ``name`` in an expression such as ``name+0x10``."""

    def find(self, name: str, *, as_json: bool) -> bool:
        """Print the functions called ``name``, with addresses.

        Return False if no function matches.
        """


class ElfFiles:
    """The files in which addresses are resolved, each identified by path, build id or file id.

    If ``offsets`` is true, addresses in user-space binaries are file offsets. Raises ``HostError``
    if a file cannot be read, ``KProfilerError`` if it is malformed, and ``click.UsageError`` for
    file offsets in a kernel file.
    """

    def __init__(self, paths: Iterable[str], sources: SymbolSources, *, offsets: bool) -> None:
        self._files: dict[str, _File] = {}
        for path in paths:
            try:
                file = _open(path, sources, offsets=offsets)
            except OSError as error:
                raise HostError(f"cannot read {path}: {error.strerror}", hint=FILE_FIX) from error
            except ElfError as error:
                raise KProfilerError(
                    f"cannot read {path}: {error}", hint=error.hint or FILE_FIX
                ) from error
            for key in (path, *file.keys()):
                if key:
                    self._files[key] = file

    def resolve(self, word: str, *, as_json: bool) -> bool:
        """Resolve and print ``[ID:]ADDR`` or a function's name. Return False on failure."""
        key, _, number = word.rpartition(":")
        address = parse_address(number)
        if address is not None:
            return self.resolve_address(key, address, as_json=as_json)
        resolved = [file.find(word, as_json=as_json) for file in self._different()]
        if not any(resolved) and (place := parse_place(word)):
            resolved = [
                file.show(start + place.offset, as_json=as_json)
                for file in self._different()
                for start in file.find_starts(place.name)
            ]
        if not any(resolved):
            say(f"{word}: no such symbol", err=True)
        return any(resolved)

    def resolve_rva(self, word: str, *, as_json: bool) -> bool:
        """Print the function at ``ADDR`` or ``ID:ADDR``, hexadecimal with or without ``0x``."""
        key, _, number = word.rpartition(":")
        try:
            address = int(number, 16)
        except ValueError:
            raise click.UsageError(f"{word} is not a hexadecimal RVA") from None
        return self.resolve_address(key, address, as_json=as_json)

    def resolve_address(self, key: str, address: int, *, as_json: bool) -> bool:
        """Print the function at an address in the only file, or in the file with the id ``key``."""
        files = self._different()
        if key:
            if key not in self._files:
                say(f"{key}:{address:x}: no file has this id", err=True)
                return False
            return self._files[key].show(address, as_json=as_json)
        if len(files) > 1:
            raise click.UsageError(f"{address:x} is ambiguous with several files: use FILE_ID:ADDR")
        return files[0].show(address, as_json=as_json)

    def _different(self) -> list[_File]:
        return list({id(file): file for file in self._files.values()}.values())


def _open(path: str, sources: SymbolSources, *, offsets: bool) -> _File:
    if not is_kernel_file(path):
        return _UserFile(ElfResolver(path, symbols=sources), offsets=offsets)
    if offsets:
        raise click.UsageError(f"--file-offset does not apply to the kernel file {path}: use --rva")
    return _KernelFile(ElfSymbols(path))


class _UserFile:
    def __init__(self, file: ElfResolver, *, offsets: bool) -> None:
        self._file = file
        self._has_offsets = offsets
        self._resolve = file.resolve_offsets if offsets else file.resolve

    def keys(self) -> Iterator[str | None]:
        yield from (self._file.build_id, self._file.file_id)

    def show(self, number: int, *, as_json: bool) -> bool:
        (answer,) = self._resolve([number])
        return print_resolution(answer, as_json=as_json)

    def find_starts(self, name: str) -> Iterator[int]:
        yield from (
            () if self._has_offsets else (function.address for function in self._file.find(name))
        )

    def find(self, name: str, *, as_json: bool) -> bool:
        printed = [
            print_resolution(resolution, as_json=as_json) for resolution in self._file.find(name)
        ]
        return any(printed)


class _KernelFile:
    def __init__(self, symbols: ElfSymbols) -> None:
        self._symbols = symbols

    def keys(self) -> Iterator[str | None]:
        yield from (self._symbols.build_id, self._symbols.file_id)

    def show(self, number: int, *, as_json: bool) -> bool:
        match = self._symbols.find(number)
        say(_as_json(self._symbols, number, match) if as_json else self._text(number, match))
        return match is not None

    def find_starts(self, name: str) -> Iterator[int]:
        """Yields the addresses of functions named ``name``, or 0 if the file has this name."""
        yield from [0] if name == self._symbols.name else self._find_functions(name)

    def find(self, name: str, *, as_json: bool) -> bool:
        printed = [self.show(rva, as_json=as_json) for rva in self._find_functions(name)]
        return any(printed)

    def _find_functions(self, name: str) -> Iterable[int]:
        wanted = name.encode("utf-8", "surrogateescape")
        return {symbol.rva: None for symbol in self._symbols.symbols if symbol.name == wanted}

    def _text(self, rva: int, match: ElfMatch | None) -> str:
        place = f"{self._symbols.name}+{rva:#x}"
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
