"""What an operator may set about rollouts: group size and floor, limits of an episode, workers."""

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from rollbook.contracts.policy import SamplingParams
from rollbook.rollout.settings.groups import GroupRules
from rollbook.rollout.settings.limits import EpisodeLimits
from rollbook.rollout.settings.rewards import Missing, RewardFunction, RewardRules


class SamplingConfig(BaseModel, frozen=True, extra="forbid"):
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampling distribution. Greedy sampling (0) explores nothing and is refused."""

    max_tokens: int = Field(default=256, ge=1)
    """Tokens of one turn at most."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; 1 keeps the whole distribution, which is what the trainer's logprobs assume."""

    top_k: int = Field(default=0, ge=0)
    """Keep this many tokens; 0 keeps all."""

    def params(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
        )


class EpisodeSettings(BaseModel, frozen=True, extra="forbid"):
    """What the default rollout function reads from `rollout.settings`."""

    system_prompt: str | None = None
    """A first message with the role `system`."""

    reward: Literal["sum", "last"] = "sum"
    """The reward of an episode: the sum over its steps, or that of its last step."""

    on_rewrite: Literal["error", "fork"] = "error"
    """When the chat template rewrites earlier turns: give up the episode, or go on in a further sequence."""


class RewardFunctionConfig(BaseModel, frozen=True, extra="forbid"):
    """One entry for each function, under a name of your choice: `[rollout.rewards.functions.correct]`."""

    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:function`, plain or async: takes a `RewardCase`, returns a number, or None for what it cannot score."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its share in the sum. 0: it is measured and recorded only."""


class RewardsConfig(BaseModel, frozen=True, extra="forbid"):
    """Reward functions of your own, each in a process apart: one that never ends is killed and stalls nothing."""

    functions: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """By name. The reward of a sample is the weighted sum of what they say."""

    environment_weight: float = Field(default=0.0, allow_inf_nan=False)
    """Share of the reward that the episode itself brought. 0: the functions alone decide."""

    missing: Missing = Missing.UNSCORABLE
    """None or NaN of one function: the sample is unscorable, or the others make the reward. It is never 0."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds of one call. Then its process is killed and replaced, and the sample is unscorable."""

    start_s: float = Field(default=60.0, gt=0)
    """Seconds in which a process must have imported the functions."""

    processes: int = Field(default=2, ge=1)
    """Processes of each worker for plain functions: how many calls run at the same time."""

    concurrent: int = Field(default=32, ge=1)
    """Calls of async functions that run side by side in their one process."""

    @model_validator(mode="after")
    def _nothing_goes_unread(self) -> "RewardsConfig":
        fields = type(self).model_fields
        strays = sorted(name for name in fields if name != "functions" and getattr(self, name) != fields[name].default)
        if not self.functions and strays:
            raise ValueError(f"{', '.join(strays)}: there are no reward functions; name some under functions")
        if self.functions and not self.environment_weight and not any(f.weight for f in self.functions.values()):
            raise ValueError("every weight is 0: no sample would ever have a reward; give one of them a weight")
        bad = [name for name in self.functions if not name.isidentifier() or name == "environment"]
        if bad:
            raise ValueError(f"{', '.join(bad)}: a name must be letters, digits and underscores, and not `environment`")
        return self

    @property
    def rules(self) -> RewardRules | None:
        if not self.functions:
            return None
        return RewardRules(
            functions=tuple(RewardFunction(name=n, path=f.path, weight=f.weight) for n, f in self.functions.items()),
            environment_weight=self.environment_weight,
            missing=self.missing,
            timeout_s=self.timeout_s,
            start_s=self.start_s,
            processes=self.processes,
            concurrent=self.concurrent,
        )


class AdaptiveConfig(BaseModel, frozen=True, extra="forbid"):
    """Seek the number of groups in flight that keeps the engine busy: more would only wait, and their tokens grow old."""

    enabled: bool = False
    """Off: as many groups as workers and gate allow."""

    least_groups: int = Field(default=2, ge=1)
    """It never plays fewer at a time."""

    interval_s: float = Field(default=10.0, gt=0)
    """Seconds over which throughput is measured before the number moves, at least."""


class RolloutConfig(BaseModel, frozen=True, extra="forbid"):
    function: str = Field(default="rollbook.rollout.episodes.chat", min_length=1)
    """Module that offers `make_rollout(setup)`, or `module:attribute`. The default plays any environment as a chat."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """A free table for that module."""

    completions_per_prompt: int = Field(default=8, ge=2)
    """Episodes of one draw. Advantages are relative to the group, so one alone teaches nothing."""

    min_samples: int = Field(default=2, ge=1)
    """The floor: with fewer scorable samples the group is dropped as invalid."""

    retry_budget: int = Field(default=4, ge=0)
    """How many unscorable episodes of one group are played again, all siblings together."""

    drop_constant_reward: bool = True
    """Drop groups whose scorable samples all earned the same: their advantages are zero."""

    filter: str | None = None
    """`module:function` of a filter of your own: takes the group, returns the reason to drop it, or None."""

    max_turns: int = Field(default=6, ge=1)
    """Turns of one episode at most."""

    max_total_tokens: int = Field(default=4096, ge=2)
    """Tokens of one sequence at most: prompt, completions and observations."""

    max_seconds: float = Field(default=120.0, gt=0)
    """Seconds of one episode; then it ends as truncated, and a function that does not end by itself is cancelled. Waiting for the
    engine's queue or for a sandbox does not count."""

    rewards: RewardsConfig = RewardsConfig()

    sampling: SamplingConfig = SamplingConfig()

    oversample: int = Field(default=0, ge=0)
    """Episodes of a group begun beyond its size. When the group is full, those that still play are dropped as surplus: it is
    faster, and it favours what finishes first."""

    step_s: float = Field(default=120.0, gt=0)
    """Wall seconds of one reset or step of a world; then the episode is given up, unscored."""

    open_s: float = Field(default=300.0, gt=0)
    """How long an episode waits for a world: for a place on its server, and for the sandbox to be ready."""

    grace_s: float = Field(default=5.0, ge=0)
    """From the end of an episode's time to its cancellation: a function that watches its time ends by itself within it."""

    adaptive: AdaptiveConfig = AdaptiveConfig()

    fairness_every_s: float = Field(default=30.0, gt=0)
    """Seconds between audits that compare the trained groups with the dispatched ones: length, latency, reward."""

    fairness_window: int = Field(default=1024, ge=50)
    """Groups that such an audit looks back on."""

    workers: int = Field(default=1, ge=1)
    """Worker processes."""

    groups_per_worker: int = Field(default=64, ge=1)
    """Groups one worker plays at the same time."""

    worker_start_s: float = Field(default=120.0, gt=0)
    """From spawning a worker to its ready message; a slower one is replaced."""

    worker_silence_s: float = Field(default=60.0, gt=1)
    """A worker whose event loop does not answer for this long is replaced. Keep it above the slowest reward function."""

    worker_stop_s: float = Field(default=5.0, gt=0)
    """Seconds a worker gets to close its worlds when asked to stop, and as many again after SIGTERM."""

    heartbeat_s: float = Field(default=5.0, gt=0)
    """Seconds between signs of life to the ledger. Keep it well below the ledger's owner_ttl_s."""

    @model_validator(mode="after")
    def _the_floor_can_be_reached(self) -> "RolloutConfig":
        if self.min_samples > self.completions_per_prompt:
            raise ValueError(
                f"min_samples is {self.min_samples}, but a group has {self.completions_per_prompt} samples: "
                f"every group would be dropped; lower min_samples or raise completions_per_prompt"
            )
        return self

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(
            max_turns=self.max_turns, max_total_tokens=self.max_total_tokens, max_seconds=self.max_seconds
        )

    @property
    def group_rules(self) -> GroupRules:
        return GroupRules(
            completions_per_prompt=self.completions_per_prompt,
            min_samples=self.min_samples,
            retry_budget=self.retry_budget,
            max_seconds=self.max_seconds,
            step_s=self.step_s,
            open_s=self.open_s,
            grace_s=self.grace_s,
            drop_constant_reward=self.drop_constant_reward,
            filter=self.filter,
            oversample=self.oversample,
        )

    @property
    def episodes_per_group(self) -> int:
        """Episodes of one group that may be in flight."""
        return self.completions_per_prompt + self.oversample

    @property
    def slots(self) -> int:
        """Groups that may be in flight in this dispatcher."""
        return self.workers * self.groups_per_worker
