"""Which package may import which, and what each is for.

``tests/unit/test_layers.py`` enforces the table, and ``python -m tests.packages`` writes it into
docs/architecture.md.
"""

import sys
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- packages -->\n", "<!-- /packages -->\n"


class Package(NamedTuple):
    """A package or module of the top level.

    Attributes:
        purpose: what it does, for the page.
        imports: packages that it may import, and all that it does import.
    """

    purpose: str
    imports: str = ""


PACKAGES = {
    "version": Package("The version, stated once"),
    "errors": Package("One tree of errors, each with its cause and its fix"),
    "clock": Package("Boot time, Unix time, and the offset between them"),
    "forks": Package("What happens at a fork, in one order"),
    "checked": Package("Checks of numbers and texts that come from files of others"),
    "redact": Package("Strikes secrets out of what is shown"),
    "text": Package("Text that terminals and files can take"),
    "model": Package("Values that all packages share: samples, stacks, windows, accounts"),
    "host": Package(
        "This host: files, capabilities, perf events, checks of `doctor`", "errors model"
    ),
    "bpf": Package("The bpf(2) call, loaders, rings, BTF, the BPF programs", "errors model"),
    "otlp": Package(
        "Windows to OTLP requests and back, and the checker; does no I/O",
        "errors model text version",
    ),
    "export": Package(
        "Bytes to receivers: queue, retry, spool, transport; knows no stacks",
        "errors host model redact version",
    ),
    "config": Package("YAML to validated configuration", "errors export host model redact"),
    "symbols": Package(
        "Kernel addresses to modules, RVAs and names, from immutable snapshots",
        "checked errors host model",
    ),
    "tracking": Package(
        "What changes while we sample: modules, BPF programs, other kernel symbols",
        "bpf clock errors forks host model symbols",
    ),
    "sampling": Package(
        "Loads and attaches the sampler, drains its ring: `RawSample`s",
        "bpf clock errors forks host model",
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
    "delivery": Package("Windows to every exporter's queue, and its account", "export model otlp"),
    "formats": Package(
        "Windows as pages, tables and files of other tools", "errors model otlp text version"
    ),
    "agent": Package(
        "The agent: life cycle, reload, health, limits, own metrics",
        "clock config delivery errors export host model pipeline redact sampling symbols version",
    ),
    "sdk": Package(
        "Embedding in services, in the shapes of opentelemetry-sdk",
        "bpf clock config delivery errors export forks host model otlp pipeline processes sampling"
        " symbols",
    ),
    "cli": Package(
        "Commands, one file each",
        "agent bpf clock config delivery errors export formats host model otlp pipeline recording"
        " redact sampling symbols text tracking version",
    ),
    "__init__": Package("The public names", "sdk version"),
    "__main__": Package("`python -m otel_kprofiler`", "cli"),
}
"""In an order in which each imports only what stands before it."""


def table() -> str:
    """The table as Markdown."""
    rows = ["| Package | Does | Imports |", "|---|---|---|"]
    for name, (purpose, imports) in PACKAGES.items():
        if not name.startswith("__"):
            listed = ", ".join(f"`{one}`" for one in imports.split())
            rows.append(f"| `{name}` | {purpose} | {listed} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    """Write the page if it is not current."""
    text = PAGE.read_text()
    if text != page(text):
        PAGE.write_text(page(text))
        sys.stdout.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
