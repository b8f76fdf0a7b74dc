"""``python -m otel_kprofiler.config [--check]``: write (or check) the generated files."""

from __future__ import annotations

import sys

from otel_kprofiler.config.generate import json_schema_text, reference, sample

OUTPUTS = {
    "config/agent.yaml": sample,
    "config/schema.json": json_schema_text,
    "docs/configuration.md": reference,
}


def stale(root: str) -> list[str]:
    """Generated files below ``root`` that are out of date."""
    found = []
    for path, make in OUTPUTS.items():
        try:
            with open(f"{root}/{path}", encoding="utf-8") as file:
                current = file.read()
        except FileNotFoundError:
            current = ""
        if current != make():
            found.append(path)
    return found


def main(arguments: list[str]) -> int:
    """Run in the current directory, the root of a checkout."""
    found = stale(".")
    if "--check" in arguments:
        for path in found:
            sys.stderr.write(f"{path} is out of date: run make generated\n")
        return 1 if found else 0
    for path in found:
        with open(path, "w", encoding="utf-8") as file:
            file.write(OUTPUTS[path]())
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
