"""Encoded windows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Form(enum.Enum):
    """Serialized form of a batch."""

    PROTOBUF = "protobuf"
    JSON = "json"


class AttributeForm(enum.Enum):
    """How keys and string values of resource and scope attributes are written."""

    INLINE = "inline"
    """In place. Every receiver reads it."""
    REFERENCES = "references"
    """As indices into the string table: smaller, but most receivers find empty keys."""


class Encoding(NamedTuple):
    """How windows are encoded for a receiver.

    Attributes:
        form: protobuf, or JSON by OTLP's mapping.
        max_bytes: upper limit of a request before compression; None for no limit.
        attributes: how resource and scope attributes are written.
    """

    form: Form = Form.PROTOBUF
    max_bytes: int | None = None
    attributes: AttributeForm = AttributeForm.INLINE


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One encoded ``ExportProfilesServiceRequest``, self-contained.

    Attributes:
        payload: the encoded request.
        form: how ``payload`` is encoded.
        profile_samples: number of samples of each profile in it, in order.
        start_unix_ns: start of the window it belongs to.
        end_unix_ns: end of that window, exclusive.
    """

    payload: bytes
    form: Form
    profile_samples: tuple[int, ...]
    start_unix_ns: int
    end_unix_ns: int

    @property
    def sample_count(self) -> int:
        """Number of samples in the batch."""
        return sum(self.profile_samples)
