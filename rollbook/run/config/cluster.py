"""Settings of a run on several machines."""

from pydantic import BaseModel, Field


class ClusterConfig(BaseModel, frozen=True, extra="forbid"):
    """Machines that serve the run in addition to the one on which it was started."""

    allow_join: bool = False
    """More processes may serve the run while it is running: those of `rollbook join`, on this or on other machines, and of
    `rollbook scale`. Clients then follow the list of members in the ledger. Implied by the two settings below."""

    policy: int = Field(default=0, ge=0)
    """Policy servers in addition to `inference.replicas`. `rollbook scale` changes the number while the run is running."""

    rollout: int = Field(default=0, ge=0)
    """Dispatchers, each with its workers, in addition to the first one."""

    host: str = "127.0.0.1"
    """Address on which the servers of this run listen. On any address but loopback every request needs a token of the run."""

    @property
    def has_members(self) -> bool:
        """Whether processes other than those of the plan may serve the run."""
        return self.allow_join or self.policy > 0 or self.rollout > 0
