"""The README's commands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def command_below(heading: str) -> str:
    """The first block of commands below a heading that begins so."""
    _, _, section = README.read_text().partition(f"\n## {heading}")
    match = re.search(
        r"^```sh\n(.*?)\n```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE
    )
    assert match, f"no commands below {heading}"
    return match[1]
