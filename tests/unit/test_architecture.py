"""The tables in docs/architecture.md agree with the code."""

import ast
import re

from otel_kprofiler.agent.agent_settings import FIXED_AT_START
from tests.packages import PAGE
from tests.sources import PACKAGE, syntax_trees

NAMES = {"name", "thread_name_prefix"}
FOREIGN_THREADS = {"MainThread", "Thread-N"}
BOOT_AND_UNIX = {"time", "time_ns", "clock_gettime", "clock_gettime_ns"}


def rows(heading: str, first: str) -> list[list[str]]:
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = section.partition(f"\n| {first} |")[2].partition("\n\n")[0]
    assert table, f"no such table: {heading}"
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def text_of(node: ast.expr, tree: ast.Module) -> str:
    """Returns the text of a string in the source, with NAME for each interpolated value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in parts
            )
        case ast.Name(id=name):
            for one in ast.walk(tree):
                match one:
                    case (
                        ast.Assign(targets=[ast.Name(id=target)], value=value)
                        | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                    ) if target == name:
                        return text_of(value, tree)
    raise AssertionError(f"cannot find the text of {ast.unparse(node)}")


def is_thread(function: ast.expr) -> bool:
    return ast.unparse(function) in {"threading.Thread", "ThreadPoolExecutor"}


def test_every_thread_is_documented():
    results = set()
    for path, tree in syntax_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and is_thread(node.func):
                names = [keyword.value for keyword in node.keywords if keyword.arg in NAMES]
                assert names, f"{path}:{node.lineno}: a thread without a name"
                results.add(text_of(names[0], tree))
    assert {row[0].strip("`") for row in rows("Threads", "Thread")} == results | FOREIGN_THREADS


def test_every_module_that_reads_boottime_or_unix_time_is_documented():
    results = {
        str(path.relative_to(PACKAGE))
        for path, tree in syntax_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in BOOT_AND_UNIX
        and ast.unparse(node.value) == "time"
    }
    listed = {one for row in rows("Time", "Clock") for one in re.findall(r"`(\S+\.py)`", row[2])}
    assert listed == results


def test_every_agent_metric_is_documented():
    results = set()
    tree = syntax_trees()[PACKAGE / "agent" / "metrics.py"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("meter.create_"):
            results.add(text_of(node.args[0], tree))
        elif isinstance(node, ast.For) and ast.unparse(node.target).startswith("(create, name"):
            assert isinstance(node.iter, ast.Tuple)
            results |= {
                text_of(elt.elts[1], tree) for elt in node.iter.elts if isinstance(elt, ast.Tuple)
            }
    assert len(results) > 5
    listed = [re.findall(r"`(\S+)`", row[0]) for row in rows("Own metrics", "Metric")]
    assert {name for names in listed for name in names} == results


def test_every_key_that_needs_a_restart_is_documented():
    (row,) = [row for row in rows("Reload", "What changes") if "restart" in row[1]]
    assert {name.strip("`") for name in row[0].split(", ")} == set(FIXED_AT_START)


def test_documented_files_exist():
    for path in re.findall(r"`([a-z_]+(?:/[a-z_.]+)+)`", PAGE.read_text()):
        assert (PACKAGE / path).exists() or (PAGE.parents[1] / path).exists(), path
