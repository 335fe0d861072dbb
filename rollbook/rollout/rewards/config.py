"""The sections `[rollout.rewards]` and `[rollout.teacher]` of a run: reward functions, judges and teachers."""

from string import Template
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from rollbook.contracts.trajectory import MAX_WIDTH
from rollbook.contracts.user_errors import did_you_mean
from rollbook.rollout.settings import REWARDS, JudgeSettings, Missing, RewardFunction, RewardRules, TeacherSettings


class JudgeConfig(BaseModel, frozen=True, extra="forbid"):
    """A model that scores episodes: `judge = { url = "https://host/v1", model = "name", rubric = "..." }`."""

    url: str = Field(pattern=r"^https?://")
    """Base URL of an OpenAI- or Anthropic-compatible server, up to and including `/v1`."""

    model: str = Field(min_length=1)
    """Name of the model."""

    rubric: str = ""
    """What a good episode is, in words."""

    prompt_file: str | None = None
    """A text file with the whole prompt, next to the config file. It may have $rubric, $task, $conversation, $response, $low and
    $high; for a group $answers and $asked instead of $response. None: a prompt with all of them."""

    api: Literal["openai", "anthropic"] = "openai"
    """`openai`: POST url/chat/completions. `anthropic`: POST url/messages."""

    api_key_env: str | None = None
    """Environment variable that contains the API key."""

    low: float = Field(default=0.0, allow_inf_nan=False)
    """The lowest score."""

    high: float = Field(default=1.0, allow_inf_nan=False)
    """The highest score. A score outside of the range is no answer."""

    structured: bool = True
    """Ask for a JSON object by schema (a forced tool call with `anthropic`). If false, the prompt alone asks for it."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of its answer. Unset: 1024, and for a group 96 more for each further answer that it scores."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request."""

    attempts: int = Field(default=5, ge=1)
    """Requests for one score, if they fail or their answers are no score. Then the sample is unscorable."""

    first_wait_s: float = Field(default=1.0, gt=0)
    """Wait before the second attempt. Later ones are longer, up to 30 s, or as long as the server asks for."""

    concurrent: int = Field(default=16, ge=1)
    """Maximum number of concurrent requests of one worker process."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    """Maximum rate of one worker process. None: no limit."""

    price_in: float = Field(default=0.0, ge=0)
    """Price of a million tokens of prompts, for `judge/cost`."""

    price_out: float = Field(default=0.0, ge=0)
    """Price of a million tokens of answers."""

    @model_validator(mode="after")
    def _check(self) -> "JudgeConfig":
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if not self.rubric and self.prompt_file is None:
            raise ValueError("a judge needs a rubric, or a prompt_file that contains one")
        return self


class TeacherConfig(BaseModel, frozen=True, extra="forbid"):
    """A model whose log-probabilities of the sampled tokens are stored with each sample, for `trainer.distill_coef`. One table, or
    several (`[[rollout.teacher]]`) of which each task gets the first that fits it."""

    url: str | None = Field(default=None, pattern=r"^https?://")
    """Base URL of a policy server or of vLLM, up to and including `/v1`."""

    model: str | None = Field(default=None, min_length=1)
    """Name of the model. It must have the token ids of the policy; this is checked."""

    policy: bool = False
    """The policy is its own teacher, with `context` in front of what it saw. Replaces `url` and `model`."""

    context: str | None = None
    """Text that only the teacher sees, in front of the sequence: a hint, the solution. `$NAME` is a field of the task; `$feedback`
    is what the judges wrote about the episode, `$reward` its reward."""

    context_role: str | None = None
    """Send the context as a chat message of this role, such as `system`. None: as plain text."""

    top_k: int = Field(default=0, ge=0, le=MAX_WIDTH)
    """Store this many of the teacher's likeliest tokens at each trained token, for `trainer.distill_kl`. `rollbook policy serve`
    gives up to 20, vLLM its `--max-logprobs`."""

    tasks: dict[str, str] = {}
    """Field of a task to a pattern that its value must match, such as `{domain = "maths*"}`; all of them. Empty: every task."""

    tokenizer_check: Literal["digest", "text"] = "digest"
    """`digest`: the vocabularies must be equal, if the server gives the digest of its own. `text`: only the ids of a test text must
    be, for a teacher with more tokens than the policy."""

    api_key_env: str | None = None
    """Environment variable that contains the API key."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request."""

    attempts: int = Field(default=5, ge=1)
    """Requests for the scores of one sequence. Then the sample is unscorable."""

    first_wait_s: float = Field(default=1.0, gt=0)
    """Wait before the second attempt. Later ones are longer, up to 30 s."""

    concurrent: int = Field(default=16, ge=1)
    """Maximum number of concurrent requests of one worker process."""

    @model_validator(mode="after")
    def _check(self) -> "TeacherConfig":
        if self.policy and (self.url is not None or self.model is not None or self.api_key_env is not None):
            raise ValueError("policy = true asks the run's own policy server: remove url, model and api_key_env")
        if self.policy and self.context is None:
            raise ValueError("policy = true needs a context: without one, the policy would be compared with itself")
        if not self.policy and (self.url is None or self.model is None):
            raise ValueError("a teacher needs url and model, or policy = true")
        if self.context_role is not None and self.context is None:
            raise ValueError("context_role needs a context")
        if self.context is not None and not Template(self.context).is_valid():
            raise ValueError("context: a $ must be followed by a name; write $$ for a dollar sign")
        return self

    @property
    def settings(self) -> TeacherSettings:
        return TeacherSettings(**self.model_dump())


class RewardFunctionConfig(BaseModel, frozen=True, extra="forbid"):
    """One table for each function, with a name of your choice: `[rollout.rewards.functions.correct]`."""

    path: str | None = Field(default=None, pattern=r"^([\w.]+:)?\w+$")
    """`module:function`, plain or async. Takes a `RewardCase`; returns a number, a number for each turn, or None if it cannot
    score. Or a built-in function of groups: `diversity`, `pass_at_2`, `pass_at_4`, `pass_at_8`."""

    judge: tuple[JudgeConfig, ...] = ()
    """A model that scores instead of a function, or a list of several."""

    vote: Literal["mean", "median", "majority"] = "mean"
    """How the scores of several judges are combined. More than half of them must have answered."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Weight in the sum. 0: recorded only."""

    group: bool = False
    """It scores the samples of a group together: takes a list of `RewardCase`, returns a list with a number or None for each. A
    judge compares them. With `gate.batch_policy = "parts"` the quorum is scored together, each late sample alone against it."""

    whole_group: bool = False
    """Like `group`, for a function that needs all samples of the group at once: the batch policy is then `trim` by default, and
    `parts` is refused."""

    @property
    def sees_group(self) -> bool:
        return self.group or self.whole_group or self.path in REWARDS

    @field_validator("judge", mode="before")
    @classmethod
    def _one_or_several(cls, judge: Any) -> Any:
        return [judge] if isinstance(judge, dict | JudgeConfig) else judge

    @model_validator(mode="after")
    def _check_source(self) -> "RewardFunctionConfig":
        if (self.path is None) == (not self.judge):
            raise ValueError("a reward function needs either a path or a judge")
        return self


class RewardsConfig(BaseModel, frozen=True, extra="forbid"):
    """Your reward functions. They run in separate processes, so one that hangs is killed without stalling rollouts."""

    functions: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """By name. The reward of a sample is the weighted sum of their values."""

    environment_weight: float = Field(default=0.0, allow_inf_nan=False)
    """Weight of the reward that the episode returned. 0: only the functions count."""

    solved_by: str | None = Field(default=None, min_length=1)
    """Name of the function that decides whether a sample is solved: its value is at least `rollout.solved_at`, or 1 if unset.
    Its weight may be 0. Unset: the environment decides, or the reward."""

    missing: Missing = Missing.UNSCORABLE
    """If a function returns None or NaN: the sample is unscorable, or the other functions make the reward. It is never 0."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call. After it the process is killed and replaced, and the sample is unscorable."""

    start_s: float = Field(default=60.0, gt=0)
    """Time limit for a new process to import the functions."""

    processes: int = Field(default=2, ge=1)
    """Processes of each worker for plain functions: the number of concurrent calls."""

    concurrent: int = Field(default=32, ge=1)
    """Maximum number of concurrent calls of async functions, which share one process."""

    @model_validator(mode="after")
    def _check_functions(self) -> "RewardsConfig":
        fields = type(self).model_fields
        strays = sorted(name for name in fields if name != "functions" and getattr(self, name) != fields[name].default)
        if not self.functions and strays:
            raise ValueError(f"{', '.join(strays)}: no effect without reward functions; add some under functions")
        if self.functions and not self.environment_weight and not any(f.weight for f in self.functions.values()):
            raise ValueError("every weight is 0, so no sample would have a reward; set one of them")
        if self.solved_by is not None and self.solved_by not in self.functions:
            raise ValueError(
                f"solved_by = {self.solved_by!r} is no function; the functions are: {', '.join(self.functions)}"
                f"{did_you_mean(self.solved_by, list(self.functions))}"
            )
        bad = [name for name in self.functions if not name.isidentifier() or name == "environment"]
        if bad:
            raise ValueError(
                f"{', '.join(bad)}: a name must consist of letters, digits and underscores, and must not be `environment`"
            )
        statistics = {
            "seconds",
            "seconds_max",
            *(f"{one}_{what}" for one in self.functions for what in ("std", "unscored")),
        }
        if clashes := sorted(statistics & self.functions.keys()):
            raise ValueError(
                f"{', '.join(clashes)}: the metric reward/{clashes[0]} has another meaning; choose another name"
            )
        return self

    @property
    def see_groups(self) -> bool:
        """Whether a function scores samples together."""
        return any(function.sees_group for function in self.functions.values())

    @property
    def rules(self) -> RewardRules | None:
        if not self.functions:
            return None
        return RewardRules(
            functions=tuple(_function(name, config) for name, config in self.functions.items()),
            environment_weight=self.environment_weight,
            missing=self.missing,
            timeout_s=self.timeout_s,
            start_s=self.start_s,
            processes=self.processes,
            concurrent=self.concurrent,
        )


def _function(name: str, config: RewardFunctionConfig) -> RewardFunction:
    return RewardFunction(
        name=name,
        path=config.path or "",
        weight=config.weight,
        judges=tuple(JudgeSettings(**judge.model_dump()) for judge in config.judge),
        vote=config.vote,
        is_of_group=config.sees_group,
    )
