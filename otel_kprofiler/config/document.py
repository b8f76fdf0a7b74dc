"""Parses YAML into plain values with their positions."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode

from otel_kprofiler.config.substitution import substitute
from otel_kprofiler.errors import ConfigProblem
from otel_kprofiler.text import describe_count

Path = tuple[str | int, ...]
"""The keys and list indices that lead from the root of the document to a value."""

MAX_VALUES: Final = 10_000
"""Maximum number of values in a document. An alias counts as all values that it repeats."""
MAX_DEPTH: Final = 32
MAX_NUMBER_CHARS: Final = 64

_QUOTED: Final = re.compile(r"'(.{2,})'")
"""Matches names of anchors and aliases in ruamel.yaml's messages, but not quoted syntax."""

_UNUSABLE: Final = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""Matches characters that neither file names nor requests can contain.

Python represents bytes in the environment that are not UTF-8 as \\udc80 to \\udcff (PEP 383).
"""

_TAG: Final = "tag:yaml.org,2002:"
_TYPED: Final = {_TAG + name for name in ("null", "bool", "int", "float")}
_TEXT: Final = {_TAG + name for name in ("str", "timestamp")}


@dataclass(frozen=True, slots=True)
class Mark:
    """The 1-based line and column of a key or list item, and of its value.

    ``env`` contains the names of the environment variables that were substituted into the value.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    env: tuple[str, ...] = ()


@dataclass(slots=True)
class Document:
    """The values of a YAML document, their positions by path, and the document's problems.

    ``describe_key`` formats a path's last key for messages, or hides it as a possible secret.
    """

    path: str
    values: Any = None
    marks: dict[Path, Mark] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    describe_key: Callable[[Path], str] = lambda path: str(path[-1])

    def complain(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """Add a problem at the position of ``path``, or of its nearest parent in the file."""
        parent = path
        while parent and parent not in self.marks:
            parent = parent[:-1]
        mark = self.marks.get(parent)
        line, column = (0, 0)
        if mark is not None:
            line, column = mark.key if at_key or parent != path else mark.value
        self.problems.append(ConfigProblem(self.path, line, column, self.name(path), message))

    def name(self, path: Path) -> str:
        """Format a path for messages, such as ``receivers.kprofiler.target_pids[0]``."""
        text = "".join(
            f"[{key}]" if isinstance(key, int) else f".{self.describe_key(path[:until])}"
            for until, key in enumerate(path, 1)
        )
        return text.removeprefix(".")


def hide(text: str) -> str:
    """Describe a possibly secret string only by its length."""
    return f"({describe_count(len(text), 'character')})"


def parse_document(
    text: str,
    *,
    path: str,
    environ: Mapping[str, str],
    describe_key: Callable[[Path], str] = lambda path: str(path[-1]),
) -> Document:
    """Parse one YAML 1.2 document, and substitute its references to variables in ``environ``.

    Never raises for invalid input. Errors (syntax, duplicate keys, malformed references, tags, too
    many values) are listed in ``problems`` with their positions.
    """
    document = Document(path, describe_key=describe_key)
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        problem = " ".join(part for part in (error.context, error.problem) if part)
        problem = _QUOTED.sub(lambda match: hide(match[1]), problem)
        document.problems.append(
            ConfigProblem(path, place[0], place[1], "", f"not YAML: {problem}")
        )
    except YAMLError as error:  # forbidden characters: the error has no position
        document.complain((), f"not YAML: {' '.join(str(error).split())}")
    except (AssertionError, KeyError):  # the exception depends on ruamel.yaml's version
        document.complain((), "not YAML: unknown version after %YAML")
    except RecursionError:
        document.complain((), "not YAML: nested too deeply")
    except ValueError:  # chr() in ruamel.yaml
        document.complain((), "not YAML: an escape sequence is not a Unicode character")
    else:
        if root is not None:
            document.marks[()] = Mark(_place(root), _place(root))
            document.values = _read_values(yaml, document, environ, root)
    return document


def _read_values(yaml: YAML, document: Document, environ: Mapping[str, str], root: Node) -> Any:
    try:
        return _Reader(yaml, document, environ).value(root, (), ())
    except _TooManyError:
        document.marks = {(): document.marks[()]}
        document.complain((), f"has more than {MAX_VALUES} values, including aliases")
        return None


class _TooManyError(Exception):
    """Raised if the document has more than :data:`MAX_VALUES` values."""


def _place(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Reader:
    def __init__(self, yaml: YAML, document: Document, environ: Mapping[str, str]) -> None:
        self._yaml = yaml
        self._document = document
        self._environ = environ
        self._count = 0

    def value(self, node: Node, path: Path, parents: tuple[Node, ...]) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooManyError
        if len(parents) > MAX_DEPTH:
            self._document.complain(path, f"is nested more than {MAX_DEPTH} levels deep")
            return None
        if any(parent is node for parent in parents):
            self._document.complain(path, "an alias is inside its own anchor")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        inside = (*parents, node)
        if isinstance(node, SequenceNode):
            for index, item in enumerate(node.value):
                self._document.marks[*path, index] = Mark(_place(item), _place(item))
            return [
                self.value(item, (*path, index), inside) for index, item in enumerate(node.value)
            ]
        return self._mapping(node, path, inside)

    def _mapping(self, node: Node, path: Path, inside: tuple[Node, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in node.value:
            name = key.value if isinstance(key, ScalarNode) else "?"
            here = (*path, name)
            first = self._document.marks.get(here) if name in values else None
            self._document.marks[here] = Mark(_place(key), _place(item))
            if not isinstance(key, ScalarNode) or key.tag not in _TEXT:
                self._document.complain(here, "a key must be a string", at_key=True)
            elif first is not None:
                message = f"is a duplicate of line {first.key[0]}"
                self._document.complain(here, message, at_key=True)
            values[name] = self.value(item, here, inside)
        return values

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        mark = self._document.marks[path]
        try:
            text, names = substitute(node.value, self._environ)
        except ValueError as error:
            self._document.complain(path, str(error))
            return None
        if _UNUSABLE.search(text):
            self._document.complain(path, "contains a NUL character or a surrogate")
            return None
        tag = node.tag
        if text != node.value:
            self._document.marks[path] = Mark(mark.key, mark.value, names)
            if node.style is None:  # the substituted text determines a plain scalar's type
                tag = str(self._yaml.resolver.resolve(ScalarNode, text, (True, False)))
        if tag in _TYPED and len(text) > MAX_NUMBER_CHARS:
            self._document.complain(path, f"is a number of more than {MAX_NUMBER_CHARS} characters")
            return None
        if tag in _TYPED:
            return self._yaml.constructor.construct_object(ScalarNode(tag, text))
        if tag not in _TEXT:
            self._document.complain(path, f"the YAML tag {hide(str(tag))} is not supported")
        return text
