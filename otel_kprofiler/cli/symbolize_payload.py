"""``otel-kprofiler symbolize --payload``: add names from this host's files to OTLP profiles."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from otel_kprofiler.cli.output import Output
from otel_kprofiler.cli.terminal import FILE_FIX, describe_count, say
from otel_kprofiler.errors import HostError
from otel_kprofiler.model import Line
from otel_kprofiler.otlp import Nameless, NamelessFile, Naming, name_locations, read_file
from otel_kprofiler.symbols import FileIdentity, InstalledFiles, InstalledKernel, SymbolSources

_MAX_FILES_TOLD: Final = 10


def name_payload(
    path: str,
    output: str,
    elf_files: Sequence[str],
    sources: SymbolSources,
    *,
    force: bool,
    as_json: bool,
) -> bool:
    """Write OTLP profiles with names added to unnamed native and kernel frames.

    The output has the same encoding as the input; the path ``-`` is standard output. ``elf_files``
    are files that may contain the frames' code. Files are matched by id, not by name. If
    ``as_json``, counts are printed as JSON. Returns True if any name was added, or if no name was
    missing. Raises ``HostError`` or ``PayloadError`` if the input cannot be read, and
    ``ExportError`` if the output cannot be written.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}", hint=FILE_FIX) from error
    names = _Names(InstalledFiles(sources, elf_files), InstalledKernel(elf_files))
    with Output(output, "otlp", force=force) as target:
        naming = name_locations(data, names.find)
        target.write_content(naming.data, private=False)
    _report(naming, names.missing, as_json=as_json)
    return naming.named > 0 or naming.nameless == 0


class _Names:
    def __init__(self, files: InstalledFiles, kernel: InstalledKernel) -> None:
        self._files = files
        self._kernel = kernel
        self.missing: Counter[NamelessFile] = Counter()

    def find(self, wanted: Sequence[Nameless]) -> Mapping[int, Sequence[Line]]:
        lines_by_location: dict[int, Sequence[Line]] = {}
        for nameless in wanted:
            lines = self._lines(nameless)
            if lines:
                lines_by_location[nameless.location] = lines
            else:
                self.missing[nameless.file] += 1
        return lines_by_location

    def _lines(self, nameless: Nameless) -> Sequence[Line]:
        name, build_id, file_id, is_kernel = nameless.file
        if is_kernel:
            return self._kernel.lines(name, build_id, nameless.address)
        frame = self._files.frame(
            FileIdentity(name, build_id, file_id), nameless.address, nameless.file_offset
        )
        return frame.lines if frame else ()


def _report(naming: Naming, missing: Counter[NamelessFile], *, as_json: bool) -> None:
    if as_json:
        files = [
            {
                "file": file.name,
                "build_id": file.build_id,
                "file_id": file.file_id,
                "nameless": count,
            }
            for file, count in missing.most_common()
        ]
        counts = {"nameless": naming.nameless, "named": naming.named, "missing": files}
        say(json.dumps(counts), err=True)
        return
    say(f"named {naming.named:,} of {describe_count(naming.nameless, 'location')}", err=True)
    for file, count in missing.most_common(_MAX_FILES_TOLD):
        identity = f"build-id {file.build_id}" if file.build_id else f"file id {file.file_id}"
        say(f"  {count} without a name in {file.name}  {identity}", err=True)
