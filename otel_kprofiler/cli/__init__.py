"""The command line. Each command has a module that is imported when the command is first used."""

import signal
import threading

# While the libraries load, Ctrl-C ends the process without a traceback.
_handler = signal.getsignal(signal.SIGINT)
_is_ours = threading.current_thread() is threading.main_thread() and (
    _handler is signal.default_int_handler
)
if _is_ours:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from otel_kprofiler.cli.main import main  # noqa: E402

if _is_ours:
    signal.signal(signal.SIGINT, _handler)
