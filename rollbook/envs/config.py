"""What an operator may set about the environment and the server that lends it."""

from typing import Any

from pydantic import BaseModel, Field, SecretStr, model_validator


class EnvConfig(BaseModel, frozen=True, extra="forbid"):
    """The section `[env]` of a run."""

    name: str = Field(default="number_guessing", min_length=1)
    """Which environment: a name of the catalog, or `module:Class` for one of your own."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's class, the same for every episode. What differs by episode belongs into the task."""

    max_threads: int = Field(default=64, ge=1)
    """Threads for environments with plain (not async) methods: how many of their calls can run at the same time."""

    pool_size: int | None = Field(default=None, ge=1)
    """Serve this many environments from a process of the run's own, isolated from the workers. Unset: each worker makes its
    environments.
    """

    url: str | None = Field(default=None, pattern=r"^https?://")
    """Play in the environments of this environment server. Unset: every rollout process makes its own."""

    token: SecretStr | None = None
    """What the server at `url` asks for."""

    @model_validator(mode="after")
    def _a_server_has_its_own_environment(self) -> "EnvConfig":
        strays = sorted({"name", "args", "max_threads", "pool_size"} & self.model_fields_set)
        if self.url is not None and strays:
            raise ValueError(f"{', '.join(strays)}: the server at url decides that; set it there, or remove url")
        if self.url is None and self.token is not None:
            raise ValueError("token: it is for the server at url, and there is no url")
        return self


class EnvServerConfig(BaseModel, frozen=True, extra="forbid"):
    """A server of environments: how many sessions, how long each thing may take, who may come in."""

    max_sessions: int | None = Field(default=None, ge=1)
    """Sessions at the same time. Unset: as many as the pool has environments, or 1024 where environments cost nothing."""

    connect_wait_s: float = Field(default=2.0, ge=0)
    """How long a connection waits for a place before it is refused with 503. It bridges the moment an environment is tidied up
    in.
    """

    max_ticket_wait_s: float = Field(default=600.0, gt=0)
    """The longest wait for a ticket that a client may ask for."""

    ticket_hold_s: float = Field(default=30.0, gt=0)
    """How long places that were granted to a group stay reserved for connections that do not come."""

    acquire_s: float = Field(default=60.0, gt=0)
    """How long a session may wait for its environment once it has a place: a simulator may have to be started anew."""

    reset_s: float = Field(default=120.0, gt=0)
    """The longest reset. A session that takes longer is ended, and its environment given back."""

    step_s: float = Field(default=120.0, gt=0)
    """The longest step. A session that takes longer is ended, and its environment given back."""

    close_s: float = Field(default=20.0, gt=0)
    """The longest tidying up of an environment. One that takes longer is left to its pool."""

    idle_s: float = Field(default=1800.0, gt=0)
    """A session without a message for this long is ended. Keep it above the longest generation of the policy."""

    max_steps: int | None = Field(default=None, ge=1)
    """Steps after which the server ends an episode. Unset: the environment decides alone."""

    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """The longest message a client may send."""

    send_facts: bool = True
    """Whether observations carry the environment's facts, which are for viewers and may tell the solution."""

    playground: bool = False
    """Serve a page to play by hand. Only with a single environment: a visitor would take one from the training."""

    token: SecretStr | None = None
    """Who connects must show it (`Authorization: Bearer …`). Needed wherever the server can be reached from other machines."""
