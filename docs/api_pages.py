"""Documents a package's public names as reStructuredText, with links to other packages' names.

By default, autodoc would omit constants, and names that a package imports from other packages or
only on first use.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator

from sphinx.pycode import ModuleAnalyzer

LONGEST_VALUE = 60
"""Values of constants are shown up to this number of characters."""


def document_package(package: str, documented: set[str]) -> Iterator[str]:
    """Yields directives for the docstring of a package and for each name in its ``__all__``.

    Args:
        package: full name of the package.
        documented: full names of all packages with an API page.
    """
    module = importlib.import_module(package)
    if not hasattr(module, "__all__"):
        yield f".. automodule:: {package}"
        return
    yield f".. automodule:: {package}\n   :no-members:"
    for name in module.__all__:
        home, value = find_home(package, name), getattr(module, name)
        other = ".".join(home.split(".")[:2])
        if other != package and other in documented:
            yield f":any:`{name} <{other}.{name}>`"
        elif inspect.isclass(value):
            yield f".. autoclass:: {package}.{name}"
        elif inspect.isroutine(value):
            yield f".. autofunction:: {package}.{name}"
        elif not inspect.ismodule(value):
            yield document_constant(package, name, home, value)


def find_home(package: str, name: str) -> str:
    """Returns the module that defines a name, following the imports of packages that export it."""
    module = importlib.import_module(package)
    if hasattr(module, "__path__"):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.ImportFrom) or node.module == package:
                continue
            if any(alias.name == name for alias in node.names):
                return find_home(str(node.module), name)
    return package


def document_constant(package: str, name: str, home: str, value: object) -> str:
    """Returns a directive for a constant or type alias, with its docstring."""
    lines = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name), [])
    shown = repr(value)
    option = f"\n   :value: {shown}" if len(shown) <= LONGEST_VALUE and "<" not in shown else ""
    body = "\n".join(f"   {line}" for line in lines)
    return f".. py:data:: {name}\n   :module: {package}{option}\n\n{body}"
