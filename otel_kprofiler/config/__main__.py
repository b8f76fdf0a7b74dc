"""``python -m otel_kprofiler.config [--check]``: write (or check) the generated files."""

import sys

from otel_kprofiler.config.generate import json_schema_text, reference, sample

OUTPUTS = {
    "config/agent.yaml": sample,
    "config/schema.json": json_schema_text,
    "docs/configuration.md": reference,
}


def stale(root: str) -> list[str]:
    """Returns the generated files below ``root`` that are out of date."""
    paths = []
    for path, make in OUTPUTS.items():
        try:
            with open(f"{root}/{path}", encoding="utf-8") as file:
                current = file.read()
        except FileNotFoundError:
            current = ""
        if current != make():
            paths.append(path)
    return paths


def main(arguments: list[str]) -> int:
    """Write or check the generated files. The current directory must be the root of a checkout."""
    paths = stale(".")
    if "--check" in arguments:
        for path in paths:
            sys.stderr.write(f"{path} is out of date: run make generated\n")
        return 1 if paths else 0
    for path in paths:
        with open(path, "w", encoding="utf-8") as file:
            file.write(OUTPUTS[path]())
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
