"""Checks the counts of sending queues."""


def check(queue):
    """Returns a queue's counts. Fails unless they account for each accepted or carried sample."""
    counts = queue.counts()
    accounted = counts.exported + sum(counts.lost.values()) + counts.queued
    assert counts.accepted + counts.carried == accounted
    return counts
