"""Encoded windows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from otel_kprofiler.model.account import SampleCounts


class Form(enum.Enum):
    """Serialized form of a batch."""

    PROTOBUF = "protobuf"
    JSON = "json"


class AttributeForm(enum.Enum):
    """How keys and string values of resource and scope attributes are written."""

    INLINE = "inline"
    """In place. Every receiver reads it."""
    REFERENCES = "references"
    """As indices into the string table: smaller, but most receivers then see empty keys."""


class UnnamedFrames(enum.Enum):
    """How frames without a function name are written."""

    ADDRESSES = "addresses"
    """Without functions: file and address, from which back ends resolve names."""
    NAMES = "names"
    """With a function named after file, address and reason, such as ``vmlinux+0x40 [no_symbol]``;
    after the reason alone if the file is unknown. For back ends that drop frames without one."""


class Encoding(NamedTuple):
    """How windows are encoded for a receiver.

    Attributes:
        form: protobuf, or JSON by OTLP's mapping.
        max_bytes: upper limit of a request before compression; None for no limit.
        attributes: how resource and scope attributes are written.
        unnamed_frames: how frames without a function name are written.
    """

    form: Form = Form.PROTOBUF
    max_bytes: int | None = None
    attributes: AttributeForm = AttributeForm.INLINE
    unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES


class ProfileSamples(NamedTuple):
    """The samples of one profile of a request.

    Attributes:
        kind: name of their kind.
        samples: their number.
    """

    kind: str
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One encoded ``ExportProfilesServiceRequest``, self-contained.

    Attributes:
        payload: the encoded request.
        form: how ``payload`` is encoded.
        profiles: the samples of each profile in it, in order.
        start_unix_ns: start of its window.
        end_unix_ns: end of its window, exclusive.
    """

    payload: bytes
    form: Form
    profiles: tuple[ProfileSamples, ...]
    start_unix_ns: int
    end_unix_ns: int

    @property
    def sample_count(self) -> int:
        """Number of samples of all kinds."""
        return sum(profile.samples for profile in self.profiles)

    @property
    def sample_counts(self) -> SampleCounts:
        """Number of samples of each kind; 0 for a kind with empty profiles only."""
        counts = SampleCounts()
        for profile in self.profiles:
            counts[profile.kind] += profile.samples
        return counts
