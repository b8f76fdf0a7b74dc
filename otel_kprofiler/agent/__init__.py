"""The agent: life cycle, logs, health endpoint, systemd. Submodules are imported on first use."""

from typing import TYPE_CHECKING

from otel_kprofiler.late import late_names

if TYPE_CHECKING:
    from otel_kprofiler.agent.agent import Agent, prepare
    from otel_kprofiler.agent.agent_settings import AgentConfig, agent_config
    from otel_kprofiler.agent.announcements import make_account_record
    from otel_kprofiler.agent.logs import (
        JsonFormatter,
        configure_logging,
        hold_logging,
        make_formatter,
    )
    from otel_kprofiler.agent.memory import give_back_memory

_MODULES = {
    "agent": "Agent prepare",
    "agent_settings": "AgentConfig agent_config",
    "announcements": "make_account_record",
    "logs": "JsonFormatter configure_logging hold_logging make_formatter",
    "memory": "give_back_memory",
}

__getattr__ = late_names(__name__, _MODULES)
