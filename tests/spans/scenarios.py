"""All scenarios by name: functions that take a truth log and a duration in seconds."""

from tests.spans import asgi, interpreter, processes, wsgi

SCENARIOS = {**interpreter.SCENARIOS, **wsgi.SCENARIOS, **asgi.SCENARIOS, **processes.SCENARIOS}
