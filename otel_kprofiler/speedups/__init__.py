"""Inner loops that run for each frame, record or function, in C if the library can be loaded.

``build_libraries.sh`` compiles the library for each architecture, and the binaries are committed.
For other processors and interpreters, and if the environment variable ``KPROFILER_SPEEDUPS`` is
``off``, ``pure.py`` defines the same in Python. Functions that it does not define are None; they
leave to their callers whatever they do not handle. Results do not differ.
"""

import importlib
import os
from typing import TYPE_CHECKING, Final

from otel_kprofiler.speedups import pure

if TYPE_CHECKING:
    from otel_kprofiler.speedups import interface

MAX_SEGMENTS: Final = 16

library_problem: str | None = None
"""Why the library is not used; None if it is."""

if TYPE_CHECKING or os.environ.get("KPROFILER_SPEEDUPS") == "off":
    _library = pure
    library_problem = "KPROFILER_SPEEDUPS is off"
else:
    try:
        _library = importlib.import_module(f"{__name__}._speedups_{os.uname().machine}")
    except ImportError as error:
        _library = pure
        library_problem = str(error)

FrameCache = _library.FrameCache
FramePattern = pure.FramePattern
INTERPRETER_LOOP = pure.INTERPRETER_LOOP
INTERPRETER_PART = pure.INTERPRETER_PART
find_kind = pure.find_kind
FrameTokens = _library.FrameTokens
find_btf_types = _library.find_btf_types
find_line = _library.find_line
interleave = _library.interleave
add_go_functions: "interface.GoFrameMaker | None" = getattr(_library, "add_go_functions", None)
encode_samples: "interface.SampleEncoder | None" = getattr(_library, "encode_samples", None)
find_stacks: "interface.StackFinder | None" = getattr(_library, "find_stacks", None)
group_samples: "interface.SampleGrouper | None" = getattr(_library, "group_samples", None)
pack_pairs: "interface.PairPacker | None" = getattr(_library, "pack_pairs", None)
parse_samples: "interface.SampleParser | None" = getattr(_library, "parse_samples", None)
