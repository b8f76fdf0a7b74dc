"""The programs whose stacks are compared: real programs, and programs built for the test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("programs")
_INTERPRETED = "def f(n):\n return sum(map(f, [n - 1])) + n if n else 0\nwhile True: f(9)"
_SHELL = 'f() { [ "$1" -gt 0 ] && f $(($1 - 1)); }; while :; do f 7; done'
_PERL = (
    'while (1) { %h = map { $_ => "x" x $_ } 1..300; join ",", sort { $h{$a} cmp $h{$b} } keys %h }'
)


class Program(NamedTuple):
    """A program that runs until it is stopped.

    Attributes:
        command: ``{made}`` is replaced with the output file of ``make``, and ``{source}`` with the
            source directory.
        share: the minimum fraction of complete stacks.
    """

    name: str
    needs: Sequence[str]
    command: Sequence[str]
    make: Sequence[str] = ()
    share: float = 0.98


def _compiled(name: str, *flags: str, arguments: Sequence[str] = ()) -> Program:
    sources = ("{source}/walk.cpp", "{source}/rules.S")
    make = ("g++", *flags, *sources, "-o", "{made}", "-lpthread")
    return Program(f"C++ {name}", ("g++",), ("{made}", *arguments), make)


def _go(
    name: str, *options: str, source: str = "work.go", needs: Sequence[str] = ("go", "gcc")
) -> Program:
    make = ("go", "build", *options, "-o", "{made}", f"{{source}}/{source}")
    return Program(name, needs, ("{made}",), make, share=_GO_SHARE)


_ALL = ("signals", "threads")
_GO_SHARE = 0.95
"""The required fraction for Go; lower, because a busy Go runtime often switches stacks."""
PROGRAMS = (
    _compiled("PIE", "-O2", "-fomit-frame-pointer", arguments=_ALL),
    _compiled("fixed", "-O2", "-no-pie", "-fomit-frame-pointer", arguments=_ALL),
    _compiled("static", "-O3", "-static", "-fomit-frame-pointer", arguments=_ALL),
    _compiled("rules", "-O2", "-no-pie", arguments=("rules",)),
    Program("Rust", ("rustc",), ("{made}",), ("rustc", "-O", "{source}/work.rs", "-o", "{made}")),
    _go("Go", needs=("go",)),
    _go("Go PIE", "-buildmode=pie", needs=("go",)),
    _go("Go linked by gcc", "-ldflags=-linkmode=external"),
    _go("Go and C", source="cgo.go"),
    Program("node", ("node",), ("node", "{source}/work.js"), share=0.92),
    Program("python3", ("/usr/bin/python3",), ("/usr/bin/python3", "-c", _INTERPRETED)),
    Program(
        "python3 and libcrypto",
        ("/usr/bin/python3", "openssl"),
        ("/usr/bin/python3", "{source}/tls.py", "{made}"),
        (
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test"),
            *("-keyout", "{made}", "-out", "{made}"),
        ),
    ),
    Program("bash", ("/bin/bash",), ("/bin/bash", "-c", _SHELL)),
    Program("perl", ("/usr/bin/perl",), ("/usr/bin/perl", "-e", _PERL)),
    Program(
        "clang and libLLVM",
        ("clang-14",),
        ("clang-14", "-O2", "-c", "{source}/long.c", "-o", "{made}"),
    ),
    Program("gcc", ("gcc",), ("{cc1}", "-O2", "-quiet", "{source}/long.c", "-o", "{made}")),
)


def find_missing(program: Program) -> str:
    """Returns the reason why a program cannot run on this machine; empty if it can."""
    missing = [need for need in program.needs if shutil.which(need) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def make(program: Program, folder: Path) -> list[str]:
    """Prepares a program's files and returns its command. Raises CalledProcessError on failure."""
    values = {"made": folder / program.name.replace(" ", "-"), "source": FOLDER, "cc1": ""}
    if any("{cc1}" in word for word in program.command):
        values["cc1"] = subprocess.run(
            ["gcc", "-print-prog-name=cc1"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    if program.make:
        words = [word.format(**values) for word in program.make]
        subprocess.run(words, check=True, stderr=subprocess.PIPE)
    # Format only words that begin with a placeholder; inline source code contains other braces.
    return [word.format(**values) if word.startswith("{") else word for word in program.command]
