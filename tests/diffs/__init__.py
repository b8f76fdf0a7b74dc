"""Runs ``diff`` on recordings of a load whose system calls use known fractions of the CPU time.

``python -m tests.diffs [PAIRS] [SECONDS]`` prints a table of pairs of runs, with identical loads
and with loads in which one fraction is larger.
"""
