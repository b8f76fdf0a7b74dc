"""Checks the counts of sending queues."""


def check(queue):
    """Returns a queue's counts; asserts that they cover all accepted and carried samples."""
    counts = queue.counts()
    accounted = counts.exported + sum(counts.lost.values()) + counts.queued
    assert counts.accepted + counts.carried == accounted
    return counts
