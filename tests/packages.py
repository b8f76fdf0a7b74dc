"""The purpose of each package, and the packages it may import.

``tests/unit/test_layers.py`` enforces this table. ``python -m tests.packages`` writes it to
docs/architecture.md, and generates docs/modules.md, docs/man and the Helm chart's schema.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests import chart, man

SOURCES = Path(__file__).parents[1] / "otel_kprofiler"
PAGE = SOURCES.parent / "docs" / "architecture.md"
MODULES = PAGE.with_name("modules.md")
HEAD = """# Modules

`make generated` generates this list from the first sentence of each file's documentation. Paths are
relative to `otel_kprofiler/`. [Architecture](architecture.md) shows how the packages work together.
"""
BEGIN, END = "<!-- packages -->\n", "<!-- /packages -->\n"


class Package(NamedTuple):
    """A package or top-level module, with exactly the packages that it imports."""

    purpose: str
    imports: str = ""


PACKAGES = {
    "version": Package("The version number"),
    "errors": Package("All errors shown to users, with cause and fix"),
    "clock": Package("Converts boottime to Unix time, and tracks their offset"),
    "workers": Package("uWSGI workers, which are forked by C code"),
    "forks": Package("Runs fork hooks in a defined order", "workers"),
    "stopping": Package("A shared deadline for threads that are stopped together"),
    "checked": Package("Type checks for values in untrusted JSON"),
    "abortable": Package("HTTP connections that another thread can abort", "forks"),
    "repeats": Package("Limits warnings that repeat"),
    "serving": Package("HTTP servers with connection limits", "errors repeats"),
    "late": Package("Imports the public names of a package on first use"),
    "redact": Package("Redacts secrets in URLs and messages"),
    "reading": Package("Reads files and streams up to a size limit"),
    "text": Package("Text for terminals and files: escapes untrusted names, and formats counts"),
    "model": Package("Types shared by all packages: samples, stacks, windows, sample counts"),
    "speedups": Package("Inner loops, in C and in Python"),
    "elf": Package("ELF files: headers, sections, notes, identity", "errors model"),
    "host": Package(
        "Inspects this host: files, capabilities, perf events, `doctor` checks", "errors model text"
    ),
    "bpf": Package(
        "bpf(2), BPF loaders and programs, ring buffers, BTF", "errors forks model speedups text"
    ),
    "otlp": Package(
        "Encodes, decodes and checks OTLP profiles; performs no I/O",
        "errors late model reading speedups text version",
    ),
    "export": Package(
        "Sends encoded batches to receivers: queue, retry, request sizes, spool, transports",
        "abortable errors forks host late model otlp redact text version",
    ),
    "config": Package(
        "Loads and validates the YAML configuration", "errors export host late model redact text"
    ),
    "symbols": Package(
        "Resolves kernel and user addresses to modules, file addresses, functions and lines",
        "abortable checked clock elf errors forks host late model reading redact speedups stopping "
        "version",
    ),
    "perf_data": Package(
        "Reads `perf.data` files, and resolves addresses in files that this host also has",
        "errors model symbols text",
    ),
    "tracking": Package(
        "Tracks code loaded during sampling: modules, BPF programs, other kernel symbols",
        "bpf clock errors forks host model symbols text",
    ),
    "interpreters": Package(
        "Locates CPython in files and processes, and verifies where CPython stores its frames",
        "bpf elf errors host model stopping tracking",
    ),
    "unwinding": Package(
        "Loads and verifies the unwind tables of binaries, and fills the BPF program's maps",
        "bpf elf forks host model speedups stopping",
    ),
    "sampling": Package(
        "Loads and attaches the sampler, and drains its ring into `RawSample`s",
        "bpf clock elf errors forks host model text unwinding",
    ),
    "recording": Package(
        "Writes and replays raw recordings",
        "bpf checked errors host model sampling symbols tracking",
    ),
    "processes": Package(
        "Identity, Resource and published contexts of a process and its threads",
        "bpf clock elf host model otlp text",
    ),
    "pipeline": Package(
        "Groups samples into windows; builds pipelines that sample this host or replay a recording",
        "bpf clock config errors host interpreters late model processes recording sampling "
        "speedups stopping symbols text tracking",
    ),
    "delivery": Package(
        "Delivers windows to export queues, and counts the samples each exporter sent and lost",
        "export model otlp",
    ),
    "formats": Package(
        "Output formats: flame graph, tables, files for other tools",
        "errors model otlp text version",
    ),
    "analysis": Package(
        "Stores samples of saved profiles in columns, and filters and groups these samples",
        "errors formats model otlp text",
    ),
    "clickhouse": Package(
        "Queries profiles in ClickHouse, and builds samples from the rows",
        "analysis errors formats model otlp redact",
    ),
    "viewing": Package(
        "The local web page of `view`: its server and its data",
        "errors formats late model otlp serving text",
    ),
    "agent": Package(
        "The agent: life cycle, reload, health, limits, metrics",
        "clock config delivery errors export host late model otlp pipeline processes "
        "repeats sampling serving stopping symbols text version",
    ),
    "thread_record": Package("The C library that publishes the current span of each thread"),
    "sdk": Package(
        "Embeds the profiler in services, with component names as in opentelemetry-sdk",
        "bpf clock config delivery errors export forks host late model otlp pipeline processes "
        "sampling symbols thread_record workers",
    ),
    "cli": Package(
        "Commands, one module each",
        "agent analysis bpf clickhouse clock config delivery elf errors export formats host "
        "interpreters model otlp perf_data pipeline recording redact sampling serving speedups "
        "symbols text tracking version viewing",
    ),
    "thread_context": Package("Publishes the current spans of a service, without sampling", "sdk"),
    "__init__": Package("The public names", "sdk version"),
    "__main__": Package("`python -m otel_kprofiler`", "cli"),
}
"""All packages, ordered so that each package imports only earlier packages."""


def table() -> str:
    rows = ["| Package | Purpose | Imports |", "|---|---|---|"]
    for name, (purpose, imports) in PACKAGES.items():
        if not name.startswith("__"):
            listed = ", ".join(f"`{one}`" for one in imports.split())
            rows.append(f"| `{name}` | {purpose} | {listed} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def modules() -> str:
    """Returns the page that lists all modules and BPF sources with their first sentences."""
    parts = [HEAD, *section(sorted(SOURCES.glob("[a-z]*.py")))]
    for name, (purpose, _) in PACKAGES.items():
        folder = SOURCES / name
        if folder.is_dir():
            files = [*sorted(folder.rglob("*.py")), *sorted(folder.rglob("*.[ch]"))]
            files = [file for file in files if "stubs" not in file.parts]
            parts += [f"\n## {name}\n\n{purpose}.\n", *section(files)]
    return "".join(parts)


def section(files: Iterable[Path]) -> Iterator[str]:
    yield "\n| File | Does |\n|---|---|\n"
    for file in files:
        if file.name != "__init__.py":
            yield f"| `{file.relative_to(SOURCES)}` | {first_line(file)} |\n"


def first_line(file: Path) -> str:
    text = file.read_text()
    if file.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = text.partition("/*")[2].partition("*/")[0]
        words = "\n".join(line.strip(" *") for line in comment.strip().splitlines())
    sentence = " ".join(words.partition("\n\n")[0].split())
    sentence = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", sentence).replace("``", "`")
    return sentence.partition(". ")[0].rstrip(".:").replace("|", "\\|")


def main() -> None:
    for path, text in ((PAGE, page(PAGE.read_text())), (MODULES, modules())):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path}\n")
    man.main()
    chart.main()


if __name__ == "__main__":
    main()
