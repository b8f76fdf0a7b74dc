"""Options of a pipeline, beside its main path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_kprofiler.processes import Grain

if TYPE_CHECKING:
    from otel_kprofiler.model import ExporterAccount, LabelSet, RawSample, Window


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a :class:`Pipeline`.

    While it runs, ``grain`` and ``leaves_out_self_profiled`` may be replaced.

    Attributes:
        whole_sink: receives all samples once more at the end, in a single window.
        exporters: returns the account of each exporter behind the sink; called from any thread.
        pause: called repeatedly during long work, to let other threads run or report progress.
        on_drained: sees the samples of each drain, before they wait for their symbols.
        find_labels: returns the labels with a number; without it, samples have none.
        grain: unit that has a Resource; Resources are merged when a window is closed.
        leaves_out_self_profiled: leave on-CPU samples of processes that sample themselves out of
            windows; these are counted as lost.
        limits_processes: make samples of a process that costs too much coarser.
    """

    whole_sink: Callable[[Window], None] | None = None
    exporters: Callable[[], tuple[ExporterAccount, ...]] = tuple
    pause: Callable[[], None] | None = None
    on_drained: Callable[[Sequence[RawSample]], None] | None = None
    find_labels: Callable[[int], LabelSet] | None = None
    grain: Grain = Grain.PROCESS
    leaves_out_self_profiled: bool = False
    limits_processes: bool = False
