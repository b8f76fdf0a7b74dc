"""Finds the examples in the documentation for tests that run them."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^(#+ [^\n]*)$|^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page):
    """Returns the Python blocks on a page in order, by the heading above them."""
    heading, result = "", {}
    for title, code in _BLOCK.findall((DOCS / page).read_text()):
        if title:
            heading = title.lstrip("# ")
        else:
            result.setdefault(heading, []).append(code)
    return result


def run_example(examples, heading, **given):
    """Runs the only example below a heading, and returns its variables."""
    (code,) = examples[heading]
    exec(code, given)
    return given
