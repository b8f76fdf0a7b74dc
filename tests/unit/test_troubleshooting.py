"""docs/troubleshooting.md describes all host and export errors, and no outdated messages."""

import ast
import re
from pathlib import Path

from tests.sources import PACKAGE, syntax_trees

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
PACKAGES = ("agent", "bpf", "cli", "export", "host", "sampling")
ERRORS = {
    "HostError", "PrivilegeError", "KernelFeatureError", "DependencyError", "SamplerError",
    "ShortageError", "ExportError",
}  # fmt: skip
# These errors are caused by the calling code, not by users.
NOT_FOR_USERS = {
    "the sampler is not running",
    "a sampler that profiles a command cannot be reconfigured",
}


def text_of(node):
    """Returns a message with each interpolated value replaced by …."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "…"


def error_texts():
    results = set()
    for path, tree in syntax_trees().items():
        if path.relative_to(PACKAGE).parts[0] not in PACKAGES:
            continue
        for node in ast.walk(tree):
            name = getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and name in ERRORS and node.args:
                results.add(text_of(node.args[0]))
    return results - {"…"} - NOT_FOR_USERS


def documented():
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    return {text for row in rows for text in re.findall(r"`([^`]+)`", row)}


def test_every_error_is_documented():
    assert not error_texts() - documented(), "add it to docs/troubleshooting.md, with the fix"


def test_every_documented_message_exists():
    """Each documented message matches a message in the package, where … matches any text."""
    messages = {
        text_of(node)
        for tree in syntax_trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, str)
    }

    def exists(text):
        parts = [part for part in text.replace("`", "").split("…") if part.strip(" :,()")]
        # Log messages contain %s where an f-string would contain an expression.
        return any(all(part in message for part in parts) for message in messages)

    assert not {text for text in documented() if not exists(text)}
