"""A scripted sampler, and pipelines that process its samples."""

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import ON_CPU
from otel_kprofiler.pipeline import Pipeline, WindowSchedule
from otel_kprofiler.processes import ProcessResources
from otel_kprofiler.sampling import SamplerCounts

SECOND = 1_000_000_000


class Time:
    boot = 1000 * SECOND

    def boot_ns(self):
        return self.boot

    def unix_ns(self):
        return self.boot + 10**18


class ScriptedSampler:
    """A sampler that returns scripted samples and advances the clock whenever it waits."""

    kinds = (ON_CPU,)
    period_ns = SECOND // 100

    def __init__(self, time):
        self.time = time
        self.ready = []
        self.complete = None
        self.received = 0
        self.lost = {}
        self.running = False
        self.first_after_s = None
        self.most_s = float("inf")
        self.waits = []

    def start(self):
        self.running = True

    def wait(self, timeout_s):
        self.waits.append(("more", round(timeout_s, 3)))
        self.time.boot += round(timeout_s * SECOND)

    def wait_new(self, least_s, most_s):
        self.waits.append(("new", round(least_s, 3), round(most_s, 3)))
        self.time.boot += round(min(most_s, self.most_s) * SECOND)

    def wait_first(self, timeout_s):
        self.waits.append(("first", round(timeout_s, 3)))
        comes = self.first_after_s is not None and self.first_after_s < timeout_s
        self.time.boot += round((self.first_after_s if comes else timeout_s) * SECOND)
        return comes

    def drain(self):
        samples, self.ready = self.ready, []
        self.received += len(samples)
        return samples

    def complete_until_ns(self):
        return self.time.boot if self.complete is None else self.complete

    def counts(self):
        taken = self.received + sum(self.lost.values())
        return {"on_cpu": SamplerCounts(taken, dict(self.lost), self.received, {})}

    def read_waits(self):
        return {}

    def stop(self):
        self.running = False

    def close(self):
        pass


def start_pipeline(tmp_path, sampler, symbols, windows, **settings):
    """Starts a pipeline with one-second windows, for a host without processes."""
    clock = Clock(sampler.time)
    pipeline = Pipeline(
        sampler=sampler,
        stacks=symbols,
        resources=ProcessResources(Access(str(tmp_path)), clock, {}),
        schedule=WindowSchedule(SECOND),
        sink=windows.append,
        clock=clock,
        **settings,
    )
    pipeline.start()
    return pipeline
