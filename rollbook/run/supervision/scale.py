"""How many processes a run should have in addition to those of its plan. Written by `rollbook scale` and by the autoscaler.

`decide` is the rule of the autoscaler: a pure function, and the supervisor acts on it. A trainer that waits shows that something is
missing; the gate and the load of the policy servers show what. A number changes by one at a time, after the same finding has lasted
for `hold_s`. The thresholds for more and for fewer are far apart, so that a number does not alternate.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from rollbook.run.config.cluster import AutoscaleConfig, ClusterConfig
from rollbook.run.directory import RunDirectory, write_json

ROLES = ("policy", "rollout", "env")


@dataclass(frozen=True, slots=True)
class Scale:
    policy: int = 0
    rollout: int = 0
    env: int = 0

    @classmethod
    def of_config(cls, config: ClusterConfig) -> "Scale":
        return cls(policy=config.policy, rollout=config.rollout, env=config.env)

    @classmethod
    def read(cls, directory: RunDirectory) -> "Scale | None":
        """The last request."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(directory.scale_file.read_text(encoding="utf-8")))
        return None

    def write(self, directory: RunDirectory) -> None:
        write_json(directory.scale_file, self.as_dict())

    def as_dict(self) -> dict[str, int]:
        return {role: self.of(role) for role in ROLES}

    def of(self, role: str) -> int:
        return int(getattr(self, role))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The state of a run, averaged over a few seconds."""

    trainer_wait: float
    """Share of the time in which the trainer waited for a batch, 0 to 1."""
    gate_free: int
    """Groups that the gate would admit now and no dispatcher has requested."""
    queued_batches: float
    """Finished groups that wait for a batch, in batches."""
    policy_load: float
    """Requests per policy server, running and waiting."""
    num_policies: int
    """Policy servers that serve now."""


class ScaleFinding(StrEnum):
    BALANCED = "balanced"
    FEW_POLICIES = "few_policies"
    FEW_DISPATCHERS = "few_dispatchers"
    MANY_DISPATCHERS = "many_dispatchers"
    MANY_POLICIES = "many_policies"


@dataclass(frozen=True, slots=True)
class Streak:
    """How long the same finding has lasted."""

    finding: ScaleFinding = ScaleFinding.BALANCED
    since: float = 0.0


CHANGES: dict[ScaleFinding, tuple[str, int]] = {
    ScaleFinding.FEW_POLICIES: ("policy", 1),
    ScaleFinding.FEW_DISPATCHERS: ("rollout", 1),
    ScaleFinding.MANY_DISPATCHERS: ("rollout", -1),
    ScaleFinding.MANY_POLICIES: ("policy", -1),
}


def find(config: AutoscaleConfig, scale: Scale, seen: LoadSample) -> ScaleFinding:
    """What the run has too few or too many of, within the bounds of the config."""
    is_starved = seen.trainer_wait > config.starved_wait and seen.queued_batches < 1
    is_fed = seen.trainer_wait < config.fed_wait and seen.gate_free == 0
    if is_starved and seen.policy_load > config.busy_requests:
        return ScaleFinding.FEW_POLICIES if scale.policy < config.max_policy else ScaleFinding.BALANCED
    if is_starved and seen.gate_free > 0:
        return ScaleFinding.FEW_DISPATCHERS if scale.rollout < config.max_rollout else ScaleFinding.BALANCED
    if is_fed and config.max_rollout and scale.rollout > config.min_rollout:
        return ScaleFinding.MANY_DISPATCHERS
    if is_fed and config.max_policy and scale.policy > config.min_policy and seen.num_policies > 1:
        # The others get the requests of the one that leaves, and must then be far from busy.
        load_after = seen.policy_load * seen.num_policies / (seen.num_policies - 1)
        if load_after < config.busy_requests / 2:
            return ScaleFinding.MANY_POLICIES
    return ScaleFinding.BALANCED


def decide(
    config: AutoscaleConfig, scale: Scale, seen: LoadSample, streak: Streak, *, now: float
) -> tuple[Scale, Streak]:
    """The numbers that the run should have now, and the streak for the next call."""
    bounded = scale
    if config.max_policy:
        bounded = replace(bounded, policy=min(max(scale.policy, config.min_policy), config.max_policy))
    if config.max_rollout:
        bounded = replace(bounded, rollout=min(max(scale.rollout, config.min_rollout), config.max_rollout))
    finding = find(config, bounded, seen)
    if finding is not streak.finding:
        return bounded, Streak(finding, now)
    if finding is ScaleFinding.BALANCED or now - streak.since < config.hold_s:
        return bounded, streak
    role, change = CHANGES[finding]
    # The finding must last again: a new process needs time until its effect is visible.
    return replace(bounded, **{role: bounded.of(role) + change}), Streak(ScaleFinding.BALANCED, now)
