"""Packages import only public names from packages that tests/packages.py allows."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from tests.packages import MODULES, PACKAGES, PAGE, modules, page
from tests.sources import PACKAGE, syntax_trees


@functools.cache
def public_names(package: tuple[str, ...]) -> set[str]:
    tree = syntax_trees().get(PACKAGE.joinpath(*package, "__init__.py"))
    return {
        name
        for node in (tree.body if tree else ())
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def own_imports(path: Path, tree: ast.Module) -> list[str]:
    """Returns the modules of this package that a file imports, as dotted names."""
    results = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if (node.module or "").split(".")[0] == "otel_kprofiler":
                base = tuple((node.module or "").split(".")[1:])
                for alias in node.names:
                    inner = PACKAGE.joinpath(*base, alias.name)
                    is_module = alias.name not in public_names(base) and (
                        inner.is_dir() or inner.with_suffix(".py").exists()
                    )
                    results.append(".".join([*base, alias.name] if is_module else base))
        elif isinstance(node, ast.Import):
            results += [
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.split(".")[0] == "otel_kprofiler"
            ]
    return [name for name in results if name]


@functools.cache
def imports_by_package() -> dict[str, set[str]]:
    results: dict[str, set[str]] = {}
    for path, tree in syntax_trees().items():
        package = path.relative_to(PACKAGE).with_suffix("").parts[0]
        names = results.setdefault(package, set())
        names |= {name for name in own_imports(path, tree) if name.split(".")[0] != package}
    return results


def test_packages_import_only_packages_in_the_table():
    assert {
        package: {name.split(".")[0] for name in names}
        for package, names in imports_by_package().items()
    } == {name: set(package.imports.split()) for name, package in PACKAGES.items()}


def test_packages_use_only_public_names_of_others():
    assert not [
        f"{package} imports {name}"
        for package, names in imports_by_package().items()
        for name in names
        if "." in name
    ]


def test_the_table_of_packages_has_no_cycles():
    earlier = accumulate(([name] for name in PACKAGES), initial=[])
    for (name, package), before in zip(PACKAGES.items(), earlier, strict=False):
        assert set(package.imports.split()) <= set(before), name


def test_there_are_no_import_cycles():
    """Imports within functions count. Imports for type checkers alone do not."""
    graph = {}
    for path, tree in syntax_trees().items():
        if path.stem != "__init__":
            imported = set(imports_at_run_time(tree))
            graph[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = imported
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_module_exceeds_the_line_limit():
    assert not [
        f"{path.relative_to(PACKAGE)}: {lines} lines"
        for path in syntax_trees()
        if (lines := len(path.read_text().splitlines())) >= 450
    ]


def imports_at_run_time(node: ast.AST) -> Iterator[str]:
    """Yields this package's modules that a tree imports, except those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("otel_kprofiler."):
            base = child.module.partition(".")[2]
            for name in (base, *(f"{base}.{alias.name}" for alias in child.names)):
                if PACKAGE.joinpath(*name.split(".")).with_suffix(".py").exists():
                    yield name
        yield from imports_at_run_time(child)


def test_the_architecture_page_has_the_table_of_packages():
    assert PAGE.read_text() == page(PAGE.read_text()), "run make generated"
    assert MODULES.read_text() == modules(), "run make generated"


@pytest.mark.system
def test_unwinding_is_imported_only_for_user_stacks():
    program = (
        "import sys, otel_kprofiler.agent.agent, otel_kprofiler.pipeline.composition\n"
        "print([name for name in sys.modules if name.startswith('otel_kprofiler.unwinding')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
