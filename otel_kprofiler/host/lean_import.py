"""Imports a module without running its package's ``__init__.py``.

``import package.module`` first runs ``package/__init__.py``, which may import all other modules.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any


def import_module_alone(name: str) -> ModuleType:
    """Import ``package.module`` without running the package's ``__init__``.

    ``__init__`` runs later, when code looks up an attribute that is not a submodule. Other code can
    therefore use the package normally. Packages that have already been imported are left unchanged.
    Thread-safe. Raises ``ImportError``.
    """
    package, _, _ = name.partition(".")
    if package not in sys.modules:
        sys.modules.setdefault(package, _defer(package))
    return importlib.import_module(name)


def _defer(name: str) -> ModuleType:
    """Create a package whose ``__getattr__`` (PEP 562) runs ``__init__.py`` on demand."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = importlib.util.module_from_spec(spec)
    lock = threading.RLock()
    running = False

    def find(attribute: str) -> Any:
        nonlocal running
        module = f"{name}.{attribute}"
        if importlib.util.find_spec(module) is not None:
            return importlib.import_module(module)
        with lock:
            if not running and "__getattr__" in vars(package):
                running = True  # imports in __init__ may call find() again
                try:
                    importlib.reload(package)
                finally:
                    running = False
                del vars(package)["__getattr__"]
        if attribute not in vars(package):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return vars(package)[attribute]

    vars(package)["__getattr__"] = find
    return package
