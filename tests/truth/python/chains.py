"""Generated call chains whose stacks are known: each function has a single call site.

A function stores a mark on entry and another mark on return, so a mark shows which functions may be
on top. This module runs on every tested version of CPython and imports only the standard library.
"""

import random
from itertools import pairwise
from typing import NamedTuple

STYLES = (
    "direct", "map", "sorted", "partial", "sum", "for", "send", "raise", "init", "property",
    "del", "with",
)  # fmt: skip
"""The ways to call the next function; half of the calls are direct, as in most programs."""
GREENLET = "greenlet"
"""The style in which a call runs in a new greenlet, so that the callee is the outermost frame."""
END = "nothing is below"
THREADS, PER_THREAD = 4, 6
_DEPTHS = (1, 2, 3, 5, 8, 12, 20, 40, 55)

_LEAVES = {
    "files": (
        ("os.pread(n.zero, 16384, 0)", "pread"),
        ("os.write(n.null, n.data)", "write"),
        ("os.stat('/')", "stat"),
    ),
    "sockets": (("n.a.send(n.data)", "sendto"), ("n.b.recv(65536)", "recvfrom")),
    "memory": (("for i in range(20): n.x = i", ""), ("y = bytearray(300000)", "")),
    "steps": (),
}

_STEPS = ("for i in range(60):", " n.x = i", " m[0] = {step}", " n.y = i", " m[0] = {begin}")
"""A loop that stores a mark to identify the lines that are running."""

_CALLS = {
    "direct": ("x = {0}(m, n)",),
    "map": ("x = list(map(functools.partial({0}, m), (n,)))",),
    "sorted": ("x = sorted((n,), key=functools.partial({0}, m))",),
    "partial": ("x = functools.partial({0}, m)(n=n)",),
    "sum": ("x = sum({0}(m, n))",),
    "for": ("for x in {0}(m, n): pass",),
    "send": ("try: {0}(m, n).send(None)", "except StopIteration: x = 1"),
    "raise": ("try: {0}(m, n)", "except ValueError: x = 1"),
    "init": ("x = {0}_c(m, n)",),
    "property": ("o = {0}_c()", "o.m = m; o.n = n", "x = o.method"),
    "del": ("o = {0}_c()", "o.m = m; o.n = n", "o = None"),
    "with": ("o = {0}_c()", "o.m = m; o.n = n", "with o: pass"),
    GREENLET: (
        "o = greenlet.greenlet(functools.partial({0}, m))",
        "m[0] = {switch}",
        "x = o.switch(n)",
    ),
}
_CALLING_LINE = {"property": 2, "del": 2, "with": 2, GREENLET: 2}
_METHODS = {"property": "method", "del": "__del__", "with": "__enter__", "init": "__init__"}
_ENDS = {
    "sum": "yield 1", "for": "yield 1", "raise": "raise ValueError", "init": "return None",
    "del": "return None",
}  # fmt: skip


class Function(NamedTuple):
    """A generated function: its callee, incoming and outgoing call styles, and a leaf's work."""

    name: str
    callee: str
    called_by: str | None
    style: str | None
    leaf: tuple[tuple[str, str], ...]


class Chains:
    """The source code of all functions, and each function's valid samples.

    Attributes:
        source: the source of the module, whose file name is ``chains.py``.
        roots: the names of the first functions, by thread.
        callers: the caller and calling line of each function, by qualified name; None for a
            thread's first function, and ``END`` for a greenlet's first function.
        tops: for each line, the marks that a thread may have while the line is at the top of its
            stack; None for all marks.
        frameless: the marks that a thread may have in a greenlet without a Python frame, because
            the interpreter is allocating or freeing the greenlet's frames.
        system_calls: for each line, a substring of its system call's name.
        styles: the style in which each function is called.
    """

    def __init__(self, seed, styles=STYLES):
        self._lines = ["import functools, os"]
        if GREENLET in styles:
            self._lines.append("import greenlet")
        self._marks = 4  # a function's marks start at a multiple of 4
        self.roots = {}
        self.callers = {}
        self.tops = {}
        self.frameless = set()
        self.system_calls = {}
        self.styles = {}
        generator = random.Random(seed)
        leaves = list(_LEAVES.values())
        for thread in range(THREADS):
            for number in range(PER_THREAD):
                name = f"t{thread}k{number}"
                depth = generator.choice(_DEPTHS)
                ways = [
                    generator.choice((generator.choice(styles), "direct")) for _ in range(depth)
                ]
                self._add_chain(name, ways, leaves[(thread + number) % len(leaves)])
                self.roots.setdefault(thread, []).append(f"{name}_0")
        self.source = "\n".join(self._lines) + "\n"

    def _emit(self, text):
        self._lines.append(text)
        return len(self._lines)

    def _add_chain(self, name, styles, leaf):
        first = self._marks
        self._marks += 4 * (len(styles) + 2)
        below = None
        for depth, (called_by, style) in enumerate(pairwise((None, *styles, None))):
            marks = Marks(first + 4 * depth, called_by, style)
            if called_by == GREENLET:
                self.frameless |= {marks.caller, marks.end}
            function = Function(f"{name}_{depth}", f"{name}_{depth + 1}", called_by, style, leaf)
            qualname, line = self._add_function(function, marks)
            self.callers[qualname] = END if called_by == GREENLET else below
            self.styles[qualname] = called_by
            if called_by == "with":
                self.callers[qualname.replace("__enter__", "__exit__")] = below
            below = qualname, line

    def _add_function(self, function, marks):
        """Adds a function. Returns the function's qualified name and the line of its call."""
        me, _, called_by, *_ = function
        method, indent = _METHODS.get(called_by), " "
        qualname, head = me, []
        if method:
            qualname, indent = f"{me}_c.{method}", "  "
            self._emit(f"class {me}_c:")
            if called_by != "init":
                self._emit(" __slots__ = ('m', 'n')")
        if called_by == "init":
            head.append(self._emit(" def __init__(self, m, n):"))
        elif method:
            if called_by == "property":
                head.append(self._emit(" @property"))
            arguments = "self, *_" if called_by == "with" else "self"
            head.append(self._emit(f" def {method}({arguments}):"))
            head.append(self._emit("  m, n = self.m, self.n"))
        else:
            head.append(self._emit(f"{'async ' * (called_by == 'send')}def {me}(m, n):"))
        for line in head:
            self.tops[qualname, line] = marks.before
        self.tops[qualname, self._emit(f"{indent}m[0] = {marks.begin}")] = marks.beginning
        calling = self._add_work(qualname, function, indent, marks)
        self.tops[qualname, self._emit(f"{indent}m[0] = {marks.end}")] = marks.ending
        end = self._emit(f"{indent}{_ENDS.get(called_by, 'return 1')}")
        self.tops[qualname, end] = frozenset((marks.end,))
        if called_by == "with":
            line = self._emit(" def __exit__(self, *_): pass")
            self.tops[f"{me}_c.__exit__", line] = frozenset((marks.end,))
        return qualname, calling

    def _add_work(self, qualname, function, indent, marks):
        """Adds a function's body. Returns the call's line number or, in a leaf, the last line's."""
        if function.style is None and not function.leaf:
            lines = [self._emit(indent + text.format(**vars(marks))) for text in _STEPS]
            first, second = {marks.begin}, {marks.step}
            allowed = (first, first, first | second, second, first | second)
            for line, one in zip(lines, allowed, strict=True):
                self.tops[qualname, line] = frozenset(one)
            return lines[-1]
        if function.style is None:
            for text, system_call in function.leaf:
                line = self._emit(indent + text)
                self.tops[qualname, line] = marks.working
                self.system_calls[qualname, line] = system_call
            return line
        lines = [
            self._emit(indent + text.format(function.callee, **vars(marks)))
            for text in _CALLS[function.style]
        ]
        for line in lines:
            self.tops[qualname, line] = marks.working
        if function.style == GREENLET:
            making, storing, _ = lines
            self.tops[qualname, making] = frozenset((marks.begin,))
            self.tops[qualname, storing] = frozenset((marks.begin, marks.switch))
        return lines[_CALLING_LINE.get(function.style, 0)]


class Marks:
    """The marks that a thread may have while a function is at the top of its stack."""

    def __init__(self, base, called_by, style):
        self.switch, self.begin, self.end, self.step = range(base, base + 4)
        self.caller = base - 4 if called_by == GREENLET else base - 4 + 1
        calling, callee = self.switch if style == GREENLET else self.begin, base + 4 + 2
        self.before = frozenset((self.caller, self.end)) if called_by else None
        self.beginning = self.before | {self.begin} if called_by else None
        self.working = frozenset((calling, callee) if style else (self.begin,))
        self.ending = self.working | {self.end}
