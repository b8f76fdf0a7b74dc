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
    """Inline, which every receiver can read."""
    REFERENCES = "references"
    """Indices into the string table: smaller, but most receivers see empty keys."""


class UnnamedFrames(enum.Enum):
    """How frames without a function name are written."""

    ADDRESSES = "addresses"
    """Frames have file and address but no function; back ends resolve the names."""
    NAMES = "names"
    """Frames get a function name made of file, address and reason (``vmlinux+0x40 [no_symbol]``),
    or only the reason if the file is unknown. Suitable for back ends that drop frames without a
    function."""


class Encoding(NamedTuple):
    """How windows are encoded for a receiver.

    Attributes:
        form: protobuf, or JSON in OTLP's mapping.
        max_bytes: maximum size of a request before compression; None for no limit.
        attributes: how resource and scope attributes are written.
        unnamed_frames: how frames without a function name are written.
    """

    form: Form = Form.PROTOBUF
    max_bytes: int | None = None
    attributes: AttributeForm = AttributeForm.INLINE
    unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES


class ProfileSamples(NamedTuple):
    """The number of samples in one profile of a request.

    Attributes:
        kind: name of the sample kind.
        samples: number of samples.
    """

    kind: str
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One encoded ``ExportProfilesServiceRequest``, self-contained.

    Attributes:
        payload: the encoded request.
        form: how ``payload`` is encoded.
        profiles: sample counts of the profiles in the payload, in order.
        start_unix_ns: start of the batch's window.
        end_unix_ns: end of the batch's window, exclusive.
    """

    payload: bytes
    form: Form
    profiles: tuple[ProfileSamples, ...]
    start_unix_ns: int
    end_unix_ns: int

    @property
    def sample_count(self) -> int:
        """Returns the number of samples of all kinds."""
        return sum(profile.samples for profile in self.profiles)

    @property
    def sample_counts(self) -> SampleCounts:
        """Returns the number of samples by kind; 0 for a kind that has only empty profiles."""
        counts = SampleCounts()
        for profile in self.profiles:
            counts[profile.kind] += profile.samples
        return counts
