"""``otel-kprofiler symbolize`` for the running kernel or with files copied from a host."""

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from otel_kprofiler.cli.symbolize_output import parse_address
from otel_kprofiler.cli.symbolize_words import Place, get_fixed_prefix, parse_place
from otel_kprofiler.cli.terminal import FILE_FIX, say
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import Explanation, KernelSymbolizer, Match
from otel_kprofiler.tracking import IteratedKallsyms

_MAX_PROBLEMS: Final = 10
_HOST_PATHS: Final = {
    "modules": "/proc/modules",
    "sys_module": "/sys/module",
    "notes": "/sys/kernel/notes",
    "builtin_ranges": "/lib/modules",
    "kallmodsyms": "/proc/kallmodsyms",
}


def resolve_in_kernel(
    words: Iterable[str],
    kallsyms: str | None,
    copies: Mapping[str, str | None],
    elf: Sequence[str],
    *,
    explain: bool,
    as_json: bool,
) -> bool:
    """Print the symbols at kernel addresses, or the addresses of symbols.

    ``kallsyms`` is a copy of ``/proc/kallsyms``, and ``copies`` are copies of the host's other
    files, keyed by parameter name of :meth:`KernelSymbolizer.from_files`. Without ``kallsyms``, the
    running kernel is used. With ``kallsyms``, function sizes are read from the files in ``elf``.
    ``explain`` adds all names at an address, the section, and the reason for choosing the name.
    Returns whether every name was found; addresses do not affect the result.
    """
    symbolizer = _open(kallsyms, copies, elf)
    if symbolizer.hidden:
        say(f"note: {symbolizer.hidden.value}; see otel-kprofiler doctor", err=True)
    omitted = [_HOST_PATHS[name] for name, path in copies.items() if kallsyms and not path]
    _print_problems(symbolizer, omitted)
    every = True
    for word in words:
        address = parse_address(word)
        if address is not None:
            say(_address_text(symbolizer.explain(address), explain, as_json))
            continue
        texts = [_match_text(match, as_json) for match in _find(symbolizer, word)]
        if not texts and (place := parse_place(word)):
            explanations = map(symbolizer.explain, _find_places(symbolizer, place))
            texts = [_address_text(explanation, explain, as_json) for explanation in explanations]
        for text in texts:
            say(text)
        if not texts:
            say(f"{word}: no such symbol", err=True)
            every = False
    return every


def _find(symbolizer: KernelSymbolizer, name: str) -> Sequence[Match]:
    """Finds symbols by linkage name, displayed name or pattern."""
    prefix = get_fixed_prefix(name)
    if prefix is not None:
        matches = symbolizer.find(prefix, prefix=True)
        return [match for match in matches if fnmatchcase(match.name, name)]
    return symbolizer.find(name) or _find_clones(symbolizer, name)


def _find_clones(symbolizer: KernelSymbolizer, name: str) -> list[Match]:
    """Finds the compiler's variants of a function (``name.isra.0``) that are shown as ``name``."""
    matches = symbolizer.find(f"{name}.", prefix=True)
    return [match for match in matches if symbolizer.explain(match.address).frame.function == name]


def _find_places(symbolizer: KernelSymbolizer, place: Place) -> list[int]:
    """Finds the addresses at an offset in the functions or the module with the given name."""
    name, offset, size = place
    matches = [*symbolizer.find(name), *_find_clones(symbolizer, name)]
    of_size = [match for match in matches if size and match.end - match.address == size]
    within = [match for match in of_size or matches if offset < match.end - match.address]
    if matches and not within:
        most = max(match.end - match.address for match in matches)
        say(f"note: {name} has only {most:#x} bytes", err=True)
    if matches:
        return [match.address + offset for match in within or matches]
    module = symbolizer.module(name)
    return [module.base + offset] if module else []


def _open(
    kallsyms: str | None, copies: Mapping[str, str | None], elf: Sequence[str]
) -> KernelSymbolizer:
    if kallsyms is None:
        return KernelSymbolizer.live(IteratedKallsyms(Access()))
    try:
        for path in (kallsyms, *copies.values(), *elf):
            # The symbolizer would skip an unreadable file, as it does on a live host.
            if path and os.path.exists(path) and not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return KernelSymbolizer.from_files(kallsyms=kallsyms, elf=elf, **copies)
    except OSError as error:
        hint = FILE_FIX
        if isinstance(error, IsADirectoryError):
            hint = "pass the copied file itself; only --sys-module takes a directory"
        raise HostError(f"cannot read {error.filename}: {error.strerror}", hint=hint) from error


def _print_problems(symbolizer: KernelSymbolizer, omitted: list[str]) -> None:
    """Print problems with kernel files, skipping files that the user did not pass."""
    expected = tuple(omitted) + (("/proc/version",) if omitted else ())
    problems = [problem for problem in symbolizer.problems if not problem.startswith(expected)]
    for problem in problems[:_MAX_PROBLEMS]:
        say(f"note: {problem}", err=True)
    if len(problems) > _MAX_PROBLEMS:
        say(f"note: {len(problems) - _MAX_PROBLEMS} more problems were found", err=True)


def _address_text(explanation: Explanation, explain: bool, as_json: bool) -> str:
    frame = explanation.frame
    module = frame.module
    if as_json:
        return json.dumps(_as_dict(explanation))
    place = f"{module.name}+{frame.address:#x}" if module else "unknown"
    name = f"{frame.function}+{frame.offset:#x}" if frame.lines else f"[{explanation.reason}]"
    build_id = f"build-id {module.build_id}" if module and module.build_id else "no build id"
    lines = [f"{explanation.address:#x}  {name}  {place}{_brackets(frame.builtin)}  {build_id}"]
    if explain:
        lines.append(f"  why: {explanation.reason}")
        if explanation.section:
            lines.append(f"  section: {explanation.section}")
        if explanation.names:
            lines.append(f"  names: {' '.join(explanation.names)}")
            lines.append(f"  symbol: {explanation.start:#x} to {explanation.end:#x}")
        lines += [f"  freed init function: {freed.name}" for freed in explanation.freed]
    return "\n".join(lines)


def _as_dict(explanation: Explanation) -> dict[str, Any]:
    frame = explanation.frame
    module = frame.module
    return {
        "address": f"{explanation.address:#x}",
        "module": module and module.name,
        "build_id": module and module.build_id,
        "file_id": module and module.file_id,
        "rva": f"{frame.address:#x}" if module else None,
        "builtin": list(frame.builtin),
        "function": frame.function or None,
        "system_name": (frame.lines[-1].system_name or None) if frame.lines else None,
        "offset": frame.offset,
        "names": list(explanation.names),
        "section": explanation.section or None,
        "unresolved": frame.unresolved.value if frame.unresolved else None,
        "reason": explanation.reason,
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
