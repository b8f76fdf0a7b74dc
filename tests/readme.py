"""Finds the README's commands, configurations and code."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def block_below(heading: str, language: str = "sh") -> str:
    """Returns the first code block in a language below the heading that begins with ``heading``."""
    _, _, section = README.read_text().partition(f"\n## {heading}")
    match = re.search(
        rf"^```{language}\n(.*?)\n```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE
    )
    assert match, f"no block of {language} below {heading}"
    return match[1]
