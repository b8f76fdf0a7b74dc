"""Inner loops that run for each frame or record, in C where the interpreter can load the library.

``build_libraries.sh`` compiles the library for each architecture, and the binaries are committed.
For other processors and interpreters, and if the environment variable ``KPROFILER_SPEEDUPS`` is
``off``, the types are those of ``pure.py``, and the functions are None. Results do not differ,
because the functions leave to their callers whatever they do not handle.
"""

import importlib
import os
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from otel_kprofiler.speedups import pure

_SampleT = TypeVar("_SampleT")
_KindT = TypeVar("_KindT")
_FrameT = TypeVar("_FrameT")

library_problem: str | None = None
"""Why the library is not used; None if it is."""

if TYPE_CHECKING or os.environ.get("KPROFILER_SPEEDUPS") == "off":
    _library = pure
    library_problem = "KPROFILER_SPEEDUPS is off"
else:
    try:
        _library = importlib.import_module(f"{__name__}._speedups_{platform.machine()}")
    except ImportError as error:
        _library = pure
        library_problem = str(error)

FrameCache = _library.FrameCache
FrameTokens = _library.FrameTokens


class SampleParser(Protocol):
    """Parses samples of running threads and events."""

    def __call__(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        chunk: bytes,
        at: int,
        samples: list[_SampleT],
        shared: dict[bytes, bytes],
        kinds: dict[int, _KindT],
        collect: Callable[[int, int, int], object],
        stack_limit: int,
        sample_type: type[_SampleT],
        /,
    ) -> int:
        """Parses records from ``chunk[at]`` on, and returns the offset of the first that it leaves.

        Leaves wait and lock records, records with spans or contexts, and malformed records. The
        other arguments are those of the code in ``bpf/layout.py`` that parses any record.
        """


class LocationEncoder(Protocol):
    """Encodes entries of ``location_table`` as protobuf."""

    def __call__(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        frames: list[_FrameT],
        start: int,
        end: int,
        mapping: bytes,
        attributes: bytes,
        functions: dict[tuple[str, str, str, int], bytes],
        /,
    ) -> Sequence[bytes | None]:
        """Returns an entry for each frame; None for each frame that it leaves.

        Leaves frames outside of ``start`` to ``end``, frames with functions that have no token, and
        entries of more than 129 bytes.

        Args:
            frames: frames with the same mapping and attributes.
            mapping: token of the mapping; empty if there is none.
            attributes: the encoded attributes.
            functions: tokens by function, system name, file and first line.
        """


parse_samples: SampleParser | None = getattr(_library, "parse_samples", None)
encode_locations: LocationEncoder | None = getattr(_library, "encode_locations", None)
