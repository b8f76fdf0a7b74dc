"""``diff`` of recordings of one load, whose system calls have known shares of its CPU time.

``python -m tests.diffs [PAIRS] [SECONDS]`` prints a table of pairs of runs: equal ones, and some in
which one share is larger.
"""
