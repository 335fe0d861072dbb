"""The settings of environments and of the environment server."""

from typing import Any

from pydantic import BaseModel, Field, SecretStr, model_validator

ENVIRONMENTS = {
    "arithmetic": "rollbook.envs.builtin.arithmetic:Arithmetic",
    "aws": "rollbook.envs.builtin.awscli.environment:AwsCliEnvironment",
    "code": "rollbook.envs.builtin.code:Code",
    "delayed_number_guessing": "rollbook.envs.builtin.number_guessing:DelayedNumberGuessing",
    "files": "rollbook.envs.builtin.shell:Files",
    "harbor": "rollbook.envs.builtin.shell:Harbor",
    "maths": "rollbook.envs.builtin.maths:Maths",
    "number_guessing": "rollbook.envs.builtin.number_guessing:NumberGuessing",
    "question": "rollbook.envs.builtin.question:Question",
    "reasoning_gym": "rollbook.envs.builtin.reasoning_gym_maths:ReasoningGymMaths",
    "terminal": "rollbook.envs.builtin.terminal.environment:Terminal",
}
"""Built-in environments: short name to class, imported when a run chooses it."""

VERIFIERS_PREFIX = "verifiers:"
"""`verifiers:NAME` is a taskset of verifiers. The rollout function `verifiers` plays it, in another virtual environment."""


class EnvConfig(BaseModel, frozen=True, extra="forbid"):
    """The section `[env]` of a run."""

    name: str = Field(default="number_guessing", min_length=1)
    """The environment: a built-in one (`number_guessing`, `delayed_number_guessing`, `arithmetic`, `maths`, `question`, `terminal`,
    `files`, `code`, `harbor`, `aws`, `reasoning_gym`), `module:Class` for your own, or `verifiers:NAME` for an installed taskset
    of verifiers. Where the run has reward functions and no rollout function, the default is `question`: each task asks its
    `question`, and the reply is scored. `env = "NAME"` is short for a section with a name only."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's class, the same for every episode. Values that differ by episode belong in the
    task. With `verifiers:NAME`: the `[env]` block of verifiers."""

    python: str | None = Field(default=None, min_length=1)
    """With `verifiers:NAME`: the Python of the virtual environment in which verifiers and the taskset are installed, such as
    `.venvs/verifiers/bin/python`. Relative to the config file."""

    max_threads: int = Field(default=64, ge=1)
    """The number of threads for environments with plain (not async) methods, and so the number of concurrent calls."""

    pool_size: int | None = Field(default=None, ge=1)
    """Serve this many environments from a separate process of the run. Unset: each worker creates its environments."""

    url: str | None = Field(default=None, pattern=r"^https?://")
    """Use the environments of this server, of Rollbook or of the `openenv` package. Unset: every worker creates its own."""

    token: SecretStr | None = None
    """The token of the server at `url`."""

    @model_validator(mode="after")
    def _verifiers_is_played_elsewhere(self) -> "EnvConfig":
        if not self.name.startswith(VERIFIERS_PREFIX):
            if self.python is not None:
                raise ValueError(f"python: it is for name = '{VERIFIERS_PREFIX}NAME' only; the name is {self.name!r}")
            return self
        strays = sorted(self.model_fields_set - {"name", "args", "python"})
        reason = f"{', '.join(strays)}: no effect with" if strays else "the rollout function `verifiers` must play"
        raise ValueError(f"{reason} name = {self.name!r}; remove {', '.join(strays) or 'rollout.function'}")

    @model_validator(mode="after")
    def _url_excludes_local_settings(self) -> "EnvConfig":
        ignored = sorted({"name", "args", "max_threads", "pool_size"} & self.model_fields_set)
        if self.url is not None and ignored:
            raise ValueError(
                f"{', '.join(ignored)}: these are settings of the server at url; remove them, or remove url"
            )
        if self.url is None and self.token is not None:
            raise ValueError("token: it is for the server at url, but url is not set")
        return self


class EnvServerConfig(BaseModel, frozen=True, extra="forbid"):
    """Capacity, time limits and access of an environment server."""

    max_sessions: int | None = Field(default=None, ge=1)
    """The number of concurrent sessions. Unset: the size of the pool, or 1024 if the pool has no limit."""

    connect_wait_s: float = Field(default=2.0, ge=0)
    """The longest wait of a connection for a free slot, before a 503. It covers the time in which an environment is closed."""

    max_reservation_wait_s: float = Field(default=600.0, gt=0)
    """The longest wait for a reservation that a client may request."""

    reservation_hold_s: float = Field(default=30.0, gt=0)
    """How long granted slots stay reserved for a group whose connections have not arrived."""

    acquire_s: float = Field(default=60.0, gt=0)
    """The longest wait of a session for its environment once it has a slot: a simulator may have to be restarted."""

    reset_s: float = Field(default=120.0, gt=0)
    """The longest reset. A session that takes longer is closed, and its environment is returned."""

    step_s: float = Field(default=120.0, gt=0)
    """The longest step. A session that takes longer is closed, and its environment is returned."""

    close_s: float = Field(default=20.0, gt=0)
    """The longest `close` of an environment. After that the session ends without it."""

    idle_s: float = Field(default=1800.0, gt=0)
    """A session without a message for this long is closed. Keep it above the longest generation of the policy."""

    max_steps: int | None = Field(default=None, ge=1)
    """The server ends an episode after this many steps. Unset: only the environment ends it."""

    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """The longest message of a client."""

    send_facts: bool = True
    """Send the environment's facts with observations. They are for viewers and may contain the solution."""

    playground: bool = False
    """Serve a web page to play by hand. Only with a pool of one environment, since a visitor occupies one."""

    token: SecretStr | None = None
    """Clients must send it (`Authorization: Bearer …`). Required if other machines can reach the server."""
