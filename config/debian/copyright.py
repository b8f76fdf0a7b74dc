"""Print the copyright file of the Debian package: its licence, and the licences of bundled code.

usage: copyright.py SITE-PACKAGES
"""

import sys
from importlib.metadata import Distribution, distributions

HEAD = """otel-kprofiler is under the Apache License, Version 2.0, see
/usr/share/common-licenses/Apache-2.0. Its eBPF programs are under GPL-2.0-only OR BSD-2-Clause.

The virtual environment in /usr/lib/otel-kprofiler contains these packages too, unchanged except for
debug symbols. The texts of their licences are in their *.dist-info directories.
"""
SHORT = 60  # some packages contain the license text instead of a name


def find_licence(package: Distribution) -> str:
    """Returns the name of a package's licence, from its metadata."""
    metadata = package.metadata
    for name in ("License-Expression", "License"):
        value = metadata.get(name) or ""
        if 0 < len(value) <= SHORT and "\n" not in value:
            return value
    names = [
        value.rpartition(" :: ")[2]
        for value in metadata.get_all("Classifier") or []
        if value.startswith("License ::")
    ]
    if not names:
        raise SystemExit(f"{metadata['Name']}: its metadata does not name a licence")
    return ", ".join(names)


def main() -> None:
    """Write the file to standard output."""
    (packages,) = sys.argv[1:]
    lines = [
        f"  {package.metadata['Name']} {package.version}: {find_licence(package)}"
        for package in distributions(path=[packages])
        if package.metadata["Name"] != "otel-kprofiler"
    ]
    text = "\n".join([HEAD, *sorted(lines, key=str.lower)])
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
