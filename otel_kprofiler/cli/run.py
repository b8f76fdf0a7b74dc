"""``otel-kprofiler run``: the agent."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

import click

from otel_kprofiler.config import PendingConfig

if TYPE_CHECKING:
    from otel_kprofiler.config import Config


@click.command(name="run")
@click.option(
    "-c", "--config", "path", required=True, metavar="FILE", help="YAML configuration of the agent."
)
@click.pass_obj
def command(debug: bool, path: str) -> None:
    """Run the agent beside an OpenTelemetry Collector until SIGTERM or Ctrl-C.

    SIGHUP makes it read FILE again. Prints, at the end, the account of all samples as one JSON
    object on standard output.
    """
    # Sent to the wrong process, its default would end this one.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    pending = PendingConfig(path, fork=True)
    # The rest is done while the configuration is read by another process.
    from otel_kprofiler.agent import (  # noqa: PLC0415
        Agent,
        configure_logging,
        hold_logging,
        prepare,
    )

    def configure_logs(config: Config) -> None:
        logs = config.service.telemetry.logs
        verbose = debug or config.receiver.verbose_mode
        configure_logging("debug" if verbose else logs.level, logs.encoding)

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
        load=lambda: PendingConfig(path).get(),
        on_config=configure_logs,
    )
    del symbolizer  # it is the agent's, which may have no use for it
    account = agent.run()
    json.dump(account.as_dict(), sys.stdout, indent=1)
    sys.stdout.write("\n")
