"""Batches: encoded windows, ready for export."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from otel_kprofiler.model.account import SampleCounts


class Form(enum.Enum):
    """Serialized form of a batch."""

    PROTOBUF = "protobuf"
    JSON = "json"


class AttributeForm(enum.Enum):
    """Encoding of the keys and string values in resource and scope attributes."""

    INLINE = "inline"
    """Keys and values are stored as text, which every receiver can read."""
    REFERENCES = "references"
    """As string-table indices, which are smaller, but which most receivers read as empty keys."""


class UnnamedFrames(enum.Enum):
    """Representation of frames without a function name."""

    ADDRESSES = "addresses"
    """Frames have a file and an address, but no function; back ends resolve the names."""
    NAMES = "names"
    """Frames without a function receive a name composed of their file, address and reason, such as
    ``vmlinux+0x40 [no_symbol]``, for back ends that drop unnamed frames."""


class Encoding(NamedTuple):
    """How windows are encoded. ``max_bytes`` limits the uncompressed size; None: no limit."""

    form: Form = Form.PROTOBUF
    max_bytes: int | None = None
    attributes: AttributeForm = AttributeForm.INLINE
    unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES


class ProfileSamples(NamedTuple):
    """The sample kind of one profile in a request, and the number of samples in that profile."""

    kind: str
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One encoded ``ExportProfilesServiceRequest``, self-contained.

    ``profiles`` holds the sample counts of the profiles, in order. ``end_unix_ns`` is exclusive.
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
