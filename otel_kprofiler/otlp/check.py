"""Checks payloads against the rules of OTLP profiles.

The rules are derived from profiles.proto, the specification's ``profiles/`` pages, the semantic
conventions, and all checks of ``profcheck`` (open-telemetry/sig-profiling). Rules for the
serialized form are in ``payloads`` and ``json_read``.
"""

from itertools import islice
from typing import Final

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp import rules_dictionary, rules_profiles
from otel_kprofiler.otlp.payloads import parse_payloads, read_file
from otel_kprofiler.otlp.rules import Contents, Rule, Violation

__all__ = ["RULES", "Violation", "check_file", "check_message", "check_payload"]

PARSABLE: Final = "parsable"
MAX_PLACES: Final = 1000
"""Maximum number of violations reported per rule and message."""
MAX_VIOLATIONS: Final = 10_000
"""Maximum number of violations per file, at which checking stops."""

FORM_RULES: Final = {
    PARSABLE: "A file must have complete profiles laid out as in opentelemetry-proto 1.43 or later",
    "json-names": "JSON keys must be the lowerCamelCase names of the messages' fields",
    "json-long-strings": "64-bit integers must be strings in JSON",
    "json-int-numbers": "32-bit integers must be numbers in JSON",
    "json-hex-ids": "Trace, span and profile ids must be hexadecimal strings in JSON",
}

MESSAGE_RULES: Final[dict[str, Rule]] = rules_dictionary.RULES | rules_profiles.RULES

RULES: Final[dict[str, str]] = FORM_RULES | {
    name: rule.promise for name, rule in MESSAGE_RULES.items()
}
"""Descriptions of all rules, by id."""


def check_message(message: object) -> list[Violation]:
    """Check one ``ExportProfilesServiceRequest`` or ``ProfilesData`` against all rules."""
    contents = Contents(message)
    return [
        Violation(name, where, problem)
        for name, rule in MESSAGE_RULES.items()
        for where, problem in islice(rule.find(contents), MAX_PLACES)
    ]


def check_payload(data: bytes) -> list[Violation]:
    """Check serialized requests: one message, length-prefixed messages, or JSON lines.

    Returns at most :data:`MAX_PLACES` violations per rule and message. If there are several
    messages, each violation's ``where`` starts with ``message N:``.
    """
    violations: list[Violation] = []
    checked: list[list[Violation]] = []
    count = 0
    try:
        for payload in parse_payloads(data):
            if count > MAX_VIOLATIONS:
                rest = f"not checked after {count} violations"
                violations.append(Violation(PARSABLE, f"message {len(checked) + 1}", rest))
                break
            notes = [Violation(*note) for note in payload.notes]
            checked.append(notes + check_message(payload.message))
            count += len(checked[-1])
    except PayloadError as error:
        violations.append(Violation(PARSABLE, f"message {len(checked) + 1}", error.message))
    if not checked and not violations:
        violations.append(Violation(PARSABLE, "message 1", "no data"))
    for number, problems in enumerate(checked, 1):
        prefix = f"message {number}: " if len(checked) > 1 else ""
        violations += [item._replace(where=prefix + item.where) for item in problems]
    return violations


def check_file(path: str) -> list[Violation]:
    """Check the requests in a file; see :func:`check_payload`.

    Raises ``OSError`` if the file cannot be read, and ``PayloadError`` if it is too large.
    """
    return check_payload(read_file(path))
