"""Runs ``diff`` on recordings of a load whose system calls have known shares of CPU time.

``python -m tests.diffs [PAIRS] [SECONDS]`` prints a table of pairs of runs, with equal loads and
with loads in which one share is larger.
"""
