"""Parameters described in docstrings exist."""

import ast
import re

from tests.sources import syntax_trees

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def find_described(docstring):
    _, _, section = (docstring or "").partition("\nArgs:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    for names in re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section, re.MULTILINE):
        yield from (name.strip(" *") for name in names.split(","))


def find_parameters(node):
    if isinstance(node, ast.ClassDef):
        makers = [item for item in node.body if isinstance(item, FUNCTIONS)]
        makers = [item for item in makers if item.name in {"__init__", "__new__"}]
        if not makers:  # for a NamedTuple or dataclass, the fields are the parameters
            return {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        node = makers[0]
    return {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}


def find_wrong(tree):
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            names = set(find_described(ast.get_docstring(node)))
            if wrong := names - find_parameters(node):
                yield node.name, wrong


def test_every_described_parameter_exists():
    wrong = {path: list(find_wrong(tree)) for path, tree in syntax_trees().items()}
    assert {name: items for name, items in wrong.items() if items} == {}


DESCRIPTION = '''"""Reads.

    Args:
        path, *more: files.
        limit: bytes,
            of all.
    """'''


def test_a_renamed_parameter_is_detected():
    renamed = f"def read(path, size, *more):\n    {DESCRIPTION}"
    assert list(find_wrong(ast.parse(renamed))) == [("read", {"limit"})]
    made = "def __init__(self, path, limit, *more): ..."
    assert list(find_wrong(ast.parse(f"class Reader:\n    {DESCRIPTION}\n    {made}"))) == []
