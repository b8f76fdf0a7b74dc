"""Value types that every layer shares; imports nothing else of the package.

Addresses of different kinds are different types, ranges are half-open
``[start, end)``, times are integers in nanoseconds. All values here are immutable
and safe to share between threads.
"""

from otel_kprofiler.model.account import (
    Account,
    ExporterAccount,
    LossCause,
    Losses,
    SampleCounts,
    StreamTotals,
    sum_losses,
)
from otel_kprofiler.model.batch import AttributeForm, Batch, Encoding, Form, ProfileSamples
from otel_kprofiler.model.finding import Finding, Level
from otel_kprofiler.model.ksymbol import (
    Ksymbol,
    KsymbolAction,
    KsymbolBatch,
    KsymbolChange,
    KsymbolDetails,
)
from otel_kprofiler.model.sample import ProcessKey, RawSample, SpanLink
from otel_kprofiler.model.stack import (
    MAX_FRAMES,
    STACK_NOT_COLLECTED,
    STACK_OK,
    STACK_TRUNCATED,
    AddressRange,
    BpfProgram,
    BuildId,
    FileId,
    Frame,
    FrameKind,
    Line,
    Module,
    ModuleKind,
    RangeSource,
    Stack,
    StackStatus,
    Unresolved,
)
from otel_kprofiler.model.window import (
    ON_CPU,
    Attributes,
    AttributeScalar,
    AttributeValue,
    ProfileKind,
    Resource,
    ResourceSamples,
    Window,
    WindowSample,
)

__all__ = [
    "MAX_FRAMES",
    "ON_CPU",
    "STACK_NOT_COLLECTED",
    "STACK_OK",
    "STACK_TRUNCATED",
    "Account",
    "AddressRange",
    "AttributeForm",
    "AttributeScalar",
    "AttributeValue",
    "Attributes",
    "Batch",
    "BpfProgram",
    "BuildId",
    "Encoding",
    "ExporterAccount",
    "FileId",
    "Finding",
    "Form",
    "Frame",
    "FrameKind",
    "Ksymbol",
    "KsymbolAction",
    "KsymbolBatch",
    "KsymbolChange",
    "KsymbolDetails",
    "Level",
    "Line",
    "LossCause",
    "Losses",
    "Module",
    "ModuleKind",
    "ProcessKey",
    "ProfileKind",
    "ProfileSamples",
    "RangeSource",
    "RawSample",
    "Resource",
    "ResourceSamples",
    "SampleCounts",
    "SpanLink",
    "Stack",
    "StackStatus",
    "StreamTotals",
    "Unresolved",
    "Window",
    "WindowSample",
    "sum_losses",
]
