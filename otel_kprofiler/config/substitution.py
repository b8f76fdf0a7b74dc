"""Substitutes environment variables in a configuration: ``${env:NAME:-default}``.

Follows the OpenTelemetry specification, "Configuration data model", section "Environment variable
substitution".
"""

import re
from collections.abc import Mapping
from typing import Final

_REFERENCE: Final = re.compile(r"\$\{([^}\n]*)\}")
_INSIDE: Final = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.ASCII)


def substitute(text: str, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Replace the references in a scalar, and return the new text and the variables' names.

    ``${NAME}`` and ``${env:NAME}`` become the variable's value, or nothing if the variable is
    unset. ``${NAME:-default}`` uses the default if the variable is unset or empty. ``$$`` becomes
    ``$``. Inserted text is not expanded again. Raises ``ValueError`` if a reference is malformed
    (``${1BAD}``, ``${file:x}``, ``${NAME:?no}``).
    """
    names: list[str] = []

    def value(match: re.Match[str]) -> str:
        inside = _INSIDE.fullmatch(match[1])
        if inside is None:
            raise ValueError(
                f"contains an invalid reference ({len(match[0])} characters): write ${{env:NAME}}, "
                "${env:NAME:-default}, or $${ for a literal ${"
            )
        names.append(inside[1])
        return environ.get(inside[1], "") or inside[2] or ""

    return "$".join(_REFERENCE.sub(value, part) for part in text.split("$$")), tuple(names)
