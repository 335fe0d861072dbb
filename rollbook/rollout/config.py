"""The `[rollout]` section of a run: group size, limits of an episode, sampling, rewards, worker processes."""

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from rollbook.contracts.freshness import default_quorum
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.rewards.config import RewardsConfig, TeacherConfig
from rollbook.rollout.settings import EpisodeLimits, is_ready, rollout_name, score_key

ROUNDING = 1e-9
"""A sum of weighted scores may be this much below the number that it stands for."""


class SamplingConfig(BaseModel, frozen=True, extra="forbid"):
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. 0 (greedy) is rejected: it does not explore."""

    max_tokens: int = Field(default=2048, ge=1)
    """Maximum number of tokens of one turn. `max_total_tokens` and the model's context may leave fewer. An episode whose last
    answer is cut is truncated."""

    complete_at_max_tokens: bool = False
    """An answer of `max_tokens` tokens is complete, not truncated: for actions that have this length by design."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1 keeps the whole distribution, as the trainer's logprobs assume."""

    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens; 0 means all."""

    def params(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            complete_at_max_tokens=self.complete_at_max_tokens,
        )


class EpisodeSettings(BaseModel, frozen=True, extra="forbid"):
    """`rollout.settings` of the default rollout function."""

    system_prompt: str | None = None
    """A first message with the role `system`."""

    reward: Literal["sum", "last"] = "sum"
    """The reward of an episode: the sum over its steps, or that of its last step."""

    state_fact: str | None = None
    """Name of the observation's fact that identifies the state of the environment, for `trainer.advantage = "gigpo"`. None: the
    text of the observation."""

    on_rewrite: Literal["error", "fork"] = "fork"
    """If the chat template rewrites earlier turns (some remove their reasoning): continue in a new sequence of the same sample, or
    fail the episode."""

    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tools that the chat template describes to the policy, in OpenAI's format."""

    template: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the chat template: `{ enable_thinking = false }`."""

    max_thinking_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of thought in one turn. Then the end of the thought is written into the sequence (not trained), and
    the policy answers with the rest of `rollout.sampling.max_tokens`. None: no limit of its own."""

    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    """The texts around a thought. A turn thinks if its prompt ends with the first one, or its text begins with it: a limit must be
    longer than that text."""


class AdaptiveConfig(BaseModel, frozen=True, extra="forbid"):
    """Adapt the number of groups in flight to the smallest one that keeps the engine busy. More groups only become stale."""

    enabled: bool = False
    """If false, as many groups are in flight as workers and gate allow."""

    least_groups: int = Field(default=2, ge=1)
    """Lower bound of groups in flight."""

    interval_s: float = Field(default=10.0, gt=0)
    """Minimum time over which throughput is measured before the number changes."""


class RolloutConfig(BaseModel, frozen=True, extra="forbid"):
    function: str = Field(default="chat", min_length=1)
    """`chat` plays any environment as a chat, `tools` answers questions with your functions as tools, `agent` runs a program that
    calls OpenAI's API, `remote` calls a service over HTTP, `verifiers` is set by `env.name`. Your own: a module with a
    `make_rollout(setup)`, or `module:attribute`; the attribute may also be the async function itself."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of that function."""

    completions_per_prompt: int = Field(default=8, ge=1)
    """Episodes of one group. Advantages are relative to the group, so it needs at least two; 1 is possible with
    `trainer.advantage = "reinforce_pp"`, which compares over the batch."""

    min_samples: int = Field(default=2, ge=1)
    """A group with fewer scorable samples is dropped as invalid."""

    quorum: int | None = Field(default=None, ge=2)
    """With `gate.batch_policy = "parts"`: a group is first submitted when this many of its samples are scored; the others follow as
    they finish. The rewards of the quorum are the baseline of all samples of the group. None: three quarters of the group.
    Fixed for the whole run."""

    retry_budget: int = Field(default=4, ge=0)
    """Maximum number of unscorable episodes of one group that are played again."""

    drop_constant_reward: bool = True
    """Drop groups whose scorable samples all have the same reward: their advantages are zero. Groups with token advantages of the
    producer are kept."""

    turn_credit: Literal["off", "rewards", "lengths", "states"] | None = None
    """Keep groups with equal rewards if their turns differ. `rewards`: in what later turns earn. `lengths`: also in their number,
    which changes discounted returns. `states`: also in the states that they visit. None: what `trainer.advantage` compares."""

    score_credit: tuple[str, ...] | None = None
    """Keep groups with equal rewards if the scores of one of these reward functions differ. None: with `trainer.advantage = "gdpo"`
    those that have a weight in it."""

    filter: str | None = None
    """`module:function` of your filter. Takes the group; returns the reason to drop it, or None."""

    max_turns: int = Field(default=6, ge=1)
    """Maximum number of turns of one episode."""

    max_total_tokens: int = Field(default=4096, ge=2)
    """Maximum number of tokens of one sequence: prompt, completions and observations."""

    max_seconds: float = Field(default=120.0, gt=0)
    """Time limit of one episode. After it the episode ends as truncated; a function that does not return is cancelled. Time in the
    engine's queue or waiting for a sandbox does not count."""

    solved_at: float | None = Field(default=None, allow_inf_nan=False)
    """A sample with at least this reward counts as solved, where the environment does not say whether it is. Unset: it is not
    known, and reports show the reward instead."""

    rewards: RewardsConfig = RewardsConfig()

    teacher: tuple[TeacherConfig, ...] = ()
    """A model to learn from, see `[rollout.teacher]`, or a list of several."""

    sampling: SamplingConfig = SamplingConfig()

    oversample: int = Field(default=0, ge=0)
    """Extra episodes started for each group. When the group is full, the rest is dropped as surplus. This is faster, but prefers
    short episodes."""

    step_s: float = Field(default=120.0, gt=0)
    """Time limit of one reset or step of the environment. After it the episode is unscorable."""

    open_s: float = Field(default=300.0, gt=0)
    """Time limit for opening an environment: waiting for a free one and for its sandbox."""

    grace_s: float = Field(default=5.0, ge=0)
    """Time between the end of `max_seconds` and the cancellation of the rollout function, so that it can return by itself."""

    adaptive: AdaptiveConfig = AdaptiveConfig()

    fairness_every_s: float = Field(default=30.0, gt=0)
    """Interval of the selection bias audit, which compares trained and dispatched groups by length, latency and reward."""

    fairness_window: int = Field(default=1024, ge=50)
    """Number of most recent groups in that audit."""

    workers: int = Field(default=1, ge=1)
    """Number of worker processes. 1; with a GPU half of the cores, up to 8."""

    groups_per_worker: int = Field(default=64, ge=1)
    """Maximum number of groups that one worker plays concurrently."""

    worker_start_s: float = Field(default=120.0, gt=0)
    """Time limit for a new worker to become ready; a slower one is replaced."""

    worker_silence_s: float = Field(default=60.0, gt=1)
    """A worker whose event loop is silent for this long is replaced."""

    worker_stop_s: float = Field(default=5.0, gt=0)
    """Time for a worker to close its environments on a stop request, and again after SIGTERM."""

    heartbeat_s: float = Field(default=5.0, gt=0)
    """Interval of heartbeats to the ledger. Keep it well below the ledger's owner_ttl_s."""

    @field_validator("teacher", mode="before")
    @classmethod
    def _one_or_several(cls, teacher: Any) -> Any:
        return [] if teacher is None else [teacher] if isinstance(teacher, dict | TeacherConfig) else teacher

    @field_validator("function")
    @classmethod
    def _shorten(cls, function: str) -> str:
        return rollout_name(function)

    def is_solved(self, sample: RolloutSample) -> bool | None:
        """Whether a sample is solved; None: not known, or not yet."""
        if not is_ready(sample):
            return sample.solved
        if self.rewards.solved_by is not None:
            value = sample.metrics.get(score_key(self.rewards.solved_by))
            if value is None and not sample.is_scorable:
                return None  # a function of groups decides it
            limit = 1.0 if self.solved_at is None else self.solved_at
            return value is not None and value >= limit - ROUNDING
        if sample.solved is not None or sample.reward is None or self.solved_at is None:
            return sample.solved
        return sample.reward >= self.solved_at - ROUNDING

    @model_validator(mode="after")
    def _check_group_size(self) -> "RolloutConfig":
        if self.min_samples > max(2, self.completions_per_prompt):
            raise ValueError(
                f"min_samples is {self.min_samples}, but a group has {self.completions_per_prompt} samples: "
                f"every group would be dropped; lower min_samples or raise completions_per_prompt"
            )
        if self.quorum is not None and self.quorum > self.completions_per_prompt:
            raise ValueError(
                f"quorum is {self.quorum}, but a group has {self.completions_per_prompt} samples: it would never be reached; "
                f"lower quorum or raise completions_per_prompt"
            )
        if self.rewards.see_groups and self.completions_per_prompt == 1:
            raise ValueError(
                "completions_per_prompt is 1, so the reward functions of groups have nothing to compare; raise it, or remove them"
            )
        return self

    @property
    def quorum_size(self) -> int:
        """Scored samples that complete the first part of a group."""
        return self.quorum or default_quorum(self.completions_per_prompt)

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(
            max_turns=self.max_turns, max_total_tokens=self.max_total_tokens, max_seconds=self.max_seconds
        )

    @property
    def episodes_per_group(self) -> int:
        """Episodes started for one group."""
        return self.completions_per_prompt + self.oversample

    @property
    def slots(self) -> int:
        """Maximum number of groups in flight in this dispatcher."""
        return self.workers * self.groups_per_worker
