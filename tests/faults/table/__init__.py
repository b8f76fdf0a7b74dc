"""The table of faults: what each does to the samples of all, counted by other code.

``make fault-table`` runs every scenario with an agent of its own at 99 Hz with user-space names,
and writes ``docs/faults.md`` and the summary in ``docs/reliability.md``.
``python -m tests.faults.table WORD ...`` runs those whose kind or name contains a word, and
``--fresh`` also those whose rows are there.

To add a scenario, append to ``SCENARIOS`` of a module in ``kinds`` (a new module is found by
itself)::

    def rename_threads(run):
        run.start("c", "renames.c", seconds=run.seconds)

    SCENARIOS = [
        Scenario("processes", "a thread renames itself 2,000 times a second", rename_threads),
    ]

``Scenario`` says what each field does, and ``Run`` what a fault can reach: the agent's process and
directory, its receiver, and programs that run as another user. The fault is called once the agent
samples; its return ends the measurement. Every agent also writes to a file that no fault touches,
from which the samples of a control program beside it are counted, whose CPU time gives how many
must be there. Faults that reach other agents, of the whole host, have ``alone=True``; their agents
take off-CPU samples, too.
"""
