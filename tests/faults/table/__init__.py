"""Generates the fault table: the effect of each fault, as measured by independent code.

``make fault-table`` runs every scenario with a separate agent at 99 Hz, with user-space symbols,
and writes ``docs/faults.md`` and the summary in ``docs/reliability.md``.
``python -m tests.faults.table WORD ...`` runs the scenarios that have no row yet and whose kind or
name contains a word; with ``--fresh``, it also reruns scenarios that have a row.

To add a scenario, append it to ``SCENARIOS`` in a ``kinds`` module (a new module is discovered
automatically)::

    def rename_threads(run):
        run.start("c", "renames.c", seconds=run.seconds)

    SCENARIOS = [
        Scenario("processes", "a thread renames itself 2,000 times a second", rename_threads),
    ]

``Scenario`` documents each field. ``Run`` documents what a fault can access: the agent's process
and directory, its receiver, and programs that run as another user. The fault function is called
after the agent has started to sample. The measurement ends when the function returns. Every agent
also writes to a file that no fault affects. This file's samples from a control program are compared
with the program's CPU time. Faults that affect the whole host, and thus other agents, have
``alone=True``; in their runs, the agent also takes off-CPU samples.
"""
