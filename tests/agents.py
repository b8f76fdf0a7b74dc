"""Runs agents in tests, and parses the sample counts that they print on exit."""

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable

from tests.processes import LoggedProcess
from tests.public import get_public_python


def parse_account(line):
    """Parses the agent's sample counts from a log line: totals, and each kind under ``kinds``."""
    record = json.loads(line)
    assert record.keys() >= {"time", "level", "logger", "message", "account"}
    kinds = record["account"]
    return {**_add(kinds.values()), "kinds": kinds}


def _add(values: Iterable):
    values = list(values)
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _add(value[key] for value in values if key in value) for key in keys}
    return sum(values[1:], values[0])


class Agent(LoggedProcess):
    """An agent with a configuration, which is killed at the end of a ``with`` block.

    ``prefix`` is a command that runs the agent, and ``words`` are its interpreter's arguments.
    """

    def __init__(
        self,
        directory,
        configuration,
        *,
        prefix=(),
        python=None,
        words=("-m", "otel_kprofiler"),
        **options,
    ):
        self.config = directory / "agent.yaml"
        self.configure(configuration)
        python = python or get_public_python().words
        command = [*prefix, *python, *words, "run", "-c", self.config]
        options = {"stdout": subprocess.PIPE, **options}
        super().__init__(command, directory / "agent.log", **options)

    def __exit__(self, *_):
        self.kill()

    def configure(self, configuration):
        """Replaces the configuration atomically, since the agent may be reading it."""
        new = self.config.with_suffix(".new")
        new.write_text(configuration)
        new.rename(self.config)

    def wait_until_it_samples(self):
        self.wait_for_line('"sampling ')

    def reload(self):
        self.process.send_signal(signal.SIGHUP)

    def stop(self, seconds=120):
        """Stops the agent, and returns its sample counts."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, self.log
        return parse_account(out)


def ask_agent(health, path):
    """Returns the health endpoint's status and response, or status 0 if it does not respond."""
    try:
        with urllib.request.urlopen(f"http://{health}{path}", timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return 0, {}
