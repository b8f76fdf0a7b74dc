"""The optional settings for a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_kprofiler.processes import Grain

if TYPE_CHECKING:
    from otel_kprofiler.model import ExporterAccount, LabelSet, RawSample, Window


@dataclass(frozen=True)
class PipelineOptions:
    """The optional settings of a :class:`Pipeline`.

    ``grain`` and ``leaves_out_self_profiled`` may be replaced while the pipeline runs.

    Attributes:
        whole_sink: receives all samples once more at the end, in a single window.
        exporters: returns each exporter's sample counts; may be called from any thread.
        pause: called repeatedly during long computations, to yield the GIL or report progress.
        on_drained: receives the samples from each drain, before the samples wait for their symbols.
        find_labels: returns the labels for a label-set number; without it, samples have no labels.
        grain: the unit that each Resource describes. Resources with the same unit are merged when a
            window closes.
        leaves_out_self_profiled: whether windows exclude the on-CPU samples from processes that
            sample themselves. Excluded samples are counted as lost.
        limits_processes: whether to reduce the detail in samples from processes over their budget.
    """

    whole_sink: Callable[[Window], None] | None = None
    exporters: Callable[[], tuple[ExporterAccount, ...]] = tuple
    pause: Callable[[], None] | None = None
    on_drained: Callable[[Sequence[RawSample]], None] | None = None
    find_labels: Callable[[int], LabelSet] | None = None
    grain: Grain = Grain.PROCESS
    leaves_out_self_profiled: bool = False
    limits_processes: bool = False
