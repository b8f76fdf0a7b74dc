"""Imports go one way, and a room is entered through its door only."""

import ast
from pathlib import Path

import otel_kprofiler

PACKAGE = Path(otel_kprofiler.__file__).parent

# A room may import rooms of a lower rank only.
RANK = {
    "version": 0, "model": 0, "errors": 0, "redact": 0, "text": 0, "checked": 1,
    "clock": 1, "forks": 1,
    "host": 2,
    "config": 3, "bpf": 3, "symbols": 3, "otlp": 3, "export": 3,
    "sampling": 4, "profiles": 4, "reporting": 4,
    "pipeline": 5,
    "sources": 6,
    "agent": 7, "sdk": 7, "report": 7,
    "cli": 8, "__main__": 9,
}  # fmt: skip


def offered(base: list[str]) -> set[str]:
    """Names that a package offers in its ``__all__``."""
    door = PACKAGE.joinpath(*base, "__init__.py")
    if not door.exists():
        return set()
    return {
        name
        for node in ast.parse(door.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def own_imports(path: Path) -> list[str]:
    """Dotted names below the package that a file imports, with the imported names resolved."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if (node.module or "").split(".")[0] == "otel_kprofiler":
                base = (node.module or "").split(".")[1:]
                for alias in node.names:
                    inner = PACKAGE.joinpath(*base, alias.name)
                    is_module = alias.name not in offered(base) and (
                        inner.is_dir() or inner.with_suffix(".py").exists()
                    )
                    found.append(".".join([*base, alias.name] if is_module else base))
        elif isinstance(node, ast.Import):
            found += [
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.split(".")[0] == "otel_kprofiler"
            ]
    return [name for name in found if name]


def test_imports_go_one_way_and_through_the_door():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = parts[0]
        if room == "__init__":
            continue
        for name in own_imports(path):
            target = name.split(".")
            if target[0] == room:
                continue
            if RANK[target[0]] >= RANK[room]:
                wrong.append(f"{path}: {room} must not import {target[0]}")
            elif len(target) > 1:
                wrong.append(f"{path}: enters {name} past the door of {target[0]}")
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_rank():
    rooms = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if (path.is_dir() and path.name != "__pycache__") or path.suffix == ".py"
    }
    assert rooms - {"__init__", "__pycache__"} <= RANK.keys()
