"""A minimal configuration file, to which tests add the lines under test."""

from otel_kprofiler.agent import agent_config
from otel_kprofiler.config import parse_config

MINIMAL = """\
receivers:
  kprofiler:
exporters:
  debug:
service:
  pipelines:
    profiles: {receivers: [kprofiler], exporters: [debug]}
"""


def with_receiver(block):
    """Returns a configuration file with the given lines in the receiver block."""
    lines = "".join(f"    {line}\n" for line in block.splitlines())
    return MINIMAL.replace("kprofiler:\n", f"kprofiler:\n{lines}")


def load_agent(block):
    """Returns the settings for an agent with the given lines in its receiver block."""
    return agent_config(parse_config(with_receiver(block), path="agent.yaml", environ={}).config)
