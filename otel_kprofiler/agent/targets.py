"""Tracks the containers, pods and units that the agent is configured to sample."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_kprofiler.errors import HostError, SamplerError
from otel_kprofiler.sampling import GroupFollower

if TYPE_CHECKING:
    from otel_kprofiler.agent.agent_settings import AgentConfig
    from otel_kprofiler.host import HostFiles
    from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

_log = logging.getLogger(__name__)


class AgentTargets:
    """The configured targets. ``sampler`` is the sampler's initial configuration."""

    def __init__(self, files: HostFiles, config: AgentConfig) -> None:
        self._pids = config.sampler.target_pids
        self._follower: GroupFollower | None = None
        self.sampler = config.sampler
        if config.groups:
            self._follower = GroupFollower(files, config.groups, loader=config.loader)
            self._follower.look()
            self.sampler = self._follower.apply(config.sampler)
            _log.info("sampling %s", self._follower.describe())

    @property
    def follows(self) -> bool:
        """Returns whether there are containers, pods or units to track."""
        return self._follower is not None

    def follow(self, sampler: EbpfSampler) -> None:
        """Update the targets if containers, pods or units have started or stopped."""
        if self._follower is None or not self._follower.look():
            return
        try:
            config = self._follower.apply(self._without_targets(sampler.config))
            sampler.reconfigure(config, have_ended=True)
        except (HostError, SamplerError) as error:
            _log.error("new containers, pods and units will not be sampled: %s", error.with_fix())
            return
        _log.debug("sampling %s", self._follower.describe())

    def _without_targets(self, config: SamplerConfig) -> SamplerConfig:
        return replace(config, target_pids=self._pids, target_cgroups=(), target_descendants=False)
