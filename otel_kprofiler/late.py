"""Loads the public names of a package on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Makes a package's ``__getattr__``, which imports names on first use (PEP 562).

    ``package`` is the package's ``__name__``. ``modules`` maps each name to its module, relative to
    the package.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
