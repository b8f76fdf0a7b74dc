"""Loads the public names of a package on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Creates a package's ``__getattr__``, which imports names on first use (PEP 562).

    ``package`` is the package's ``__name__``. ``modules`` maps each module, relative to the
    package, to its names, separated by spaces. A leading dot denotes the parent package.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{places[name]}", package), name)

    return load
