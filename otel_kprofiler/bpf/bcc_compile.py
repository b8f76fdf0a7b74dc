"""Compiles programs with bcc and writes their instructions to the standard output.

Run by :mod:`otel_kprofiler.bpf.bcc` as a process of the Python that bcc is installed for, which
may be older than ours. Arguments: the directory of bcc's package, the C functions with commas
between them, flags for the compiler. The source comes on standard input; the output has a line of
hexadecimal digits for each function; the compiler's messages go to standard error.
"""

import importlib.util
import os
import sys
from typing import Any

NO_BCC = 3
"""Exit status when bcc cannot be imported."""


def import_bcc(directory: str) -> Any:
    """Import bcc from where it is, and nothing that lies beside it."""
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
    """Compile."""
    try:
        bcc = import_bcc(directory)
    except (ImportError, OSError) as error:  # OSError: its shared library
        sys.stderr.write(str(error))
        sys.exit(NO_BCC)
    try:
        compiled = bcc.BPF(text=sys.stdin.buffer.read(), cflags=flags)
        codes = [compiled.dump_func(name.encode()) for name in functions.split(",")]
    except Exception as error:  # noqa: BLE001 - bcc raises nothing else; the compiler has said why
        sys.exit(str(error))
    for code in codes:
        sys.stdout.write(code.hex() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
