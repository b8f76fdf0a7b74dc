"""The purpose of each package, and the packages it may import.

``tests/unit/test_layers.py`` enforces this table, and ``python -m tests.packages`` writes it to
docs/architecture.md.
"""

import sys
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- packages -->\n", "<!-- /packages -->\n"


class Package(NamedTuple):
    """A package or top-level module.

    Attributes:
        purpose: what it does, for the page.
        imports: the packages that it imports, no more and no fewer.
    """

    purpose: str
    imports: str = ""


PACKAGES = {
    "version": Package("The version number"),
    "errors": Package("All errors shown to users, with cause and fix"),
    "clock": Package("Boot time, Unix time, and the offset between them"),
    "forks": Package("Fork hooks, in a defined order"),
    "checked": Package("Type checks for values of untrusted JSON"),
    "redact": Package("Redacts secrets in addresses and messages"),
    "text": Package("Escapes untrusted names for terminals and files"),
    "model": Package("Types that all packages share: samples, stacks, windows, accounts"),
    "host": Package(
        "This host: files, capabilities, perf events, checks of `doctor`", "errors model"
    ),
    "bpf": Package("The bpf(2) call, loaders, rings, BTF, the BPF programs", "errors model"),
    "otlp": Package(
        "Encodes, decodes and checks OTLP profiles; does no I/O",
        "errors model text version",
    ),
    "export": Package(
        "Sends encoded batches to receivers: queue, retry, spool, transports",
        "errors host model redact version",
    ),
    "config": Package(
        "Loads and validates the YAML configuration", "errors export host model redact"
    ),
    "symbols": Package(
        "Resolves kernel addresses to modules, RVAs and names, from immutable snapshots",
        "checked errors host model",
    ),
    "tracking": Package(
        "What changes while we sample: modules, BPF programs, other kernel symbols",
        "bpf clock errors forks host model symbols",
    ),
    "unwinding": Package(
        "Unwind tables of user files: opens and checks them, fills the program's maps",
        "bpf host model symbols tracking",
    ),
    "sampling": Package(
        "Loads and attaches the sampler, drains its ring: `RawSample`s",
        "bpf clock errors forks host model unwinding",
    ),
    "recording": Package(
        "Raw recordings, and what replays them",
        "bpf checked errors host model sampling symbols tracking",
    ),
    "processes": Package(
        "Identity, Resource and published context of a process", "clock host model otlp text"
    ),
    "pipeline": Package(
        "Gate and windows; puts together what samples this host or replays a recording",
        "bpf clock errors host model processes recording sampling symbols text tracking",
    ),
    "delivery": Package(
        "Delivers windows to the exporters' queues and keeps their accounts", "export model otlp"
    ),
    "formats": Package(
        "Output formats: flame graph, tables, files of other tools",
        "errors model otlp text version",
    ),
    "agent": Package(
        "The agent: life cycle, reload, health, limits, own metrics",
        "clock config delivery errors export host model pipeline redact sampling symbols version",
    ),
    "sdk": Package(
        "Embedding in services, with the component names of opentelemetry-sdk",
        "bpf clock config delivery errors export forks host model otlp pipeline processes sampling"
        " symbols",
    ),
    "cli": Package(
        "Commands, one module each",
        "agent bpf clock config delivery errors export formats host model otlp pipeline recording"
        " redact sampling symbols text tracking version",
    ),
    "__init__": Package("The public names", "sdk version"),
    "__main__": Package("`python -m otel_kprofiler`", "cli"),
}
"""Ordered so that each package imports only earlier ones."""


def table() -> str:
    """The table as Markdown."""
    rows = ["| Package | Does | Imports |", "|---|---|---|"]
    for name, (purpose, imports) in PACKAGES.items():
        if not name.startswith("__"):
            listed = ", ".join(f"`{one}`" for one in imports.split())
            rows.append(f"| `{name}` | {purpose} | {listed} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with the current table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    """Write the page if it is out of date."""
    text = PAGE.read_text()
    if text != page(text):
        PAGE.write_text(page(text))
        sys.stdout.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
