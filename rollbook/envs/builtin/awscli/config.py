"""What an operator may set about the AWS environment, in `[env] args` or by the environment variables its users know."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from rollbook.contracts.errors import RunError

# The one table of names that users of the AWS RL environment know; an argument in the config wins over them.
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
    """Needed with the backend `aws`: the number of the account that agents may change. Compared with what the account says."""

    pool_size: int = Field(default=1, ge=1, le=256)
    """Sessions that can play at the same time, each with a simulator of its own."""

    spares: int = Field(default=0, ge=0, le=16)
    """Simulators beyond `pool_size` that stand ready to replace one that died."""

    base_port: int = Field(default=4566, ge=0, le=65000)
    """Simulators listen on 127.0.0.1 from this port on, one each. 0: on any free ports."""

    region: str = Field(default="us-east-1", min_length=1)
    """Where commands go that name no region."""

    account: str = Field(default="111122223333", pattern=r"^\d{12}$")
    """The account number that agents see in a simulator."""

    command_s: float = Field(default=20.0, gt=0)
    """Seconds one command may take before it is stopped."""

    max_output_chars: int = Field(default=8_000, ge=200)
    """Longer outputs are cut, and the agent is told so."""

    max_memory_mb: int = Field(default=1_024, ge=128)
    """A slot (simulator and command line) that holds more when it is given back is replaced."""

    partial: float = Field(default=0.5, ge=0, lt=0.6)
    """What an environment that is almost right is worth at most. Below the worth of a solution with every hint."""

    hint_price: float = Field(default=0.85, ge=0.85, le=1)
    """Each hint multiplies the reward by this."""

    chaos: float = Field(default=0.0, ge=0)
    """Factor on the chances of faults while the agent works, which grow with the tier. 0: calm. A row may bring a `chaos_scale`."""

    seed: int = 0
    """Picks names, drift and chaos of tasks whose row has no `seed` of its own."""

    @model_validator(mode="after")
    def _real_accounts_are_confirmed(self) -> "AwsCliConfig":
        if self.backend == "aws" and self.confirm_account is None:
            raise ValueError(
                "backend `aws` lets agents change a real account, which costs money and cannot be undone: name the account in "
                "confirm_account (or AWS_RL_ENV_CONFIRM_ACCOUNT) to confirm"
            )
        if self.backend == "aws" and self.pool_size != 1:
            raise ValueError(
                f"backend `aws` has no pool: there is one account, and pool_size is {self.pool_size}; set it to 1"
            )
        return self

    @classmethod
    def read(cls, args: Mapping[str, Any], *, environ: Mapping[str, str], size: int | None = None) -> "AwsCliConfig":
        """Arguments first, then the environment. Raises `RunError` that names every fault."""
        known = {field: environ[name] for name, field in ALIASES.items() if environ.get(name)}
        given = {**known, **args} | ({} if size is None else {"pool_size": size})
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            names = {field: name for name, field in ALIASES.items() if field in known and field not in args}
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'aws environment'}{_origin(e['loc'], names)}: {e['msg']}"
                for e in error.errors()
            )
            raise RunError(f"env.args: {faults}") from error


def _origin(location: tuple[int | str, ...], names: Mapping[str, str]) -> str:
    name = names.get(str(location[0])) if location else None
    return f" (from {name})" if name else ""
