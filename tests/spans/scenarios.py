"""All scenarios by name: functions of a truth to note in, and of the seconds to go on."""

from tests.spans import asgi, interpreter, processes, wsgi

SCENARIOS = {
    **interpreter.SCENARIOS,
    **wsgi.SCENARIOS,
    **asgi.SCENARIOS,
    **processes.SCENARIOS,
}
