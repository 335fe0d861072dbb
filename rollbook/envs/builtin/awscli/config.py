"""The settings of the AWS environment: `args` of `[env]`, or the environment variables that its users know."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from rollbook.contracts.errors import RunError

# Variables known to users of the AWS RL environment. An argument in the config takes precedence.
ALIASES = {
    "AWS_RL_ENV_POOL_SIZE": "pool_size",
    "AWS_RL_ENV_MINISTACK_BASE_PORT": "base_port",
    "BACKEND_TYPE": "backend",
    "AWS_RL_ENV_CONFIRM_ACCOUNT": "confirm_account",
}


class AwsCliConfig(BaseModel, frozen=True, extra="forbid"):
    """Arguments of the environment `aws`."""

    backend: Literal["simulator", "aws"] = "simulator"
    """`simulator`: a MiniStack process for each session. `aws`: the real account of the credentials in the environment."""

    confirm_account: str | None = Field(default=None, pattern=r"^\d{12}$")
    """Required with the backend `aws`: the account that agents may change. Compared with the account of the credentials."""

    pool_size: int = Field(default=1, ge=1, le=256)
    """The number of concurrent sessions, each with its own simulator."""

    spares: int = Field(default=0, ge=0, le=16)
    """Additional running simulators that replace dead ones."""

    base_port: int = Field(default=4566, ge=0, le=65000)
    """Simulator i listens on 127.0.0.1, port `base_port` + i. 0: any free ports."""

    region: str = Field(default="us-east-1", min_length=1)
    """The default region of commands."""

    account: str = Field(default="111122223333", pattern=r"^\d{12}$")
    """The account number that agents see in a simulator."""

    command_s: float = Field(default=20.0, gt=0)
    """The time limit of one command."""

    max_output_chars: int = Field(default=8_000, ge=200)
    """Longer outputs are cut, with a remark for the agent."""

    max_memory_mb: int = Field(default=1_024, ge=128)
    """A slot (simulator and command line) that uses more memory when it is returned is replaced."""

    partial: float = Field(default=0.5, ge=0, lt=0.6)
    """The upper bound of the value of an unsolved state. Below the value of a solution with every hint."""

    hint_price: float = Field(default=0.85, ge=0.85, le=1)
    """Each hint multiplies the reward by this."""

    chaos: float = Field(default=0.0, ge=0)
    """Factor on the chance of faults during the episode, which grows with the tier. 0: no faults. `chaos_scale` of a row
    overrides it.
    """

    seed: int = 0
    """Selects names, drift and chaos for rows without a `seed`."""

    @model_validator(mode="after")
    def _real_accounts_are_confirmed(self) -> "AwsCliConfig":
        if self.backend == "aws" and self.confirm_account is None:
            raise ValueError(
                "backend `aws` lets agents change a real account, which costs money and cannot be undone: set "
                "confirm_account (or AWS_RL_ENV_CONFIRM_ACCOUNT) to its number"
            )
        if self.backend == "aws" and self.pool_size != 1:
            raise ValueError(f"backend `aws` uses one account, but pool_size is {self.pool_size}; set it to 1")
        return self

    @classmethod
    def read(cls, args: Mapping[str, Any], *, environ: Mapping[str, str], size: int | None = None) -> "AwsCliConfig":
        """Read arguments, then environment variables. Raises `RunError` with all problems."""
        known = {field: environ[name] for name, field in ALIASES.items() if environ.get(name)}
        given = {**known, **args} | ({} if size is None else {"pool_size": size})
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            names = {field: name for name, field in ALIASES.items() if field in known and field not in args}
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'env aws'}{_origin(e['loc'], names)}: {e['msg']}"
                for e in error.errors()
            )
            raise RunError(f"env.args: {faults}") from error


def _origin(location: tuple[int | str, ...], names: Mapping[str, str]) -> str:
    name = names.get(str(location[0])) if location else None
    return f" (from {name})" if name else ""
