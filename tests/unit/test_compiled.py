"""The modules that a wheel may contain in compiled form behave the same when compiled."""

import ast
import inspect
import os
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from otel_kprofiler.cli.versions import has_compiled_modules
from otel_kprofiler.otlp.pause import go_on
from tests.sources import PACKAGE, syntax_trees

SETTINGS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
WHEEL = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]
MODULES = set(WHEEL["hooks"]["custom"]["modules"])
OF_PYTHON = {"Enum", "IntEnum", "NamedTuple", "Protocol"}
"""Compiled classes with one of these bases remain ordinary Python classes."""


def classes(*, compiled: bool) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    for path, tree in syntax_trees().items():
        if (str(path.relative_to(PACKAGE.parent)) in MODULES) is compiled:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    yield node, {ast.unparse(base).partition("[")[0] for base in node.bases}


def decorated(word: str) -> set[str]:
    """Returns the names of the compiled classes that have a decorator with ``word`` in it."""
    return {
        node.name
        for node, _ in classes(compiled=True)
        for decorator in node.decorator_list
        if word in ast.unparse(decorator)
    }


def test_all_modules_are_compiled_if_and_only_if_requested():
    names = [path.removesuffix(".py").replace("/", ".") for path in MODULES]
    endings = {Path(import_module(name).__file__).suffix for name in names}
    is_compiled = bool(os.environ.get("KPROFILER_COMPILED"))
    assert endings == {".so" if is_compiled else ".py"}
    assert has_compiled_modules() is is_compiled


def test_no_compiled_class_is_a_dataclass():
    assert not decorated("dataclass"), "frozen compiled dataclasses cannot be unpickled"


def test_no_compiled_protocol_is_checked_at_run_time():
    assert not decorated("runtime_checkable"), "compiled protocols lack the mark of a protocol"


def test_compiled_modules_do_not_use_raise_from():
    raised = [
        f"{path}:{node.lineno}"
        for path, tree in syntax_trees().items()
        if str(path.relative_to(PACKAGE.parent)) in MODULES
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.cause
    ]
    assert not raised, "mypyc ignores what follows `from`"


def test_the_encoder_allows_other_threads_to_run():
    """Calls between compiled functions never release the GIL."""
    assert inspect.isfunction(go_on)
    assert os.path.relpath(inspect.getfile(go_on), PACKAGE.parent) not in MODULES


def test_no_uncompiled_class_inherits_from_a_compiled_class():
    final = {node.name for node, bases in classes(compiled=True) if not bases & OF_PYTHON}
    inherited = {name for _, bases in classes(compiled=False) for name in bases & final}
    assert not inherited, "compiled classes cannot be bases of others"
