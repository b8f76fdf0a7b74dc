"""Writes, reads and replays raw recordings."""

from otel_kprofiler.recording.facts import RecordingFacts
from otel_kprofiler.recording.ksymbols import EventSink, RecordedKsymbols, ReplayedKsymbols
from otel_kprofiler.recording.modules import RecordedModules, ReplayedModules
from otel_kprofiler.recording.recording import Recording, RecordingWriter
from otel_kprofiler.recording.replay import ReplaySampler
from otel_kprofiler.recording.user_names import CodeNameCollector, UserNameCollector
