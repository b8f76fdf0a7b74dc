"""Packages import only public names, and only from packages that tests/packages.py allows."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.packages import MODULES, PACKAGES, PAGE, modules, page
from tests.sources import PACKAGE, syntax_trees

IMPORT = re.compile(r"^ *from otel_kprofiler\.(\w+) import (\([^)]*\)|[^(\n]*)", re.MULTILINE)


def is_folder(package: str) -> bool:
    return PACKAGE.joinpath(package).is_dir()


@functools.cache
def listed_names(package: str) -> set[str]:
    """Returns the names in ``__all__``, which only public packages define."""
    return {
        name
        for node in parse_init(package).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


@functools.cache
def bound_names(package: str) -> set[str]:
    """Returns the names that a package defines, or imports from its modules."""
    names = set()
    for node in ast.walk(parse_init(package)):
        match node:
            case ast.ImportFrom(module=str(name)) if name.startswith(f"otel_kprofiler.{package}."):
                names |= {alias.name for alias in node.names}
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.FunctionDef(name=name)
            ):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def parse_init(package: str) -> ast.Module:
    return syntax_trees()[PACKAGE / package / "__init__.py"]


def is_public(package: str, name: str) -> bool:
    return name in (listed_names(package) or bound_names(package))


def own_imports(path: Path, tree: ast.Module) -> list[str]:
    """Returns the packages that a file imports: PACKAGE, or PACKAGE.NAME if NAME is not public."""
    results = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if (node.module or "").split(".")[0] == "otel_kprofiler":
                base = (node.module or "").partition(".")[2]
                for alias in node.names:
                    if not base:
                        results.append(alias.name)
                    elif is_folder(base) and not is_public(base, alias.name):
                        results.append(f"{base}.{alias.name}")
                    else:
                        results.append(base)
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


def test_packages_import_exactly_the_packages_listed_in_the_table():
    assert {
        package: {name.split(".")[0] for name in names}
        for package, names in imports_by_package().items()
    } == {name: set(package.imports.split()) for name, package in PACKAGES.items()}


def test_packages_use_only_public_names_from_other_packages():
    assert not [
        f"{package} imports {name}"
        for package, names in imports_by_package().items()
        for name in names
        if "." in name
    ]


def test_packages_with_an_api_page_list_their_public_names():
    """Strict type checkers accept only imports of names in ``__all__``."""
    pages = {path.stem for path in PAGE.parent.glob("api/*.md") if is_folder(path.stem)}
    assert {name for name in PACKAGES if is_folder(name) and listed_names(name)} == pages


def test_every_public_name_in_a_package_without_an_api_page_is_used_elsewhere():
    """Ruff and mypy do not report unused imports in ``__init__.py``, as they may be re-exports."""
    used = uses()
    assert not [
        f"{package}.{name}"
        for package in PACKAGES
        if is_folder(package) and not listed_names(package)
        for name in bound_names(package) - used[package]
    ]


def uses() -> dict[str, set[str]]:
    """Returns, by package, the names that other packages, tests and benchmarks import from it."""
    results: dict[str, set[str]] = {name: set() for name in PACKAGES}
    root = PACKAGE.parent
    for top in (PACKAGE, root / "tests", root / "benchmarks"):
        for path in top.rglob("*.py"):
            for package, names in IMPORT.findall(path.read_text()):
                if PACKAGE / package not in path.parents:
                    results[package] |= set(re.findall(r"\w+", names))
    return results


def test_the_package_table_contains_no_cycles():
    earlier = accumulate(([name] for name in PACKAGES), initial=[])
    for (name, package), before in zip(PACKAGES.items(), earlier, strict=False):
        assert set(package.imports.split()) <= set(before), name


def test_there_are_no_import_cycles():
    """Imports within functions count, but imports under ``TYPE_CHECKING`` do not."""
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
    """Yields modules in this package that a tree imports outside ``TYPE_CHECKING`` blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("otel_kprofiler."):
            base = child.module.partition(".")[2]
            for name in (base, *(f"{base}.{alias.name}" for alias in child.names)):
                if PACKAGE.joinpath(*name.split(".")).with_suffix(".py").exists():
                    yield name
        yield from imports_at_run_time(child)


def test_the_architecture_page_contains_the_table_of_packages():
    assert PAGE.read_text() == page(PAGE.read_text()), "run make generated"
    assert MODULES.read_text() == modules(), "run make generated"


@pytest.mark.system
def test_the_unwinding_package_is_imported_only_for_user_stacks():
    program = (
        "import sys, otel_kprofiler.agent.agent, otel_kprofiler.pipeline.composition\n"
        "print([name for name in sys.modules if name.startswith('otel_kprofiler.unwinding')])"
    )
    assert run_python(program) == "[]\n"
