"""``otel-kprofiler run``: run the agent."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final, NoReturn

import click

from otel_kprofiler.config import PendingConfig

if TYPE_CHECKING:
    from types import FrameType

    from otel_kprofiler.agent import AgentConfig

_PRINT_TIMEOUT_S: Final = 1.0
_FOREIGN: Final = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
"""Signals that the agent ignores, because their default action would terminate it."""

_log = logging.getLogger(__name__)


@click.command(name="run")
@click.option(
    "-c", "--config", "path", required=True, metavar="FILE", help="The agent's YAML configuration."
)
@click.pass_obj
def command(debug: bool, path: str) -> None:
    """Run the agent alongside an OpenTelemetry Collector until SIGTERM or Ctrl-C.

    SIGHUP reloads FILE. At exit, the agent prints to standard output how many samples were taken,
    sent and lost. The counts are printed on one line, in the log's encoding (text or JSON).
    """
    for number in _FOREIGN:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    has_early_request = False

    def note_request(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_early_request
        has_early_request = True

    signal.signal(signal.SIGHUP, note_request)
    gc.disable()  # until the agent has started: imports create only permanent objects
    # The child process needs these modules, too.
    from otel_kprofiler.agent import agent_config  # noqa: PLC0415
    from otel_kprofiler.host import raise_open_files_limit  # noqa: PLC0415

    raise_open_files_limit()
    pending = PendingConfig(path, agent_config, fork=True)
    # Import the other modules while the child process reads the configuration.
    from otel_kprofiler.agent import (  # noqa: PLC0415
        Agent,
        JsonFormatter,
        configure_logging,
        hold_logging,
        make_account_record,
        make_formatter,
        prepare,
    )

    encoding = "auto"

    def configure_logs(config: AgentConfig) -> None:
        nonlocal encoding
        encoding = config.log_encoding
        configure_logging("debug" if debug else config.log_level, encoding)

    hold_logging()
    symbolizer = prepare()
    try:
        config = pending.get()
    except BaseException:
        symbolizer.close()
        raise
    configure_logs(config)
    agent = Agent(
        config,
        symbolizer,
        load=lambda: PendingConfig(path, agent_config).get(),
        on_config=configure_logs,
    )
    del symbolizer  # keep no reference, so that the agent can free the symbolizer
    signal.signal(signal.SIGHUP, agent.request_reload)
    if has_early_request:
        agent.request_reload(signal.SIGHUP, None)
    account = agent.run()
    formatter = make_formatter(encoding, sys.stdout.fileno())
    as_json = isinstance(formatter, JsonFormatter)
    _print(formatter.format(make_account_record(account, as_json=as_json)) + "\n")
    _end()


def _end() -> NoReturn:
    """Exit without waiting for threads that a file system may block."""
    logging.shutdown()
    os._exit(0)


def _print(text: str) -> None:
    """Write to standard output, giving up after a while if no process reads the output."""
    from otel_kprofiler.host import write_all  # noqa: PLC0415 - imported with the agent

    def write() -> None:
        try:
            sys.stdout.flush()  # another thread may hold its lock while it writes
            write_all(sys.stdout.fileno(), text.encode())
        except OSError as error:
            _log.error("cannot print the sample counts: %s", error.strerror)

    writer = threading.Thread(target=write, name="kprofiler-print", daemon=True)
    writer.start()
    writer.join(_PRINT_TIMEOUT_S)
    if writer.is_alive():
        _log.error("cannot print the sample counts: no process is reading standard output")
