"""Compiles programs with bcc and writes their instructions to standard output.

:mod:`otel_kprofiler.bpf.bcc` runs this file with the Python version for which bcc is installed,
which may be older than the versions that this package supports. The arguments are bcc's package
directory, comma-separated C functions, and compiler flags. The source is read from standard input.
Prints each function as a line of hexadecimal digits.
"""

import importlib.util
import os
import sys
from typing import Any

NO_BCC = 3
"""Exit status when bcc cannot be imported."""


def import_bcc(directory: str) -> Any:
    """Import bcc from its directory without making the other packages there importable."""
    spec = importlib.util.spec_from_file_location(
        "bcc", os.path.join(directory, "__init__.py"), submodule_search_locations=[directory]
    )
    if spec is None or spec.loader is None:
        raise ImportError(directory)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    spec.loader.exec_module(module)
    return module


def main(directory: str, functions: str, *flags: str) -> None:
    """Compile the functions and print their instructions."""
    try:
        bcc = import_bcc(directory)
    except (ImportError, OSError) as error:  # OSError: libbcc.so is missing
        sys.stderr.write(str(error))
        sys.exit(NO_BCC)
    try:
        compiled = bcc.BPF(text=sys.stdin.buffer.read(), cflags=flags)
        codes = [compiled.dump_func(name.encode()) for name in functions.split(",")]
    except Exception as error:  # noqa: BLE001 - bcc's only exception; the compiler printed why
        sys.exit(str(error))
    for code in codes:
        sys.stdout.write(code.hex() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
