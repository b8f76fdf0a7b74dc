"""Chooses the size of the BPF ring buffer."""

from typing import Final

from otel_kprofiler.bpf import RECORD_HEADER_BYTES, RECORD_OVERHEAD, ring_bytes
from otel_kprofiler.sampling.sampler import SamplerConfig

_PLANNED_FRAMES: Final = 64
_PLANNED_DRAINS: Final = 4
_MIN_RING_BYTES: Final = 256 * 1024
_MIN_WAIT_RING_BYTES: Final = 1 << 20  # also holds the wait totals of exited threads
_EVENT_RING_BYTES: Final = 16 << 20


def plan_ring_bytes(config: SamplerConfig, cpus: int) -> int:
    """Returns the size of the ring, in bytes.

    The ring can hold 64-frame stacks for four drain intervals, or for eight if waits are sampled.
    The size is at least 256 KiB (1 MiB with waits, 16 MiB if an event has a fixed period), and at
    most ``max_ring_bytes``. Waits and events may each use up to three quarters of the ring.
    """
    record = RECORD_OVERHEAD + RECORD_HEADER_BYTES + 8 * _PLANNED_FRAMES
    per_cpu = config.samples_per_second + sum(event.rate for event in config.events)
    rate = per_cpu * (len(config.pin_cpu_ids) or cpus)
    planned = int(rate * config.drain_interval_s * record * _PLANNED_DRAINS)
    if config.off_cpu is None:
        wanted = max(planned, _MIN_RING_BYTES)
    else:
        wanted = max(2 * planned, _MIN_WAIT_RING_BYTES)
    if any(event.period for event in config.events):  # these events occur in bursts
        wanted = max(wanted, _EVENT_RING_BYTES)
    wanted <<= config.map_scale_factor
    return min(ring_bytes(wanted), ring_bytes(config.max_ring_bytes // 2 + 1))
